"""All sources of measurements, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from experiments.groundtruth import aiconfigurator, ispass26, mixed_steps, splitwise, vllm019
from experiments.groundtruth.case import Case, Skipped


class Source(NamedTuple):
    name: str
    """Of the files that its results go to."""
    cases: Callable[[], list[Case]]
    skipped: Callable[[], list[Skipped]]


SOURCES: Mapping[str, Source] = {
    module.__name__.rpartition(".")[2]: Source(module.SOURCE, module.cases, module.skipped)
    for module in (vllm019, aiconfigurator, ispass26, splitwise, mixed_steps)
}
