"""Quiet stretches in one go: what a cost model says of a stretch is, to the last bit, what it says of each step."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from playground.core import MAIN, Columns, Slice, Step
from playground.sim.cost import Linear, Roofline, Shape
from playground.sim.durations import Modelled, Ticking

CONF = Path(__file__).parents[2] / "conf"
BATCHES = ([0], [5000], [17, 900, 3], range(1, 300), [4096] * 64, [100_000] * 257)


def part(group: str, name: str):
    return instantiate(OmegaConf.load(CONF / group / f"{name}.yaml"))


def decodes(starts) -> list[Slice]:
    return [Slice(id, 0, 0, start, 1, True, (), MAIN) for id, start in enumerate(starts)]


@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_the_roofline_says_of_a_stretch_what_it_says_of_each_step(model):
    cost = Roofline(part("model", model), replace(part("device", "h200"), memory_bytes=1e13))
    assert isinstance(cost, Ticking)
    for starts in BATCHES:
        first = Shape.of_columns(Columns.of(decodes(starts)))
        stepped = [cost.stage(first.tick(ticks), 0).device_time for ticks in range(1, 70)]
        assert list(islice(cost.ticking(first), 69)) == stepped
        assert {cost.host(first.tick(ticks)) for ticks in range(70)} == {cost.host(first)}


def test_a_cost_model_that_knows_no_stretches_is_asked_step_by_step():
    cost = Linear(1.0, per_context=0.5, host_base=0.25)
    step = Step(0, 0, 0.0, tuple(decodes([3, 4])))
    assert not isinstance(cost, Ticking)
    assert list(islice(Modelled(cost).ticks(step), 2)) == [(0.25, 1 + 0.5 * 11), (0.25, 1 + 0.5 * 13)]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(0, 7, False)],
        [(5, 1, True), (0, 1, True), (9, 4, False), (0, 3, True)],
        [(5, 1, False), (8, 1, True)],
    ],
)
def test_a_shape_of_columns_is_that_of_the_slices(parts):
    slices = [Slice(id, 0, 0, start, length, samples, ()) for id, (start, length, samples) in enumerate(parts)]
    assert Shape.of_columns(Columns.of(slices)) == Shape.of(slices)
