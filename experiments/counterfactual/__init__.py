"""A recorded run under another policy from some step on: `python -m experiments counterfactual`."""
