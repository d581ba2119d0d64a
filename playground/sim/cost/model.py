"""What every cost model answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from playground.sim.cost.shape import Shape


class Cost(NamedTuple):
    """Seconds that one step takes on one stage, apart by what they occupy, so that overlap can be modelled.

    `compute` and `memory` are the demands on the tensor cores and on device memory at their achievable rates.
    `kernels` is how long the kernels take one after another on an idle device, never less than either; compute /
    kernels and memory / kernels are the shares of the device that they leave to others. `communication` is time on
    the links within the stage, `host` the time to launch the kernels.
    """

    compute: float
    memory: float
    kernels: float
    communication: float
    host: float

    @property
    def device_time(self) -> float:
        """With the device to oneself: launching runs ahead of the kernels unless they are shorter than it."""
        return max(self.kernels, self.host) + self.communication


IDLE = Cost(0.0, 0.0, 0.0, 0.0, 0.0)
"""A step without tokens."""


class CostModel(Protocol):
    """Seconds of everything that a simulated backend does."""

    def stage(self, shape: Shape, stage: int) -> Cost:
        """The forward pass of one pipeline stage, on any one of its tensor-parallel ranks."""
        ...

    def host(self, shape: Shape) -> float:
        """Scheduling and input preparation of one step, before it is launched."""
        ...

    def transfer(self, shape: Shape) -> float:
        """Sending activations from one stage to the next."""
        ...

    def copy(self, blocks: int) -> float:
        """Copying so many KV blocks of every stage between device and host, all stages at once."""
        ...
