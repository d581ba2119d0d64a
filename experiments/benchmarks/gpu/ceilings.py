"""What an H200 can do at best, as measured there with torch's own copy, product and attention."""

COPY = 4.3e12
"""Bytes a second, read and written, of a copy within the device."""
MATMUL = 790e12
"""Operations a second of a large bf16 product of random numbers, through cuBLAS."""
CUDNN = 524e12
"""Operations a second of cuDNN's causal attention, 8 prompts of 2048 tokens, head dimension 128."""
