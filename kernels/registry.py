"""Which implementation of each operation runs: chosen once, by name, and handed to the model as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import cpu, reference
from kernels.batch import DeviceBatch, PagedBatch, SamplingRows
from kernels.composed import Parts

Kernel = Callable[..., Any]

AUTO = "auto"
"""The choice that leaves it to the registry."""


class Project(Protocol):
    """A projection that has been told its weight."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Mix(Protocol):
    """Experts that have been told their weights."""

    def __call__(self, x: Tensor, shares: Tensor, picks: Tensor, residual: Tensor) -> Tensor: ...


class Attend(Protocol):
    """Attention that has been told its batch: runs once for every layer."""

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None = None) -> Tensor: ...


class AttendLatent(Protocol):
    """Latent attention that has been told its batch: runs once for every layer."""

    def __call__(self, q: Tensor, pool: Tensor, rank: int, scale: float) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The chosen operations; `kernels.reference` says what each does."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """May overwrite its first argument."""
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor | None], Project]
    """May keep the weight in a layout of its own: hand over weights that nobody else uses."""
    norm_linear: Callable[[Tensor, float, Tensor, Tensor | None], Project]
    """Of norm weights, eps, weight and bias: x -> linear(rms_norm(x))."""
    norm_gated: Callable[[Tensor, float, Tensor, Tensor | None], Project]
    """Likewise: x -> silu_mul(linear(rms_norm(x)))."""
    add_linear: Callable[[Tensor, Tensor | None], Callable[[Tensor, Tensor], Tensor]]
    """Of weight and bias: (x, residual) -> residual + linear(x), which overwrites the residual."""
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor | None], Mix]
    """Of gate_up, down and where each of the model's experts is in them; may keep weights in a layout of its own."""
    write_kv: Callable[[Tensor, Tensor, Tensor], None]
    place_qkv: Callable[..., Tensor]
    """Norm of heads, rotary embedding and write to the pool in one; may overwrite its first argument."""
    attention: Callable[[PagedBatch | DeviceBatch], Attend]
    """A `DeviceBatch` is for implementations on a GPU only."""
    place_latent: Callable[..., None]
    """What `place_qkv` is for latent attention; overwrites queries."""
    mla_attention: Callable[[PagedBatch | DeviceBatch], AttendLatent]
    embedding: Callable[[Tensor, Tensor], Tensor]
    pick: Callable[[Tensor, SamplingRows | None], Tensor]
    count_tokens: Callable[[Tensor, Tensor, Tensor], None]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Need:
    """What the operations will be asked to do; what is None is not known and refuses nothing."""

    dtype: torch.dtype | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    experts: int | None = None
    kv_rank: int | None = None
    """Elements of latent attention's compressed vectors."""


Objection = Callable[[Need], str | None]
"""Why an implementation cannot do what is needed, in a few words."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to do one operation, the device types it runs on (empty: all), and what else must hold."""

    kernel: Kernel
    devices: tuple[str, ...] = ()
    condition: Callable[[], bool] | None = None
    objections: tuple[Objection, ...] = ()
    load: Callable[[], Kernel] | None = None
    """Finds the kernel when it is chosen, where importing it has a price."""
    note: str = ""
    """What to know before choosing it: what it leaves to others, and why it is not the default."""

    def runs_on(self, device: str, need: Need | None = None) -> bool:
        return self.objection(device, need) is None

    def objection(self, device: str, need: Need | None = None) -> str | None:
        """Why it does not run there; None if it does."""
        if self.devices and device not in self.devices:
            return f"runs on {', '.join(self.devices)} only"
        if self.condition is not None and not self.condition():
            return "not supported by this build of torch"
        need = need or Need()
        return next((reason for object_to in self.objections if (reason := object_to(need)) is not None), None)

    def loaded(self) -> Kernel:
        return self.kernel if self.load is None else self.load()


CPU, CUDA = ("cpu",), ("cuda",)
LEAST_CAPABILITY = (8, 0)


