"""Which stage holds which layers?"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from playground.core import Spec
from playground.draft import Draft


@dataclass(frozen=True, slots=True)
class Static:
    """Layers stay where they were put at the start: spread evenly, unless `parallel.layers` says otherwise."""

    def __call__(self, draft: Draft) -> tuple[int, ...] | None:
        return None

    def check(self, spec: Spec) -> None: ...


@dataclass(frozen=True, slots=True)
class Weighted:
    """Layers by the speed of stages, from the first step on: the slowest stage is as fast as it can be.

    A stage with n layers takes n / speed, the last one (n + `head`) / speed, in layers of a stage of speed 1. `speeds`:
    one for each stage, relative; none: all alike, so that with `head` 0 layers are spread evenly. `head`: what the
    language model's head and sampling take, in layers. No stage takes more than `parallel.spare_layers` more than it
    began with. Layers are handed out one by one, each to the stage that is then the soonest done, which is optimal.
    Source: gLLM's `--assigned-layers` (c7dc791, `dist_utils.py`), which has people count.
    """

    speeds: tuple[float, ...] = ()
    head: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", tuple(self.speeds))  # a list where it was read from a file
        if not all(speed > 0 for speed in self.speeds):
            raise ValueError(f"policy.placement.speeds={list(self.speeds)} must all be more than 0")
        if not self.head >= 0:
            raise ValueError(f"policy.placement.head={self.head} must be 0 or more layers")

    def check(self, spec: Spec) -> None:
        _check_spare("weighted", spec)
        if self.speeds and len(self.speeds) != len(spec.layers):
            raise ValueError(
                f"policy.placement.speeds={list(self.speeds)} are {len(self.speeds)} stages: "
                f"name one for each of the {len(spec.layers)}"
            )

    def __call__(self, draft: Draft) -> tuple[int, ...] | None:
        chosen = self._balanced(draft.spec)
        return chosen if chosen != draft.layers else None

    def _balanced(self, spec: Spec) -> tuple[int, ...]:
        stages = range(len(spec.layers))
        speeds = self.speeds or (1.0,) * len(stages)
        layers = [1] * len(stages)

        def done(stage: int) -> tuple[float, int]:
            """When it would be, with one more; of equals first those that had more at the start."""
            time = (layers[stage] + 1 + self.head * (stage == stages[-1])) / speeds[stage]
            return time, layers[stage] - spec.layers[stage]

        for _ in range(sum(spec.layers) - len(stages)):
            layers[min([s for s in stages if layers[s] < spec.layers[s] + spec.spare_layers], key=done)] += 1
        return tuple(layers)


@dataclass(frozen=True, slots=True)
class DynaPipe:
    """Layers move off the last stage, which also samples, as far as that balances the pipeline (DynaPipe, NeurIPS'25).

    k layers go to the k (at most stages - 1) stages before it, k minimising |T_sample - k T_layer - k/m T_layer|, m of
    them taking some. Predicted, in seconds: T_layer = `layer_base` + `layer_per_token` tokens + `layer_per_key` keys
    of the step; T_sample = `sample_base` + `sample_per_row` decodes. A change is made when it was the choice of
    `window` steps in a row, each of at least `least_decodes` decodes; no stage takes more than `most_extra` layers, and
    the last one keeps one. A move costs the copy of the layer's KV over the link between the two stages, while both go
    on (`playground.sim.migration`).
    Source: DynaPipe (NeurIPS'25): rule and window from a translation of the paper; least decodes, one extra layer and
    the coefficients from its code (xhx1022/DynaPipe 69f69ad) as a third party's simulator quotes it.
    """

    layer_base: float
    layer_per_token: float
    sample_base: float
    sample_per_row: float
    layer_per_key: float = 0.0
    window: int = 25
    least_decodes: int = 5
    most_extra: int = 1
    _choices: dict[int, deque[tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The last ones, by rank."""

    def __post_init__(self) -> None:
        for name in ("layer_base", "layer_per_token", "layer_per_key", "sample_base", "sample_per_row"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"policy.placement.{name}={value} must be 0 or more seconds")
        for name in ("window", "most_extra"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"policy.placement.{name}={value} must be at least 1")

    def check(self, spec: Spec) -> None:
        _check_spare("dynapipe", spec)

    def __call__(self, draft: Draft) -> tuple[int, ...] | None:
        columns = draft.columns
        decodes = sum(
            [length == 1 and samples for length, samples in zip(columns.length, columns.samples, strict=True)]
        )
        if decodes < self.least_decodes:
            return None
        layer = self.layer_base + self.layer_per_token * draft.tokens
        layer += self.layer_per_key * (sum(columns.start) + sum(columns.length))
        chosen = self._balanced(draft.spec, layer, self.sample_base + self.sample_per_row * decodes)
        recent = self._choices.setdefault(draft.rank, deque(maxlen=self.window))
        recent.append(chosen)
        settled = len(recent) == self.window and recent.count(chosen) == self.window
        return chosen if settled and chosen != draft.layers else None

    def _balanced(self, spec: Spec, layer: float, sample: float) -> tuple[int, ...]:
        """From the layers of the start, not from those of now: k counts what left the last stage since then."""
        *others, last = spec.layers
        extra = min(self.most_extra, spec.spare_layers)
        most = min(extra * len(others), last - 1)

        def bubble(moved: int) -> float:
            takers = min(moved, len(others)) or 1
            return abs(sample - moved * layer - moved / takers * layer)

        moved = min(range(most + 1), key=bubble)
        each, more = divmod(moved, len(others))
        # The stages nearest to the last take first.
        first = len(others) - more
        taken = [count + each + (stage >= first) for stage, count in enumerate(others)]
        return (*taken, last - moved)


def _check_spare(name: str, spec: Spec) -> None:
    if not spec.spare_layers:
        raise ValueError(
            f"policy.placement={name}: no stage has room for another's layers; set parallel.spare_layers, "
            "with parallel.stages of at least 2"
        )
