"""What stages waited for: by hand, against a cell by cell account of the definitions, and of simulated runs."""

from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.bubbles import CAUSES, idle_causes, idle_parts, shares
from analysis.metrics import bubble_ratio
from analysis.repetitions import apart
from playground.trace import read
from tests.playground.strategies import scenarios
from tests.playground.test_laws import traced


def step(id, planned, launched, spans, group=0, lane="main"):
    return {
        "step": id, "group": group, "lane": lane, "planned": planned, "launched": launched, "started": spans[0][0],
        "finished": spans[-1][1], "stage_started": [s for s, _ in spans] if len(spans) > 1 else None,
        "stage_finished": [f for _, f in spans] if len(spans) > 1 else None,
    }  # fmt: skip


def request(arrival, finished, rank=0, outcome="finished"):
    return {"arrival": arrival, "finished": finished, "rank": rank, "outcome": outcome}


def causes(requests, steps, looks=()):
    """By (group, stage), what is not 0."""
    table = pd.DataFrame(looks, columns=["now", "commits"]).astype({"commits": int})
    frame = pd.DataFrame(steps)
    rows = idle_causes(pd.DataFrame(requests), frame, frame, table).to_dict("records")
    named = ("busy", *CAUSES)
    return {(row["group"], row["stage"]): {name: row[name] for name in named if row[name]} for row in rows}


def test_a_pipeline_by_hand():
    """Two micro-batches; the second one is longer on stage 0, and the host is late with the third step."""
    steps = [
        step(0, 1, 2, [(2, 5), (6, 9)]),  # arrives at 1; a second for the host, one for the link
        step(1, 2, 2, [(5, 12), (12, 14)]),
        step(2, 10, 13, [(13, 15), (15, 18)]),  # could be planned when step 0 was back, at 9
    ]
    looks = [(1, 0), (2, 0), (10, 1), (14.5, 2), (18.5, 3)]
    requests = [request(1, 18), request(1, 14)]
    found = causes(requests, steps, looks)
    assert found[0, 0] == {"busy": 12, "host": 2, "drain": 3}
    assert found[0, 1] == {"busy": 8, "host": 1, "fill": 4, "upstream": 4}
    parts = shares(idle_causes(*frames(requests, steps, looks)))
    assert parts["upstream"] == 4 / 34
    assert sum(parts.values()) == pytest.approx(bubble_ratio(*frames(requests, steps, looks)[:2]))


def frames(requests, steps, looks):
    table = pd.DataFrame(looks, columns=["now", "commits"])
    return pd.DataFrame(requests), pd.DataFrame(steps), pd.DataFrame(steps), table


def test_one_sequence_has_nothing_ready_while_it_is_under_way():
    steps = [step(0, 0, 0, [(0, 1), (1, 2)]), step(1, 2, 2, [(2, 3), (3, 4)])]
    found = causes([request(0, 4)], steps, [(0, 0), (2, 1)])
    assert found[0, 0] == {"busy": 2, "unready": 1, "drain": 1}
    assert found[0, 1] == {"busy": 2, "fill": 1, "upstream": 1}


def test_nobody_there():
    steps = [step(0, 0, 0, [(0, 1)]), step(1, 5, 5.5, [(6, 7)])]
    found = causes([request(0, 2), request(5, 9), request(0, 20, outcome="rejected")], steps, [(0, 0), (5, 1)])
    assert found[0, 0] == {"busy": 2, "empty": 3, "host": 1, "unready": 1, "drain": 2}


def test_a_host_that_hears_late_and_a_policy_that_waits():
    """Both steps are launched 3 s after the completion before; the second one because the policy had itself woken."""
    steps = [step(0, 0, 0, [(0, 1)]), step(1, 4, 4, [(4, 5)]), step(2, 8, 8, [(8, 9)])]
    looks = [(0, 0), (4, 1), (5, 2), (8, 2), (9, 3)]
    assert causes([request(0, 9)], steps, looks)[0, 0] == {"busy": 3, "host": 3, "unready": 3}


