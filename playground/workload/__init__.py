"""Where load comes from: traces, distributions, sessions, saved files. `workloads` is the front, `source` the seam."""
