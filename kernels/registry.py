"""Which implementation of each operation runs: chosen once, by name, and handed to the model as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels import cpu, reference
from kernels.batch import PagedBatch

Kernel = Callable[..., Any]


class Project(Protocol):
    """A projection that has been told its weight."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Attend(Protocol):
    """Attention that has been told its batch: runs once for every layer."""

    def __call__(self, q: Tensor, pool: Tensor, scale: float) -> Tensor: ...


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
    write_kv: Callable[[Tensor, Tensor, Tensor], None]
    attention: Callable[[PagedBatch], Attend]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to do one operation, the device types it runs on (empty: all), and what else must hold."""

    kernel: Kernel
    devices: tuple[str, ...] = ()
    condition: Callable[[], bool] | None = None

    def runs_on(self, device: str) -> bool:
        fits = not self.devices or device in self.devices
        return fits and (self.condition is None or self.condition())


CPU = ("cpu",)

IMPLEMENTATIONS: Mapping[str, Mapping[str, Implementation]] = {
    "rms_norm": {"reference": Implementation(reference.rms_norm), "cpu": Implementation(cpu.rms_norm, CPU)},
    "add_rms_norm": {"reference": Implementation(reference.add_rms_norm), "cpu": Implementation(cpu.add_rms_norm, CPU)},
    "rotate": {"reference": Implementation(reference.rotate)},
    "silu_mul": {"reference": Implementation(reference.silu_mul), "cpu": Implementation(cpu.silu_mul, CPU)},
    "linear": {
        "reference": Implementation(reference.Linear),
        "onednn": Implementation(cpu.linear, CPU, condition=cpu.can_pack),
    },
    "write_kv": {"reference": Implementation(reference.write_kv)},
    "attention": {"reference": Implementation(reference.Attention), "cpu": Implementation(cpu.Attention, CPU)},
    "sample": {"reference": Implementation(reference.sample)},
}
"""By operation and name; the last one that runs on a device is its default."""


def available(op: str, device: str) -> tuple[str, ...]:
    """Names of an operation's implementations on a device type, slowest first."""
    return tuple(name for name, implementation in IMPLEMENTATIONS[op].items() if implementation.runs_on(device))


def select(device: str = "cpu", choices: Mapping[str, str] | None = None) -> Ops:
    """The operations for a device type, each the fastest there unless `choices` names another by operation.

    A `ValueError` names what is available where a choice is not.
    """
    choices = choices or {}
    if unknown := [op for op in choices if op not in IMPLEMENTATIONS]:
        raise ValueError(f"kernels.{unknown[0]}: no such operation; there are {', '.join(IMPLEMENTATIONS)}")
    return Ops(**{op: _kernel(op, device, choices.get(op)) for op in IMPLEMENTATIONS})


def _kernel(op: str, device: str, name: str | None) -> Kernel:
    names = available(op, device)
    if name is None:
        return IMPLEMENTATIONS[op][names[-1]].kernel
    if name not in names:
        raise ValueError(f"kernels.{op}={name} is not available on {device}; choose one of {', '.join(names)}")
    return IMPLEMENTATIONS[op][name].kernel
