"""How much a policy loses to the best there could have been: `python -m experiments regret`."""
