"""What a run leaves behind, and what is left of it when it is killed."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

from playground.core import COPY_OUT, MAIN, Copy, Done, Request, Slice, Slo, Spec, Step
from playground.loop import serve
from playground.scheduler import Event, Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import SCHEMAS, NoTrace, Trace, array, expand, read
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from tests.playground.fakes import Greedy

ROOT = Path(__file__).parents[2]


def run(trace, requests=None, aborts=(), second=1.0, **spec) -> Scheduler:
    options = dict(blocks=20, block_size=4)
    cost = Linear(second, host_base=second / 4)
    backend = SimBackend(Spec(**(options | spec)), Modelled(cost, spec.get("stages", 1)))
    scheduler = Scheduler(backend.spec, Composed(ChunkedPrefill(6)))
    serve(OpenLoop(requests or [Request(0, 0.0, 8, 3)], aborts), scheduler, backend, trace)
    return scheduler


def rows(folder, table, *columns):
    return [tuple(row.values()) for row in read(folder, table, list(columns)).to_pylist()]


# --- what is written


def test_every_table_has_its_declared_schema(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace)
    for name, schema in SCHEMAS.items():
        assert read(tmp_path, name).schema.equals(schema), name


def test_tables_of_an_empty_run_can_be_read(tmp_path):
    Trace(tmp_path).close()
    assert {name: read(tmp_path, name).num_rows for name in SCHEMAS} == dict.fromkeys(SCHEMAS, 0)


def test_steps_say_when_and_how_much(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace)
    columns = [
        "step",
        "planned",
        "launched",
        "started",
        "finished",
        "host",
        "prefill_tokens",
        "decode_tokens",
        "context_tokens",
        "sampled",
    ]
    assert rows(tmp_path, "steps", *columns) == [
        (0, 0.0, 0.25, 0.25, 1.25, 0.25, 6, 0, 0, 0),
        (1, 1.25, 1.5, 1.5, 2.5, 0.25, 2, 0, 6, 1),
        (2, 2.5, 2.75, 2.75, 3.75, 0.25, 0, 1, 8, 1),
        (3, 3.75, 4.0, 4.0, 5.0, 0.25, 0, 1, 9, 1),
    ]


def test_steps_say_what_the_scheduler_looked_like(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace, [Request(0, 0.0, 6, 2), Request(1, 0.0, 8, 1)])
    columns = ["waiting", "running", "blocks_free", "sequences", "preempted"]
    assert rows(tmp_path, "steps", *columns) == [(1, 1, 18, 1, 0), (0, 2, 16, 2, 0), (0, 1, 18, 1, 0)]


def test_slices_rebuild_every_block_table(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace)
    assert rows(tmp_path, "slices", "step", "sequence", "start", "length", "samples", "blocks") == [
        (0, 0, 0, 6, False, [0, 1]),
        (1, 0, 6, 2, True, []),
        (2, 0, 8, 1, True, [2]),
        (3, 0, 9, 1, True, []),
    ]


def test_requests_say_how_they_ended(tmp_path):
    requests = [Request(0, 0.0, 8, 3), Request(1, 0.5, 999, 1), Request(2, 0.5, 8, 9)]
    with Trace(tmp_path) as trace:
        run(trace, requests, aborts=[(3.0, 2)])
    found = rows(tmp_path, "requests", "id", "admitted", "first_token", "finished", "output_length", "outcome")
    assert found == [
        (1, None, None, 0.5, 0, "rejected"),
        (2, 1.25, None, 3.0, 0, "aborted"),
        (0, 0.0, 2.5, 5.0, 3, "finished"),
    ]
    assert "KV blocks" in rows(tmp_path, "requests", "why")[0][0]


def test_arrivals_are_the_workload_as_it_came(tmp_path):
    request = Request(3, 0.5, 8, 5, 2, hashes=(7, 8), hash_block=4, priority=1, tenant="a", session="s", slo=Slo(1.0))
    with Trace(tmp_path) as trace:
        run(trace, [request])
    (row,) = read(tmp_path, "arrivals").to_pylist()
    slo = {"ttft_slo": 1.0, "tpot_slo": float("inf"), "e2el_slo": float("inf")}
    told = {name: getattr(request, name) for name in row if name not in ("look", *slo)}
    assert row == {"look": row["look"], **told, **slo, "hashes": [7, 8]}


def test_looks_say_when_decisions_were_taken_and_what_was_known(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace)
    assert rows(tmp_path, "looks", "now", "commits") == [(0.0, 0), (1.25, 1), (2.5, 2), (3.75, 3)]


def test_stages_are_recorded_where_there_are_several(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace, [Request(0, 0.0, 4, 1)], stages=2)
    assert rows(tmp_path, "steps", "stage_started", "stage_finished") == [([0.25, 1.25], [1.25, 2.25])]


def lanes_trace(folder, *order) -> None:
    scheduler = Scheduler(Spec(blocks=9), Greedy())
    copy = Copy(1, 1, 0, (1, 2), (0, 1), COPY_OUT)
    step = Step(0, 0, 0.0, (Slice(0, 0, 0, 4, 1, True, (), MAIN),), (copy,))
    with Trace(folder) as trace:
        trace.launched(step, scheduler.groups[0])
        for lane in order:
            trace.committed(Done(0, lane, 0.0, 0.0, 1.0, {0: (0,)} if lane == MAIN else {}), step)


@pytest.mark.parametrize("order", [(MAIN, COPY_OUT), (COPY_OUT, MAIN)])
def test_every_lane_has_a_row_in_whatever_order_they_end(tmp_path, order):
    lanes_trace(tmp_path, *order)
    found = rows(tmp_path, "steps", "lane", "decode_tokens", "copied_blocks")
    assert found == [(lane, int(lane == MAIN), 2 * (lane == COPY_OUT)) for lane in order]


def test_victims_are_counted_with_the_next_step(tmp_path):
    scheduler = Scheduler(Spec(blocks=9), Greedy())
    with Trace(tmp_path) as trace:
        for kind in ("recompute", "swap", "abort"):
            trace.happened(Event(0.0, kind, 0, 0))
        for id in range(2):
            step = Step(id, 0, 0.0, (Slice(0, 0, 0, 4, 1, True, ()),))
            trace.launched(step, scheduler.groups[0])
            trace.committed(Done(id, MAIN, 0.0, 0.0, 1.0, {}), step)
    assert rows(tmp_path, "steps", "preempted") == [(2,), (0,)]
    assert [kind for (kind,) in rows(tmp_path, "events", "kind")] == ["recompute", "swap", "abort"]


@pytest.mark.parametrize(
    "lanes", [(MAIN, MAIN, MAIN), ("prefill", "decode", "decode"), ("prefill", "decode", "prefill")]
)
def test_slices_are_those_of_their_steps_whether_or_not_they_are_alike(tmp_path, lanes):
    group = Scheduler(Spec(blocks=9), Greedy()).groups[0]
    first = tuple(Slice(id, 1, 0, 4, 1, True, (id,), lanes[0]) for id in range(3))
    second = (Slice(3, 1, 0, 0, 5, False, (3, 4), lanes[1]), Slice(4, 2, 1, 7, 1, True, (), lanes[2]))
    third = (Slice(5, 4, 1, 9, 3, True, (), lanes[1], 2),)
    with Trace(tmp_path) as trace:
        for id, slices in enumerate((first, second, third)):
            trace.launched(Step(id, 0, 0.0, slices), group)
    found = [Slice._make(row) for row in rows(tmp_path, "slices", *Slice._fields)]
    assert [part._replace(blocks=tuple(part.blocks)) for part in found] == [*first, *second, *third]
    assert rows(tmp_path, "slices", "step") == [(0,)] * 3 + [(1,)] * 2 + [(2,)]


def test_merged_rows_expand_to_one_a_repetition(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace, [Request(0, 0.0, 4, 7)], repeats=True)
    assert rows(tmp_path, "steps", "count") == [(1,), (6,)]
    steps, slices = expand(tmp_path, block_size=4)
    assert steps["step"].to_pylist() == slices["step"].to_pylist() == list(range(7))
    assert slices["start"].to_pylist() == [0, 4, 5, 6, 7, 8, 9]
    assert slices["blocks"].to_pylist() == [[0], [1], [], [], [], [2], []]
    assert steps["blocks_free"].to_pylist() == [19, 18, 18, 18, 18, 17, 17]
    assert steps["planned"].to_pylist()[1:] == steps["finished"].to_pylist()[:-1]


def test_victims_belong_to_the_first_of_merged_repetitions(tmp_path):
    with Trace(tmp_path) as trace:
        committed = trace.committed
        trace.committed = lambda *row: (committed(*row), trace.happened(Event(1.0, "recompute", 9, 0)))
        run(trace, [Request(0, 0.0, 4, 7)], repeats=True)
    assert expand(tmp_path, block_size=4)[0]["preempted"].to_pylist() == [0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", sorted({field.type for schema in SCHEMAS.values() for field in schema}, key=str))
@pytest.mark.parametrize("nulls", [False, True])
def test_columns_are_what_arrow_makes_of_the_values(kind, nulls):
    one = {"string": ["main", "", "ü"], "bool": [True, False, True], "double": [1.5, float("inf"), -0.0]}
    values = one.get(str(kind), [1, 0, -7])
    if isinstance(kind, pa.ListType):
        values = [(3, 4), (), (-5,)]
    if nulls and str(kind) != "string":
        values = [None, *values, None]
    for column in (values, values * 9, values[:1] * 20, [], tuple(values)):
        made = array(column, kind)
        made.validate(full=True)
        assert made.equals(pa.array(column, kind))


def test_a_trace_is_written_without_pandas(tmp_path):
    code = "import sys; from pathlib import Path; from tests.playground.test_trace import run; from playground.trace "
    code += "import Trace\nwith Trace(sys.argv[1]) as trace: run(trace)\nsys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, timeout=60).returncode == 0


def test_nothing_need_be_kept():
    assert not run(NoTrace()).live


# --- when it is read


def test_columns_can_be_chosen(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace)
    assert read(tmp_path, "steps", ["finished", "step"]).column_names == ["finished", "step"]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"steps\.parquet does not exist: .* is not the folder of a run"):
        read(tmp_path / "nowhere", "steps")


def test_closing_twice_is_closing_once(tmp_path):
    with Trace(tmp_path) as trace:
        run(trace)
    before = read(tmp_path, "steps")
    trace.close()
    assert read(tmp_path, "steps").equals(before)


def test_a_run_that_raised_is_kept(tmp_path):
    with pytest.raises(ZeroDivisionError), Trace(tmp_path) as trace:
        run(trace)
        raise ZeroDivisionError
    assert read(tmp_path, "steps").num_rows == 4


def test_what_was_flushed_can_be_read_while_the_run_goes_on(tmp_path):
    trace = Trace(tmp_path, flush_every=1000)
    run(trace, second=0.001)
    assert read(tmp_path, "steps").num_rows == 0
    trace.flush()
    assert read(tmp_path, "steps").num_rows == 4
    assert read(tmp_path, "steps", ["step"]).column_names == ["step"]
    trace.close()


def test_it_is_written_while_the_backend_has_work(tmp_path):
    """An engine's device would stand still meanwhile."""
    written = []

    class Watching(Trace):
        waiting = False

        def waits(self):
            self.waiting = True
            super().waits()
            self.waiting = False

        def flush(self):
            written.append(self.waiting)
            super().flush()

    with Watching(tmp_path, flush_every=3) as trace:
        run(trace, [Request(0, 0.0, 4, 60)], second=0.001)
    assert len(written) > 10 and all(written)


