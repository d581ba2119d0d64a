"""What a worker is told when it starts: the model, the sizes, and where it stands among the others. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.errors import EngineError
from engine.overlap import NONE, Overlap
from engine.parallel.layout import Layout

WEIGHTS = ("checkpoint", "random")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The same for every rank. It travels as JSON, between hosts too: paths must exist on all of them.

    `path` is a checkpoint's folder, with `weights=random` any model's shape as `engine.load.random_model` takes it;
    `device` is cpu or cuda, of which each rank of a host takes another one. `sizes` are the backend's keywords.
    `rendezvous` is where ranks meet that compute together: tcp://HOST:PORT, or file://PATH on one host. `patience`:
    seconds after which one that does not come, or does not answer in the middle of a step, is an error. `share_gpus`:
    ranks take turns on the GPUs that there are, for tests and development; give `blocks`, since each would take most of
    the memory for itself.
    """

    path: str
    layout: Layout
    rendezvous: str
    weights: str = "checkpoint"
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    kernels: Mapping[str, str] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    patience: float = 120.0
    share_gpus: bool = False
    overlap: Overlap = NONE

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise EngineError(f"model.weights={self.weights} is not known; take one of {', '.join(WEIGHTS)}")
        if self.device not in ("cpu", "cuda"):
            raise EngineError(f"backend.device={self.device}: ranks choose their own devices; take cpu or cuda")
        if self.patience <= 0:
            raise EngineError(f"parallel.patience={self.patience} must be more than 0 seconds")

    def told(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> WorkerConfig:
        """What `told` said."""
        layout = dict(told["layout"])
        values = {
            "layout": Layout(**{**layout, "layers": tuple(layout["layers"])}),
            "overlap": Overlap(**told["overlap"]),
        }
        return cls(**{**told, **values})
