"""Which policy wins where, and where nothing differs: `python -m experiments regimes`."""
