"""What every launch needs to know of the machine, and shapes as kernels want them."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from kernels.autotune import Store

INTERPRETED_SMS = 3
"""Stands for the number of multiprocessors under the interpreter: programs run one after another there."""

LOG2E = 1.4426950408889634


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return bool(triton.knobs.runtime.interpret)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once if each fills one multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


INTERPRETED_SHARED = 227 << 10


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return INTERPRETED_SHARED
    # The figure that Triton itself refuses launches by.
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def store(device: torch.device) -> Store | None:
    """The tuned configs of a device; none of the interpreter's."""
    return Store(torch.cuda.get_device_properties(device).name) if device.type == "cuda" else None


EARLY = True
"""Whether kernels may start while the one before them ends: programmatic dependent launch, from Hopper on.

A kernel that may waits before it reads what another has written; until then it can read weights. Every such kernel
must wait, or the one after it would not know that those before it have ended.
"""


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may start early; none where the device cannot."""
    if EARLY and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def upcasts(dtype: torch.dtype) -> bool:
    """Whether operands must become float32 before arithmetic: the interpreter takes bf16's bits for integers."""
    return interpreting() and dtype == torch.bfloat16


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`, as tensors in kernels need."""
    return 1 << max(value - 1, 0).bit_length()


def require(holds: bool, message: str) -> None:
    """Shapes are checked before a launch: a kernel would read out of bounds in silence."""
    if not holds:
        raise ValueError(message)


def contiguous_rows(name: str, *tensors: Tensor) -> None:
    """Kernels address the last axis by offset alone."""
    for tensor in tensors:
        require(tensor.stride(-1) == 1, f"{name}: the last axis must be contiguous, its stride is {tensor.stride(-1)}")


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
