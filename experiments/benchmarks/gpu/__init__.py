"""What `gpu_engine.py` and `gpu_kernels.py` run: parts of measurements on a real GPU."""