def test_steps_planned_one_after_another_wait_for_the_host():
    """At 4 the loop hears of step 0, launches one step and plans another at once: the host was what lacked."""
    steps = [step(0, 0, 0, [(0, 1)]), step(1, 4, 5, [(5, 6)]), step(2, 5, 9, [(9, 10)])]
    assert causes([request(0, 10)], steps, [(0, 0), (4, 1), (5, 1)])[0, 0] == {"busy": 3, "host": 7}


def test_a_policy_that_goes_on_later_with_what_it_knew():
    """At 4 it launches one step; looks at 5, and launches nothing; has itself woken at 8."""
    steps = [step(0, 0, 0, [(0, 1)]), step(1, 4, 4, [(4, 5)]), step(2, 8, 8, [(8, 9)])]
    assert causes([request(0, 9)], steps, [(0, 0), (4, 1), (5, 1), (8, 1)])[0, 0] == {
        "busy": 3,
        "host": 3,
        "unready": 3,
    }


def test_a_repetition_that_nobody_looked_for():
    """It begins when it was decided, whatever the look before it brought."""
    steps = [step(0, 0, 0, [(0, 1)]), step(1, 3, 3, [(3, 4)]), step(2, 6, 7, [(7, 8)])]
    assert causes([request(0, 8)], steps, [(0, 0), (3, 1)])[0, 0] == {"busy": 3, "host": 3, "unready": 2}


def test_a_completion_from_a_clock_that_is_ahead():
    """Known at 4, it ended at 5 by its own host's clock: the account adds up all the same."""
    steps = [step(0, 0, 0, [(0, 1), (2, 5)]), step(1, 4, 4, [(6, 7), (7, 8)])]
    found = causes([request(0, 8)], steps, [(0, 0), (4, 1)])
    assert [sum(found[0, stage].values()) for stage in (0, 1)] == [8, 8]
    assert found[0, 0] == {"busy": 2, "unready": 3, "host": 2, "drain": 1}


def test_copies_are_no_work_and_lanes_beside_one_another_count_once():
    steps = [
        step(0, 0, 0, [(0, 3)], lane="prefill"),
        step(0, 0, 0, [(1, 4)], lane="decode"),
        step(0, 0, 0, [(4, 6)], lane="copy_in"),
    ]
    assert causes([request(0, 6)], steps, [(0, 0)])[0, 0] == {"busy": 4, "drain": 2}


def test_replicas_have_their_own_requests_and_the_same_makespan():
    steps = [step(0, 0, 0, [(0, 1)]), step(1, 4, 4, [(4, 6)], group=1)]
    found = causes([request(0, 1), request(3, 6, rank=1)], steps, [(0, 0), (3, 1), (4, 1)])
    assert found == {(0, 0): {"busy": 1, "empty": 5}, (1, 0): {"busy": 2, "empty": 3, "unready": 1}}


def test_what_happens_to_another_replica_is_no_news():
    steps = [step(0, 0, 0, [(0, 4)]), step(1, 5, 5, [(5, 6)], group=1)]
    found = causes([request(0, 4), request(3, 6, rank=1)], steps, [(0, 0), (3, 0), (5, 1)])
    assert found[1, 0] == {"busy": 1, "empty": 3, "unready": 2}


def test_a_run_without_steps():
    nothing = [pd.DataFrame(columns=list(step(0, 0, 0, [(0, 1)])))] * 2
    table = idle_causes(pd.DataFrame([request(0, 1)]), *nothing, pd.DataFrame({"now": [0.0], "commits": [0]}))
    assert set(shares(table).values()) == {0}


# --- cell by cell


@st.composite
def pipelines(draw):
    """Steps in order through stages, launched in order; requests anywhere; all times whole seconds."""
    stages, free, clock, steps = draw(st.integers(1, 3)), [0] * 3, 0, []
    gap = st.integers(0, 3)
    for id in range(draw(st.integers(1, 6))):
        planned = clock + draw(gap)
        clock = launched = planned + draw(gap)
        reached, spans = launched, []
        for stage in range(stages):
            begin = max(reached, free[stage]) + draw(gap)
            free[stage] = reached = begin + draw(st.integers(1, 3))
            spans.append((begin, reached))
        steps.append(step(id, planned, launched, spans))
    arrivals = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=4))
    requests = [request(arrival, arrival + lasted) for arrival, lasted in arrivals] or [request(0, 1)]
    return requests, steps