def test_many_slices_are_written_before_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("playground.trace.MOST_SLICES", 7)
    counts = []

    class Counting(Trace):
        def flush(self):
            counts.append(len(self._tables["slices"].rows))
            super().flush()

    with Counting(tmp_path) as trace:
        run(trace, [Request(0, 0.0, 4, 60)], second=0.001)
    assert set(counts) == {7}


KILLED = """
    import os, signal, sys
    from playground.trace import Trace
    from tests.playground.test_trace import run
    from playground.core import Request

    class Dying(Trace):
        def committed(self, done, step):
            super().committed(done, step)
            if step.id == 25:
                os.kill(os.getpid(), signal.SIGKILL)

    run(Dying(sys.argv[1], flush_every=10), [Request(0, 0.0, 4, 60)], second=0.001)
"""


def killed(folder) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), folder], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_a_killed_run_is_readable_up_to_its_last_flush(tmp_path):
    killed(tmp_path)
    assert rows(tmp_path, "steps", "step") == [(id,) for id in range(20)]
    assert read(tmp_path, "slices").num_rows >= 20
    assert rows(tmp_path, "arrivals", "id") == [(0,)]
    assert read(tmp_path, "requests").num_rows == 0


def test_a_batch_that_was_cut_off_is_left_out(tmp_path):
    killed(tmp_path)
    stream = tmp_path / "steps.arrows"
    stream.write_bytes(stream.read_bytes()[:-40])
    assert rows(tmp_path, "steps", "step") == [(id,) for id in range(10)]


def test_a_stream_without_a_single_batch_is_an_empty_table(tmp_path):
    (tmp_path / "steps.arrows").write_bytes(b"")
    table = read(tmp_path, "steps")
    assert isinstance(table, pa.Table) and table.num_rows == 0
