"""Many ranks on real devices: `python -m experiments.benchmarks.ranks`."""