def cause_of(time, stage, requests, steps):
    """Of the second that begins then, without looks: decisions are heard of when they are planned."""
    spans = [(s["started"], s["finished"]) if s["stage_started"] is None
             else (s["stage_started"][stage], s["stage_finished"][stage]) for s in steps]  # fmt: skip
    if any(begin <= time < end for begin, end in spans):
        return "busy"
    there = [(r["arrival"], r["finished"]) for r in requests] + [(s["launched"], s["finished"]) for s in steps]
    if not any(begin <= time < end for begin, end in there):
        return "empty"
    later = [number for number, (begin, _) in enumerate(spans) if begin > time]
    if not later:
        return "drain"
    number = min(later)
    if time < steps[number]["planned"]:
        return "unready"
    if stage == 0 or time < steps[number]["launched"]:
        return "host"
    return "fill" if number == 0 else "upstream"


@given(pipelines())
def test_every_second_has_the_cause_that_the_definitions_say(run):
    requests, steps = run
    frame = pd.DataFrame(steps)
    first = min(min(r["arrival"] for r in requests), steps[0]["launched"])
    last = max(max(r["finished"] for r in requests), max(s["finished"] for s in steps))
    looks = pd.DataFrame({"now": [-inf], "commits": [0]})
    for row in idle_causes(pd.DataFrame(requests), frame, frame, looks).to_dict("records"):
        expected = dict.fromkeys(("busy", *CAUSES), 0)
        for time in range(first, last):
            expected[cause_of(time, row["stage"], requests, steps)] += 1
        assert {name: row[name] for name in expected} == expected


@given(pipelines())
def test_stretches_have_the_cause_of_each_of_their_seconds(run):
    requests, steps = run
    frame = pd.DataFrame(steps)
    looks = pd.DataFrame({"now": [-inf], "commits": [0]})
    parts = idle_parts(pd.DataFrame(requests), frame, frame, looks)
    assert (parts["end"] > parts["begin"]).all()
    for row in parts.itertuples():
        for time in range(int(row.begin), int(row.end)):
            assert row.cause == cause_of(time, row.stage, requests, steps)


@given(scenarios())
def test_stretches_add_up_to_the_causes(scenario):
    with TemporaryDirectory() as folder:
        traced(scenario, folder)
        tables = requests_to_looks(folder, scenario)
    totals, parts = idle_causes(*tables), idle_parts(*tables)
    for row in totals.to_dict("records"):
        mine = parts[(parts["group"] == row["group"]) & (parts["stage"] == row["stage"])]
        seconds = (mine["end"] - mine["begin"]).groupby(mine["cause"]).sum()
        assert {cause: seconds.get(cause, 0.0) for cause in CAUSES} == pytest.approx(
            {cause: row[cause] for cause in CAUSES}, abs=1e-9
        )
        assert (mine["begin"].to_numpy()[1:] >= mine["end"].to_numpy()[:-1] - 1e-12).all()


@given(scenarios())
def test_causes_add_up_to_the_makespan_and_merging_changes_none(scenario):
    merged, stepped = (
        measured(scenario.but(spec=replace(scenario.spec, repeats=repeats))) for repeats in (True, False)
    )
    total = merged[["busy", *CAUSES]].sum(axis=1)
    assert np.ptp([*total, *total[:1]] or [0.0]) < 1e-9
    assert (merged[list(CAUSES)] > -1e-9).all().all()
    assert np.allclose(merged, stepped, atol=1e-6)


def measured(scenario):
    with TemporaryDirectory() as folder:
        traced(scenario, folder)
        return idle_causes(*requests_to_looks(folder, scenario))


def requests_to_looks(folder, scenario):
    """Requests, steps, repetitions, looks."""
    requests, steps, slices, looks = (
        read(Path(folder), table).to_pandas() for table in ("requests", "steps", "slices", "looks")
    )
    return requests, steps, apart(steps, slices, scenario.spec.block_size), looks
