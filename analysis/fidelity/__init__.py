"""How far simulated runs are from the hardware runs that they are twins of, in four layers; see docs/fidelity.md."""
