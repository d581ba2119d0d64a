"""Regret: the program's optimum is that of trying everything, no policy beats what bounds say, kinds are told."""

import json
from functools import cache
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.__main__ import main
from experiments.regret import bounds, exact, greedy, rounds
from experiments.regret.problem import METRICS, Job, Room, computed, held, value
from playground.core import Request
from playground.workload import saved

POLICIES = ("mc_sf", "vllm_v1", "chunked_prefill", "orca", "sglang", "static", "vllm_v0")


def feasible(jobs, room, starts):
    last = max(start + job.output for job, start in zip(jobs, starts, strict=True))
    free = [[room.blocks, room.seats, room.tokens] for _ in range(last)]
    for job, start in zip(jobs, starts, strict=True):
        for k in range(job.output):
            free[start + k][0] -= -(-(job.prompt + k) // room.block_size)
            free[start + k][1] -= 1
            free[start + k][2] -= job.prompt if k == 0 else 1
    return all(amount >= 0 for one in free for amount in one)


def everything(metric, jobs, room):
    """The optimum without pauses, by trying all starts."""
    horizon = sum(job.output for job in jobs) + max(job.arrival for job in jobs)
    windows = [range(job.arrival, horizon) for job in jobs]
    return min(value(metric, jobs, starts) for starts in product(*windows) if feasible(jobs, room, starts))


def freest(metric, jobs, room):
    """The optimum of whoever may pause, and lose and regain KV at no cost: by states of how far each has come."""
    last = max(job.arrival for job in jobs) + sum(job.output for job in jobs)

    @cache
    def rest(now, done):
        if all(got == job.output for got, job in zip(done, jobs, strict=True)):
            return 0.0
        if now > last:
            return inf
        best = inf
        for advance in product(*[(0, 1) if job.arrival <= now and got < job.output else (0,)
                                 for got, job in zip(done, jobs, strict=True)]):  # fmt: skip
            going = [(job, got) for job, got, go in zip(jobs, done, advance, strict=True) if go]
            if (
                sum(-(-(job.prompt + got) // room.block_size) for job, got in going) > room.blocks
                or len(going) > room.seats
                or sum(1 if got else job.prompt for job, got in going) > room.tokens
            ):
                continue
            after = tuple(got + go for got, go in zip(done, advance, strict=True))
            best = min(best, _paid(now, done, after) + rest(now + 1, after))
        return best

    def _paid(now, done, after):
        if metric == "makespan":
            return 1.0
        marks = zip(jobs, done, after, strict=True)
        if metric == "ttft":
            return float(sum(now + 1 - job.arrival for job, old, new in marks if old == 0 and new == 1))
        return float(sum(now + 1 - job.arrival for job, old, new in marks if old < new == job.output))

    first = min(job.arrival for job in jobs)
    found = rest(first, (0,) * len(jobs))
    return found if metric == "makespan" else found / len(jobs)


tiny = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3).map(
    lambda rows: [Job(number, *row) for number, row in enumerate(rows)]
)
rooms = st.builds(Room, st.integers(4, 9), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(6, 9)).filter(
    lambda room: room.blocks * room.block_size >= 8
)


@settings(max_examples=20)
@given(tiny, rooms, st.sampled_from(METRICS))
def test_the_program_finds_what_trying_everything_finds(jobs, room, metric):
    solved = exact.solve(metric, jobs, room)
    assert solved.exact
    assert solved.value == solved.bound == pytest.approx(everything(metric, jobs, room))
    assert feasible(jobs, room, solved.starts) and value(metric, jobs, solved.starts) == pytest.approx(solved.value)


@settings(max_examples=20)
@given(tiny, rooms, st.sampled_from(METRICS))
def test_the_relaxation_is_below_whoever_may_do_anything(jobs, room, metric):
    best = freest(metric, jobs, room)
    assert bounds.least(metric, jobs, room) <= best + 1e-9
    assert best <= exact.solve(metric, jobs, room).value + 1e-9


def test_an_optimum_by_hand():
    """Memory for one of them at a time: 1, 2 and 4 rounds, the shortest first: (1 + 3 + 7) / 3."""
    jobs = [Job(0, 0, 6, 4), Job(1, 0, 6, 1), Job(2, 0, 6, 2)]
    room = Room(1, 16, 8, 64)
    assert exact.solve("latency", jobs, room).value == pytest.approx(11 / 3)
    assert exact.solve("ttft", jobs, room).value == pytest.approx((1 + 2 + 4) / 3)
    assert exact.solve("makespan", jobs, room).value == 7
    assert bounds.least("latency", jobs, room) == pytest.approx(11 / 3)
    assert bounds.least("makespan", jobs, room) == 7


def test_a_long_one_waits_where_memory_grows():
    """Six tokens of memory. 4 and 2 tokens fit together for a round only, and 3 + 2 for two."""
    room = Room(6, 1, 8, 64)
    assert held(Job(0, 0, 4, 3), room).tolist() == [4, 5, 6]
    assert computed(Job(0, 0, 4, 3)).tolist() == [4, 1, 1]
    jobs = [Job(0, 0, 4, 3), Job(1, 0, 2, 1)]
    assert exact.solve("latency", jobs, room).value == 2, "both at once: 4 + 2, then 5 and 6 alone"
    jobs = [Job(0, 0, 4, 3), Job(1, 0, 2, 2)]
    assert exact.solve("latency", jobs, room).value == 3.5, "2 + 5 tokens do not fit: 2 rounds, then 3"


def test_shortest_remaining_by_hand():
    """4 from 0 on, 1 from 1 on, 2 from 2 on: the first is interrupted twice."""
    assert bounds.shortest_remaining([0, 1, 2], [4, 1, 2]) == [2, 4, 7]
    assert bounds.shortest_remaining([5], [2]) == [7]


def test_a_better_schedule_is_looked_for():
    jobs = [Job(number, 0, 10, 1 + number % 5) for number in range(12)]
    room = Room(3, 16, 8, 512)
    found, starts = greedy.best("latency", jobs, room)
    assert feasible(jobs, room, starts) and value("latency", jobs, starts) == found
    assert greedy.best("latency", jobs, room) == (found, starts)


def test_a_stopped_program_says_so():
    jobs = [Job(number, number % 7, 5 + number * 7 % 50, 1 + number * 5 % 19) for number in range(26)]
    solved = exact.solve("latency", jobs, Room(8, 16, 64, 512), seconds=0.2)
    assert not solved.exact and solved.bound < solved.value
    assert solved.bound >= bounds.least("latency", jobs, Room(8, 16, 64, 512)) - 1e-9


SMALL = (
    "workload=poisson", "workload.requests=12", "workload.rate=30", "workload.max_length=120", "kv.blocks=12",
    "workload.lengths.prompt.mean=40", "workload.lengths.output.mean=8",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_bounds(seed):
    settings = rounds.in_rounds([*SMALL, f"seed={seed}"])
    found, room = rounds.requests(settings, 0.05, None), rounds.room(settings)
    jobs = rounds.jobs(found)
    least = {metric: bounds.least(metric, jobs, room) for metric in METRICS}
    best = {metric: exact.solve(metric, jobs, room) for metric in METRICS}
    for policy in POLICIES:
        played = rounds.play(rounds.in_rounds([*SMALL, f"policy={policy}"]), found)
        for metric in METRICS:
            assert played.values[metric] >= least[metric] - 1e-6, (policy, metric)
            if policy in ("mc_sf", "orca", "static"):  # neither pause, nor preempt, nor cut
                assert not played.losses
                assert played.values[metric] >= best[metric].bound - 1e-6, (policy, metric)


def test_a_schedule_that_leaves_no_choice_is_played_as_it_is_counted(tmp_path):
    """One request: 5 rounds, whatever the policy; two that fit together, the same."""
    alone = [Request(0, 3.0, 40, 5, 5)]
    played = rounds.play(rounds.in_rounds(["kv.blocks=10"]), alone)
    assert played.values == {"latency": 5, "ttft": 1, "makespan": 5}


# --- the command


def test_the_command(tmp_path, capsys):
    out = tmp_path / "regret.json"
    words = ["regret", *SMALL, "--each", "policy=mc_sf", "policy=orca", "--seconds", "20", "-o", str(out)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "bound 1: " in told and " exact: " in told and "lower bound (relaxation): " in told
    kept = json.loads(out.read_text())
    assert [bound["kind"] for bound in kept["bounds"]] == ["exact", "lower bound (relaxation)"]
    assert all(min(row["regret"]) >= -1e-6 for row in kept["policies"])
    assert main([*words[:-2], "--exact", "5", "--metric", "makespan"]) == 0
    told = capsys.readouterr().out
    assert "exact" not in told and "bound 1: " in told and "lower bound (relaxation)" in told


def test_requests_of_a_file_and_of_a_run(tmp_path, capfd, playground):
    file = tmp_path / "requests.jsonl"
    saved.write(file, [Request(0, 0.0, 6, 4, 4), Request(1, 0.0, 6, 1, 1), Request(2, 0.0, 6, 2, 2)])
    assert main(["regret", str(file), "kv.blocks=1", "--each", "policy=mc_sf"]) == 0
    told = capfd.readouterr().out
    assert "bound 1: 3.67  exact" in told and "policy=mc_sf     3.67      +0.00    1.000" in told
    run = playground("model=tiny", "kv.blocks=60", "workload.requests=8", "workload.rate=2500",
                     "workload.max_length=256", "policy=orca").run_dir  # fmt: skip
    assert main(["regret", str(run), "--each", "policy=mc_sf"]) == 0
    assert "as recorded" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["workload.requests=5"], "regret needs a memory to plan with: give kv.blocks=NUMBER"),
        (["kv.blocks=50", "parallel=pp2"], "regret is told of one device"),
        (["kv.blocks=50", "workload=closed_loop"], "workload: its arrivals answer to completions"),
        (["kv.blocks=50", "policy=orca"], "policy=orca: name policies with --each"),
        (["kv.blocks=50", "--most", "0"], "--most 0 must be at least 1"),
        (["kv.blocks=50", "--seconds", "0"], "--seconds 0 must be more than 0"),
        (["kv.blocks=50", "--each", "policy=orcas"], "policy=orcas: no such option"),
        (["nowhere.jsonl", "kv.blocks=50"], "nowhere.jsonl"),
        (["a.jsonl", "b.jsonl"], "b.jsonl: name one run or one file"),
        ([*SMALL, "--each", "policy=orca", "policy=mc_sf limits.max_seqs=3"], "changes what there is room for"),
        ([*SMALL, "kv.blocks=3", "--each", "policy=orca"], "kv.blocks"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, words, line):
    assert main(["regret", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert line in err[-1] and err[-1].startswith("error: ")
