"""A designed set of steps, timed on any backend, and the cost models that say the same."""
