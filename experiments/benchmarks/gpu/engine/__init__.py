"""The engine on a real GPU: checked against the CPU engine, and timed."""
