"""Papers' claims as programs: `python -m experiments run CARD`, `python -m experiments cards`."""
