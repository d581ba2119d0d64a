"""A run that goes on from some step on is the run itself where nothing is another, and any other run from the start."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from playground.check.branch import Branch, Spliced, Switch, lanes_of
from playground.check.parity import Divergence, replay
from playground.check.recording import load
from playground.core import MAIN, Request, Spec
from playground.loop import serve
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import Trace, read
from policies.budget import ChunkedPrefill, Static
from tests.playground.strategies import Composition, Scenario, scenarios

COUNTED = ["step", "group", "lane", "prefill_tokens", "decode_tokens", "sampled", "blocks_free", "preempted"]
TIMED = ["planned", "launched", "started", "finished"]


def record(scenario, folder, policy=None, cost=None):
    """A run's folder, as far as a branch reads it."""
    backend = SimBackend(scenario.spec, Modelled(cost or scenario.cost, scenario.spec.stages))
    with Trace(folder) as trace:
        serve(scenario.source(), scenario.scheduler(policy or scenario.composition.policy()), backend, trace)
    (Path(folder) / "run.json").write_text(json.dumps({"spec": asdict(scenario.spec)}))


def branched(scenario, recorded, folder, at, before, after):
    recording = load(recorded)
    backend = SimBackend(scenario.spec, Modelled(scenario.cost, scenario.spec.stages))
    backend.durations = Spliced(recording, at, backend.durations)
    switch = Switch(before, after)
    with Trace(folder) as trace:
        branch = Branch(recording, backend, scenario.source(), switch, at, trace)
        branch.serve(scenario.scheduler(switch))
    return branch


PLAIN = {"steps", "slices", "requests"}
"""Tables that do not say when a clock was looked at."""


def alike(one, other):
    """Times up to rounding."""
    for name in PLAIN:
        mine, theirs = (read(folder, name).to_pylist() for folder in (one, other))
        assert len(mine) == len(theirs), name
        for row, twin in zip(mine, theirs, strict=True):
            for column, value in row.items():
                assert twin[column] == _about(value), (name, column, row, twin)


def _about(value):
    floats = isinstance(value, float) or (isinstance(value, list) and value and isinstance(value[0], float))
    return pytest.approx(value, abs=1e-9) if floats else value


def can_be_replayed(scenario, recording):
    """Of completions of several groups at one instant a recording does not say which was first."""
    try:
        replay(recording, scenario.scheduler(scenario.composition.policy()))
    except Divergence:
        return False
    return True


@settings(max_examples=2 * settings.default.max_examples)
@given(scenarios(), st.floats(0, 1))
def test_going_on_as_before_changes_nothing(scenario, share):
    """The very policy with all that it remembers, the very durations: wherever it branches."""
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        record(scenario, one)
        recording = load(one)
        assume(recording.decisions and lanes_of(recording) <= {MAIN} and can_be_replayed(scenario, recording))
        policy = scenario.composition.policy()
        at = round(share * (len(recording.decisions) - 1))
        branch = branched(scenario, one, other, at, policy, policy)
        assert branch.instant is not None
        alike(one, other)


MANY = tuple(Request(id, 0.004 * id, 6 + 5 * id % 11, 4 + 3 * id % 7) for id in range(14))
CROWDED = Scenario(Spec(blocks=14, block_size=4, max_tokens=16), MANY, Composition(ChunkedPrefill(16)))


def columns(folder, names, until=None):
    rows = [tuple(row.values()) for row in read(folder, "steps", names).to_pylist()]
    return rows[:until]


@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_before_the_branch_it_is_the_recorded_run_and_after_it_another_policys(tmp_path, at):
    record(CROWDED, tmp_path / "one")
    record(CROWDED, tmp_path / "static", Composition(Static(3)).policy())
    branch = branched(
        CROWDED, tmp_path / "one", tmp_path / "other", at, CROWDED.composition.policy(), Composition(Static(3)).policy()
    )
    assert columns(tmp_path / "other", COUNTED, at) == columns(tmp_path / "one", COUNTED, at)
    assert columns(tmp_path / "other", COUNTED) != columns(tmp_path / "one", COUNTED)
    assert branch.instant == (columns(tmp_path / "one", ["planned"])[at - 1][0] if at else 0.0)
    if at == 0:
        assert columns(tmp_path / "other", COUNTED) == columns(tmp_path / "static", COUNTED)


def test_recorded_steps_take_what_they_took_and_later_ones_what_the_model_says(tmp_path):
    """Recorded at 20 ms a step; the model says 10. What was in flight at the branch ends as recorded."""
    record(CROWDED, tmp_path / "one", cost=Linear(0.02))
    policy = CROWDED.composition.policy()
    branched(CROWDED, tmp_path / "one", tmp_path / "other", 5, policy, policy)
    took = [finished - started for started, finished in columns(tmp_path / "other", ["started", "finished"])]
    assert took[:5] == pytest.approx([0.02] * 5) and took[5:] == pytest.approx([0.01] * len(took[5:]))
    assert columns(tmp_path / "other", TIMED, 5) == [pytest.approx(row) for row in columns(tmp_path / "one", TIMED, 5)]


def test_another_policy_may_run_ahead(tmp_path):
    spec = Spec(blocks=60, block_size=4, max_tokens=16, forwards_tokens=True)
    scenario = CROWDED.but(spec=spec)

    policy, ahead = (Composition(ChunkedPrefill(16), run_ahead=depth).policy() for depth in (1, 2))
    record(scenario, tmp_path / "one")
    branched(scenario, tmp_path / "one", tmp_path / "other", 4, policy, ahead)
    rows = columns(tmp_path / "other", ["planned", "finished"])
    overlaps = [later[0] < earlier[1] - 1e-9 for earlier, later in pairwise(rows)]
    assert not any(overlaps[:3]) and any(overlaps[4:])


def test_answers_are_as_long_as_they_were(tmp_path):
    """The workload does not know; the recording does."""
    known = tuple(Request(one.id, one.arrival, one.prompt_length, 20, 3 + one.id % 5) for one in MANY)
    record(CROWDED.but(requests=known), tmp_path / "one")
    unknown = tuple(Request(one.id, one.arrival, one.prompt_length, 20) for one in MANY)
    policy = CROWDED.composition.policy()
    branched(CROWDED.but(requests=unknown), tmp_path / "one", tmp_path / "other", 6, policy, policy)
    lengths = [sorted(columns_of(tmp_path / name)) for name in ("one", "other")]
    assert lengths[0] == lengths[1]


def columns_of(folder):
    return [(row["id"], row["output_length"]) for row in read(folder, "requests", ["id", "output_length"]).to_pylist()]