def _no_gpu(_: Need) -> str | None:
    """Kernels for a GPU cannot run here."""
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if (capability := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, needs {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return None


def _no_triton(_: Need) -> str | None:
    return None if _has("triton") else "triton is not installed"


@cache
def _has(module: str) -> bool:
    return find_spec(module) is not None


def _other_dtype(need: Need) -> str | None:
    taken = (torch.float32, torch.float16, torch.bfloat16)
    return (
        None if need.dtype is None or need.dtype in taken else f"dtype {need.dtype}, takes float32, float16, bfloat16"
    )


def _large_head(need: Need) -> str | None:
    return None if (need.head_dim or 0) <= 256 else f"head size {need.head_dim}, at most 256"


def _uneven_heads(need: Need) -> str | None:
    if need.heads and need.kv_heads and need.heads % need.kv_heads:
        return f"{need.heads} query heads over {need.kv_heads} KV heads"
    return None


def _wide_row(need: Need) -> str | None:
    return None if (need.hidden or 0) <= 1 << 15 else f"rows of {need.hidden}, at most {1 << 15}"


def _many_experts(need: Need) -> str | None:
    return None if (need.experts or 0) <= 1024 else f"{need.experts} experts, at most 1024"


def _wide_latent(need: Need) -> str | None:
    return None if (need.kv_rank or 0) <= 512 else f"compressed vectors of {need.kv_rank}, at most 512"


def _no_half(need: Need) -> str | None:
    halves = (torch.float16, torch.bfloat16)
    return None if need.dtype is None or need.dtype in halves else f"dtype {need.dtype}, takes float16, bfloat16"


def _no_flashinfer(_: Need) -> str | None:
    return None if _has("flashinfer") else "flashinfer is not installed (pip install flashinfer-python)"


def _odd_head(need: Need) -> str | None:
    sizes = (64, 128, 256)
    return None if need.head_dim is None or need.head_dim in sizes else f"head size {need.head_dim}, takes 64, 128, 256"


def _gpu(module: str, name: str, *objections: Objection) -> Implementation:
    """A kernel in Triton, imported when it is chosen: Triton takes a second to import."""

    def load() -> Kernel:
        return getattr(import_module(f"kernels.{module}"), name)

    def call(*arguments: Any, **options: Any) -> Any:
        return load()(*arguments, **options)

    return Implementation(call, CUDA, objections=(_no_triton, _no_gpu, _other_dtype, *objections), load=load)


def _projection(method: str, maker: str) -> Implementation:
    """A projection of `kernels.triton.linear`: `library` is cuBLAS with kernels around it, `tuned` the fastest way."""

    def load() -> Kernel:
        return getattr(getattr(import_module("kernels.triton.linear"), maker)(), method)

    return replace(_gpu("triton.linear", maker, _wide_row), load=load)


def _flashinfer() -> Implementation:
    """Its plans belong to one model, so each choice of it gets its own."""

    def load() -> Kernel:
        return import_module("kernels.flashinfer").Planners().attention

    found = _gpu("flashinfer", "Planners", _no_flashinfer, _no_half, _odd_head, _uneven_heads)
    return replace(found, load=load, note=FLASHINFER_NOTE)


REFERENCE_NOTE = "not for the engine on a GPU: it asks the host for lengths"
MIXTURE_NOTE = "not for the engine on a GPU: it asks the host which tokens are whose"
CUDNN_NOTE = (
    "takes first chunks of 256 tokens or more outside of graphs, Triton the rest; a third less time at 2048 tokens, "
    "but the host stops to plan at each new shape"
)
FLASHINFER_NOTE = (
    "takes what is outside of graphs, Triton the rest; not the default since nobody has measured it here; "
    "compiles with nvcc on first use"
)


def _composed(method: str) -> Mapping[str, Implementation]:
    """A projection with what is around it, put together from the parts that are best on each device."""
    plain = Parts(reference.rms_norm, reference.Linear, reference.silu_mul)
    fast = Parts(cpu.rms_norm, cpu.linear if cpu.can_pack() else reference.Linear, cpu.silu_mul)
    return {
        "reference": Implementation(getattr(plain, method)),
        "cpu": Implementation(getattr(fast, method), CPU),
        "cublas": _projection(method, "library"),
        "triton": _projection(method, "tuned"),
    }


_HEADS = (_large_head, _uneven_heads)

IMPLEMENTATIONS: Mapping[str, Mapping[str, Implementation]] = {
    "rms_norm": {
        "reference": Implementation(reference.rms_norm),
        "cpu": Implementation(cpu.rms_norm, CPU),
        "triton": _gpu("triton.norm", "rms_norm", _wide_row),
    },
    "add_rms_norm": {
        "reference": Implementation(reference.add_rms_norm),
        "cpu": Implementation(cpu.add_rms_norm, CPU),
        "triton": _gpu("triton.norm", "add_rms_norm", _wide_row),
    },
    "rotate": {"reference": Implementation(reference.rotate)},
    "silu_mul": {
        "reference": Implementation(reference.silu_mul),
        "cpu": Implementation(cpu.silu_mul, CPU),
        "triton": _gpu("triton.activation", "silu_mul"),
    },
    "linear": {
        "reference": Implementation(reference.Linear),
        "onednn": Implementation(cpu.linear, CPU, condition=cpu.can_pack),
        "cublas": Implementation(reference.Linear, CUDA, objections=(_no_gpu,)),
        "triton": _projection("linear", "tuned"),
    },
    "norm_linear": _composed("norm_linear"),
    "norm_gated": _composed("norm_gated"),
    "add_linear": _composed("add_linear"),
    "route": {
        "reference": Implementation(reference.route),
        "cpu": Implementation(cpu.route, CPU),
        "triton": _gpu("triton.routing", "route", _many_experts),
    },
    "experts": {
        "reference": Implementation(reference.Experts, note=MIXTURE_NOTE),
        "cpu": Implementation(cpu.Experts, CPU),
        "triton": _gpu("triton.experts", "Experts", _many_experts),
    },
    "write_kv": {"reference": Implementation(reference.write_kv)},
    "place_qkv": {
        "reference": Implementation(reference.place_qkv),
        "triton": _gpu("triton.qkv", "place_qkv", *_HEADS),
    },
    "attention": {
        "reference": Implementation(reference.Attention, note=REFERENCE_NOTE),
        "cpu": Implementation(cpu.Attention, CPU),
        "flashinfer": _flashinfer(),
        "cudnn": replace(_gpu("cudnn", "Attention", _no_half, *_HEADS), note=CUDNN_NOTE),
        "triton": _gpu("triton.attention", "Attention", *_HEADS),
    },
    "place_latent": {
        "reference": Implementation(reference.place_latent),
        "triton": _gpu("triton.latent", "place_latent", _wide_latent),
    },
    "mla_attention": {
        "reference": Implementation(reference.MlaAttention, note=REFERENCE_NOTE),
        "cpu": Implementation(cpu.MlaAttention, CPU),
        "triton": _gpu("triton.latent", "MlaAttention", _wide_latent),
    },
    "embedding": {
        "reference": Implementation(reference.embedding),
        "triton": _gpu("triton.activation", "embedding"),
    },
    "pick": {"reference": Implementation(reference.pick), "triton": _gpu("triton.sampling", "pick")},
    "count_tokens": {
        "reference": Implementation(reference.count_tokens),
        "triton": _gpu("triton.sampling", "count_tokens"),
    },
    "logprobs": {"reference": Implementation(reference.logprobs), "triton": _gpu("triton.sampling", "logprobs")},
}
"""By operation and name; the last one that runs on a device is its default."""


def available(op: str, device: str, need: Need | None = None) -> tuple[str, ...]:
    """Names of an operation's implementations on a device type, slowest first."""
    return tuple(name for name, entry in IMPLEMENTATIONS[op].items() if entry.runs_on(device, need))


def select(device: str = "cpu", choices: Mapping[str, str] | None = None, need: Need | None = None) -> Ops:
    """The operations for a device type, each the fastest there unless `choices` names another by operation.

    `need` says what they will be asked to do, so that what cannot is not chosen. A `ValueError` names what is available
    where a choice is not.
    """
    choices = choices or {}
    if unknown := [op for op in choices if op not in IMPLEMENTATIONS]:
        name = choices[unknown[0]]
        raise ValueError(f"kernels.{unknown[0]}={name}: no such operation; there are {', '.join(IMPLEMENTATIONS)}")
    return Ops(**{op: _kernel(op, device, choices.get(op, AUTO), need) for op in IMPLEMENTATIONS})


def chosen(op: str, device: str, name: str = AUTO, need: Need | None = None) -> str:
    """The name of the implementation that `select` takes for a choice."""
    names = available(op, device, need)
    if name == AUTO:
        return names[-1]
    if name not in names:
        raise ValueError(
            f"kernels.{op}={name} is not available on {device}{_why(op, name, device, need)}; "
            f"choose one of {', '.join((AUTO, *names))}"
        )
    return name


def _kernel(op: str, device: str, name: str, need: Need | None) -> Kernel:
    return IMPLEMENTATIONS[op][chosen(op, device, name, need)].loaded()


def _why(op: str, name: str, device: str, need: Need | None) -> str:
    """In brackets, unless nobody has heard of it."""
    entry = IMPLEMENTATIONS[op].get(name)
    return "" if entry is None else f" ({entry.objection(device, need)})"


def survey(
    device: str, choices: Mapping[str, str] | None = None, need: Need | None = None
) -> Iterator[tuple[str, str, str]]:
    """(operation, implementation, what becomes of it there and why) of everything that is registered."""
    choices = choices or {}
    for op, entries in IMPLEMENTATIONS.items():
        name = choices.get(op, AUTO)
        taken = chosen(op, device, name, need)
        only = len(available(op, device, need)) == 1
        why = "as chosen" if name != AUTO else "nothing else can" if only else "the fastest that can"
        for other, entry in entries.items():
            if (reason := entry.objection(device, need)) is not None:
                yield op, other, f"cannot: {reason}"
            else:
                yield op, other, _verdict(f"runs: {why}" if other == taken else "available", entry.note)


def _verdict(word: str, note: str) -> str:
    return f"{word} ({note})" if note else word
