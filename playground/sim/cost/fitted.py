"""The cost model of logged steps: a few coefficients, none negative, that explain what the steps of runs took.

On one stage, in seconds (terms as in Niyama: reference in docs/cost-model.md):

    base + tokens * t + beyond_knee * max(t - knee, 0) + decode_context * K + prefill_pairs * P + sequences * n

t tokens, n sequences, K keys that decodes read, P (query, key) pairs of chunks. With `tokens` at 0 the first three are
max(weights' floor, compute); a slope below the knee is communication and element-wise work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from playground.model import ModelShape
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.roofline import Roofline
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import Bounds
from playground.sim.device import Device

Array = NDArray[np.float64]

FEATURES = ("base", "tokens", "beyond_knee", "decode_context", "prefill_pairs", "sequences")
HOST_FEATURES = ("base", "sequences")
VERSION = 1


@dataclass(frozen=True, slots=True)
class Line:
    """Coefficients, in seconds per unit of their feature, with the bounds of 95 % of bootstrap fits."""

    coefficients: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]


@dataclass(frozen=True, slots=True)
class Error:
    """Of predictions against `steps` measured ones; signed where it says bias, (predicted - measured) / measured."""

    steps: int
    mape: float
    median: float
    p95: float
    bias: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Error:
        relative = predicted / measured - 1
        size = np.abs(relative)
        return cls(
            len(measured),
            float(size.mean()),
            float(np.median(size)),
            float(np.percentile(size, 95)),
            float(relative.mean()),
        )

    def __str__(self) -> str:
        return (
            f"MAPE {self.mape:.1%}, median {self.median:.1%}, P95 {self.p95:.1%}, "
            f"bias {self.bias:+.1%} over {self.steps:,} steps"
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """What is saved: all that `Fitted` needs, and how good it is on steps that were not fitted to."""

    knee: int
    stages: list[Line]
    host: Line
    largest: dict[str, float]
    """Of each quantity, the largest value that was seen."""
    held_out: dict[str, Error]
    """By kind of step: all, decode, prefill, mixed."""
    sources: list[str]
    version: int = VERSION

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path | str) -> Fit:
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ValueError(f"it is of version {content['version']}, and this reads {VERSION}: fit again")
            content["stages"] = [Line(**stage) for stage in content["stages"]]
            content["host"] = Line(**content["host"])
            content["held_out"] = {kind: Error(**error) for kind, error in content["held_out"].items()}
            return cls(**content)
        except OSError as error:
            raise ValueError(f"cost.path={file}: cannot be read ({error.strerror}); make it with {MAKE}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cost.path={file}: no fit that this can read ({error}); make it with {MAKE}") from error


MAKE = "python -m playground.sim.cost fit RUN_DIR -o FILE"


def kind(shape: Shape) -> str:
    """decode, prefill or mixed."""
    if not shape.prefill_tokens:
        return "decode"
    return "mixed" if shape.decodes else "prefill"


@dataclass(frozen=True, slots=True)
class Fitted:
    """The coefficients in the file `path`; transfers and copies, which no step tells, from the sheet.

    A step larger than any that was logged is an error unless `extrapolate`. All of the time counts as compute and as
    memory, for the log does not say which; launching and collectives are in it.
    """

    path: str
    model: ModelShape
    device: Device
    tp: int = 1
    stages: int = 1
    layers: Sequence[int] | None = None
    block_size: int = 16
    extrapolate: bool = False
    _sheet: Roofline = field(init=False, repr=False, compare=False)
    _fit: Fit = field(init=False, repr=False, compare=False)
    _lines: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)
    _bounds: Bounds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = Fit.load(self.path)
        sheet = Roofline(self.model, self.device, self.tp, self.stages, self.layers, block_size=self.block_size)
        if sheet.stages != len(found.stages):
            raise ValueError(f"cost.path={self.path}: fitted to {len(found.stages)} stages, but stages={sheet.stages}")
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "_sheet", sheet)
        keep(self, "_fit", found)
        keep(self, "_lines", tuple(tuple(line.coefficients[name] for name in FEATURES) for line in found.stages))
        keep(self, "_bounds", Bounds(self.path, self.extrapolate))

    def stage(self, shape: Shape, stage: int) -> Cost:
        if not shape.tokens:
            return IDLE
        self._check(shape, self._fit.largest)
        base, tokens, beyond, context, pairs, sequences = self._lines[stage]
        busy = base + tokens * shape.tokens + context * shape.decode_context + pairs * shape.prefill_pairs
        busy += beyond * max(shape.tokens - self._fit.knee, 0) + sequences * shape.sequences
        return Cost(busy, busy, busy, 0.0, 0.0)

    def _check(self, shape: Shape, largest: Mapping[str, float]) -> None:
        for name, most in largest.items():
            if (value := getattr(shape, name)) > most:
                self._bounds.check(name, value, most)

    def host(self, shape: Shape) -> float:
        line: dict[str, Any] = self._fit.host.coefficients
        return float(line["base"] + line["sequences"] * shape.sequences)

    def transfer(self, shape: Shape) -> float:
        return self._sheet.transfer(shape)

    def copy(self, blocks: int) -> float:
        return self._sheet.copy(blocks)
