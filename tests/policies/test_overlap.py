"""Prefills and decodes in lanes of their own: who is placed when, every law, what it brings. One unit is a second."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings

from playground.core import Request, Slice, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.contention import APART, TURNS
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill, PrefillFirst, Unified
from policies.composed import Composed
from policies.overlap import PrefillDecode
from tests.playground.fakes import Log
from tests.playground.laws import simulate
from tests.playground.strategies import Composition, scenarios

MANY = settings(max_examples=2 * settings.default.max_examples)


@dataclass(frozen=True)
class Laned(Composition):
    def policy(self) -> Composed:
        return replace(super().policy(), overlap=PrefillDecode())


@MANY
@given(scenarios(stages=1, lockstep=False))
def test_every_law_holds_with_lanes(scenario):
    composition = Laned(**vars(scenario.composition))
    log = simulate(scenario.but(composition=composition))
    for step in log.steps:
        for part in step.slices:
            assert part.lane in ("prefill", "decode")
            assert part.lane == "prefill" or part.length == 1
    assert not overtaken(log)


def overtaken(log) -> list[Slice]:
    """Slices that began before the last one of their sequence was done: their KV or their token was not there yet."""
    steps, ends, found = {step.id: step for step in log.steps}, {}, []
    for done in sorted(log.dones, key=lambda done: (done.started, done.step)):
        for part in steps[done.step].slices:
            if part.lane == done.lane:
                if done.started < ends.get((part.sequence, part.epoch), 0.0):
                    found.append(part)
                ends[part.sequence, part.epoch] = done.finished
    return found


def run(*requests: Request, budget=None, law=APART, overlap=None) -> Log:
    """A second a step, and one for each of its tokens."""
    spec = Spec(blocks=999, max_tokens=64, forwards_tokens=True)
    policy = Composed(budget or ChunkedPrefill(64), overlap=overlap or PrefillDecode())
    scheduler = Scheduler(spec, policy)
    log = Log(scheduler)
    backend = SimBackend(spec, Modelled(Linear(base=1.0, per_token=1.0)), law)
    serve(OpenLoop(list(requests)), scheduler, backend, log)
    return log


def finishes(log: Log, lane: str) -> list[float]:
    return [done.finished for done in log.dones if done.lane == lane]


SHORT, LONG = Request(0, 0.0, 1, 9), Request(1, 2.5, 30, 2)


@pytest.mark.parametrize("budget", [ChunkedPrefill(64), Unified(64), PrefillFirst(64)])
def test_a_long_prompt_does_not_hold_up_decodes(budget):
    """The prompt of one token is prefilled until 2, then decodes take 2 s each; the prompt of 30 starts when it comes,
    for its lane is idle, and slows no decode."""
    log = run(SHORT, LONG, budget=budget)
    assert finishes(log, "decode")[:8] == [4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0]
    assert finishes(log, "prefill") == [2.0, 2.5 + 31.0]


def test_lanes_that_take_turns_win_nothing_together():
    """Until both prompts and all decodes are done: 2 + 31 + 9 x 2 s of work, one after another or beside each other."""
    apart, turns = run(SHORT, LONG), run(SHORT, LONG, law=TURNS)
    assert turns.dones[-1].finished == pytest.approx(2.0 + 31.0 + 9 * 2.0)
    assert apart.dones[-1].finished < turns.dones[-1].finished


def test_a_sequence_decodes_when_its_prompt_came_back_and_not_before():
    """Chunks of 10: 11 s each; its only decode after the third."""
    log = run(replace(LONG, arrival=0.0), budget=ChunkedPrefill(10))
    assert finishes(log, "prefill") == [11.0, 22.0, 33.0]
    assert [(done.started, done.finished) for done in log.dones if done.lane == "decode"] == [(33.0, 35.0)]


def test_what_comes_while_a_lane_is_busy_is_its_next_step():
    """Two prompts of 10 wait for the one of 30 and are then computed together."""
    log = run(replace(LONG, arrival=0.0), Request(2, 1.0, 10, 1), Request(3, 2.0, 10, 1))
    assert finishes(log, "prefill") == [31.0, 31.0 + 21.0]


def test_who_comes_to_decode_joins_the_next_step_of_those_who_do():
    """The prompt of 6 is done at 9.5, amid a decode of the other; from 10 on both go together, 3 s a step."""
    log = run(Request(0, 0.0, 1, 7), Request(1, 2.5, 6, 3))
    assert finishes(log, "decode") == [4.0, 6.0, 8.0, 10.0, 13.0, 16.0]


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"stages": 2}, r"policy.overlap=prefill_decode and parallel.stages=2 do not compose: .* parallel.stages=1"),
        (
            {"ranks": 2, "lockstep": True},
            r"policy.overlap=prefill_decode and parallel.dp_attention=true do not compose",
        ),
    ],
)
def test_what_does_not_compose_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(Spec(blocks=9, **spec), Composed(ChunkedPrefill(8), overlap=PrefillDecode()))
