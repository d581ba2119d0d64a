"""Every Triton kernel on a real GPU: checked against the reference, tuned, timed."""
