"""Kernels in Triton for NVIDIA GPUs. Importing a module here imports Triton; the registry does so only when asked.

They also run on a CPU under TRITON_INTERPRET=1 (set before the first `import triton`): for tests, not for serving.
"""
