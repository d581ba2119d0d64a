"""Memory of a GPU that other processes of its host see: CUDA IPC, through the driver's own functions.

Torch shares storages, too, but counts who has them in /dev/shm, where a killed rank would leave its counts; and its
symmetric memory refuses two ranks on one GPU. What lies in the memory is no business of this module.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import torch

from engine.errors import EngineError

HANDLE = 64
"""Bytes of a handle (CU_IPC_HANDLE_SIZE)."""

_GRANULE = 2 << 20
"""Smaller allocations may share a block, of which IPC shows others the whole (CUDA driver API, cuIpcGetMemHandle)."""

_LAZY_PEER_ACCESS = 1
_NATIVE_ATOMICS = 3
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS and CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE),)


_Address = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (ctypes.POINTER(_Address), ctypes.c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemsetD8_v2": (_Address, ctypes.c_ubyte, ctypes.c_size_t),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Address), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Address,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetP2PAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int, ctypes.c_int),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


def host() -> bytes:
    """16 bytes that are the same in all processes of a host, and on no other."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # sandboxes may lack it
    told = platform.node() + (boot.read_text() if boot.exists() else "")
    return hashlib.sha256(told.encode()).digest()[:16]


def identity(device: torch.device) -> bytes:
    """16 bytes that name a GPU in every process, whatever its number is there."""
    return UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


def check_reach(device: torch.device, other: bytes) -> None:
    """Refuse a GPU whose memory this one can neither load nor change atomically; `other`: its `identity`."""
    index = _index(device)
    for peer in range(torch.cuda.device_count()):  # one that this process does not see is tried when it is opened
        if peer == index or identity(torch.device("cuda", peer)) != other:
            continue
        if not torch.cuda.can_device_access_peer(index, peer) or not _atomics(index, peer):
            raise EngineError(
                f"parallel: cuda:{index} cannot load and change the memory of cuda:{peer}; take GPUs with NVLink, or "
                "exchange by NCCL"
            )


def allocate(device: torch.device, nbytes: int) -> int:
    """The address of so many bytes of zeros, 2 MiB at least."""
    address, size = _Address(), -(-nbytes // _GRANULE) * _GRANULE
    with _current(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), size)
        _call("cuMemsetD8_v2", address, 0, size)
        torch.cuda.synchronize(device)  # before anybody else writes there
    return address.value


def free(device: torch.device, address: int) -> None:
    """What `allocate` gave, once nobody has it open."""
    with _current(device):
        _call("cuMemFree_v2", address)


def show(device: torch.device, address: int) -> bytes:
    """A handle by which other processes can open what `allocate` gave."""
    handle = _Handle()
    with _current(device):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def open_shown(device: torch.device, handle: bytes) -> int:
    """Where this device addresses what another process shows."""
    address = _Address()
    with _current(device):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_shown(device: torch.device, address: int) -> None:
    """What `open_shown` gave, once nothing of this device uses it."""
    with _current(device):
        torch.cuda.synchronize(device)
        _call("cuIpcCloseMemHandle", address)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """The driver's functions are about the context of the thread, which torch makes when it first needs one."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def _atomics(index: int, peer: int) -> bool:
    """Flags are raised by atomics in the other's memory, which PCIe does not carry."""
    found, devices = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    for device, number in zip(devices, (index, peer), strict=True):
        _call("cuDeviceGet", ctypes.byref(device), number)
    _call("cuDeviceGetP2PAttribute", ctypes.byref(found), _NATIVE_ATOMICS, *devices)
    return bool(found.value)


def _call(name: str, *arguments: Any) -> None:
    if code := getattr(_driver(), name)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        why = (text.value or b"unknown").decode()
        raise EngineError(f"parallel: the CUDA driver's {name} failed, {why} ({code}); exchange by NCCL instead")


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, kinds in _SIGNATURES.items():
        getattr(library, name).argtypes = kinds
    return library
