"""Plausible workloads in which one policy loses most to another: `python -m experiments adversary`."""
