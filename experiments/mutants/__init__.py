"""Policies that were changed by chance, and whether the conformance kit notices: `python -m experiments mutants`."""
