"""Workloads as users set them: shaping, rates, distributions, limits, determinism, messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Request
from playground.workload import saved, shaping
from playground.workload.arrivals import Constant, Gamma, Poisson, times
from playground.workload.errors import WorkloadError
from playground.workload.lengths import Fixed, Independent, LengthSet, Lognormal, Normal, Uniform, UniformBelow
from playground.workload.rows import Row
from playground.workload.servegen import read_pool
from playground.workload.synthetic import Prefixes
from playground.workload.workloads import (
    ClosedLoopWorkload,
    FileWorkload,
    ServeGenWorkload,
    SessionWorkload,
    SyntheticWorkload,
    TraceWorkload,
    Workload,
)

SMALL = Independent(Lognormal(100), Lognormal(20))


def gaps(requests: list[Request]) -> np.ndarray:
    return np.diff([request.arrival for request in requests])


def trace(**options: Any) -> list[Request]:
    return list(TraceWorkload(**({"trace": "sharegpt_timed_llama"} | options)).draw(seed=0))


def conv(**options: Any) -> list[Request]:
    return trace(trace="azure_conv", **options)


def served(workload: Workload, seed: int, latency: float = 1.0) -> list[Request]:
    """All that a source sends if every request takes so long."""
    source, running, seen = workload.source(seed), [], []
    while running or source.due() < inf:
        now = min([source.due(), *(end for end, _ in running)])
        for event in source.take(now):
            seen.append(event.request)
            running.append((now + latency, event.request.id))
        for end, number in [each for each in running if each[0] <= now]:
            running.remove((end, number))
            source.finished(number, end)
    return seen


# Traces


def test_a_trace_is_replayed_as_recorded() -> None:
    requests = conv()
    assert [request.id for request in requests] == list(range(19366))
    assert len(requests) / requests[-1].arrival == pytest.approx(5.53, abs=0.01)
    assert all(request.max_tokens == request.output_length for request in requests)


@pytest.mark.parametrize("name", ["azure_code", "mooncake_conversation", "mooncake_synthetic", "sharegpt_timed_qwen"])
@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_a_rate_stretches_every_trace_and_keeps_its_shape(name: str, rate: float) -> None:
    recorded, stretched = trace(trace=name, requests=400), trace(trace=name, requests=400, rate=rate)
    assert gaps(stretched).mean() == pytest.approx(1 / rate)
    factor = gaps(recorded).mean() * rate
    assert gaps(stretched) == pytest.approx(gaps(recorded) / factor, abs=1e-6)


def test_arrivals_can_be_drawn_anew_with_the_lengths_in_order() -> None:
    recorded, drawn = conv(requests=5000), conv(requests=5000, rate=4.0, arrivals="poisson")
    assert [r.prompt_length for r in drawn] == [r.prompt_length for r in recorded]
    assert gaps(drawn).mean() == pytest.approx(0.25, rel=0.05)
    assert gaps(drawn).std() / gaps(drawn).mean() == pytest.approx(1.0, abs=0.05)


def test_speedup_divides_times() -> None:
    assert conv(speedup=4.0, requests=9)[-1].arrival == pytest.approx(conv(requests=9)[-1].arrival / 4)


def test_a_window_starts_at_zero_and_is_cut_before_it_is_stretched() -> None:
    window = conv(start=600.0, duration=60.0)
    whole = [r for r in conv() if 600 <= r.arrival < 660]
    assert [r.arrival for r in window] == pytest.approx([r.arrival - 600 for r in whole])
    assert [r.prompt_length for r in window] == [r.prompt_length for r in whole]
    assert len(conv(start=600.0, duration=60.0, rate=1.0)) == len(whole)


def test_streaming_changes_nothing() -> None:
    streamed = TraceWorkload(trace="azure_conv", stream=True, rate=2.0, requests=500)
    assert streamed.source(0).total is None
    assert served(streamed, 0) == conv(rate=2.0, requests=500)
    assert TraceWorkload(trace="azure_conv", requests=500).source(0).total == 500


def test_mooncakes_grid_is_undone() -> None:
    recorded = trace(trace="mooncake_conversation", spread=0.0)
    spread = trace(trace="mooncake_conversation")
    assert len({r.arrival for r in recorded}) == 1180
    assert len({r.arrival for r in spread}) == len(spread)
    assert gaps(spread).min() > 0
    assert gaps(recorded).std() / gaps(recorded).mean() == pytest.approx(3.03, abs=0.01)
    assert gaps(spread).std() / gaps(spread).mean() < 0.5
    assert max(b.arrival - a.arrival for a, b in zip(recorded, spread, strict=True)) < 3.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.floats(0.1, 3))
def test_spreading_keeps_order_and_slot(stamps: list[int], slot: float) -> None:
    rows = [Row(float(stamp), 1, 1) for stamp in sorted(stamps)]
    spread = list(shaping.spread(rows, slot))
    for before, after in pairwise(spread):
        assert before.arrival < after.arrival
    for old, new in zip(rows, spread, strict=True):
        assert old.arrival <= new.arrival < old.arrival + slot


def test_the_cap_hides_the_future_and_cuts() -> None:
    for capped, known in zip(conv(max_tokens=300, requests=300), conv(requests=300), strict=True):
        assert capped.max_tokens == 300
        assert capped.output_length == min(300, known.output_length)


@given(st.integers(2, 3000), st.integers(1, 1000), st.integers(1, 3000))
def test_clipping_keeps_every_limit(max_length: int, max_output: int, max_prompt: int) -> None:
    hashes = tuple(range(125))
    rows = [Row(0.0, 2000, 900, hashes), Row(0.0, 5, 3), Row(0.0, 3, 1200)]
    clipped = list(shaping.clip_long(rows, max_prompt, max_output, max_length))
    assert len(clipped) == 3
    for row in clipped:
        assert 1 <= row.prompt_length <= max_prompt
        assert 1 <= row.output_length <= max_output
        assert row.prompt_length + row.output_length <= max_length
        assert len(row.hashes) in (0, -(-row.prompt_length // 16))
    kept = list(shaping.drop_long(rows, max_prompt, max_output, max_length))
    assert kept == [row for row, cut in zip(rows, clipped, strict=True) if row == cut]


def test_limits_drop_or_clip() -> None:
    dropped = conv(max_length=2048, min_prompt=10, requests=2000)
    assert max(r.prompt_length + r.max_tokens for r in dropped) <= 2048
    assert min(r.prompt_length for r in dropped) >= 10
    clipped = conv(max_length=2048, long="clip", requests=2000)
    assert clipped[-1].arrival < dropped[-1].arrival
    assert max(r.prompt_length + r.max_tokens for r in clipped) == 2048
    capped = conv(max_length=2048, long="clip", max_tokens=4096, requests=2000)
    assert max(r.prompt_length + r.max_tokens for r in capped) == 2048


def test_a_saved_workload_is_replayed_to_the_bit_and_can_be_sped_up(tmp_path: Path) -> None:
    requests = conv(requests=50, max_tokens=4096)
    saved.write(tmp_path / "load.parquet", requests)
    replay = FileWorkload(path=str(tmp_path / "load.parquet"), format="playground")
    assert list(replay.draw(1)) == requests
    faster = FileWorkload(path=str(tmp_path / "load.parquet"), format="playground", speedup=2.0)
    assert [r.arrival for r in faster.draw(1)] == [r.arrival / 2 for r in requests]


def test_unsorted_files_are_sorted_unless_streamed(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,arrived_at\n5,1,2.0\n6,1,1.0\n"
    (tmp_path / "mine.csv").write_text(text)
    options = {"path": str(tmp_path / "mine.csv"), "format": "lengths"}
    assert [r.prompt_length for r in FileWorkload(**options).draw(0)] == [6, 5]
    with pytest.raises(WorkloadError, match="needs requests sorted by arrival"):
        served(FileWorkload(**options, stream=True), 0)


def test_data_without_times_say_how_to_get_some() -> None:
    with pytest.raises(WorkloadError, match=r"no arrival times; set workload.arrivals=poisson and workload.rate"):
        trace(trace="sharegpt")
    assert len(trace(trace="sharegpt", requests=10, rate=1.0, arrivals="constant")) == 10


# Synthetic


@pytest.mark.parametrize(
    ("arrivals", "cv"), [(Poisson(), 1.0), (Gamma(0.25), 2.0), (Gamma(4.0), 0.5), (Constant(), 0.0)]
)
@pytest.mark.parametrize("rate", [0.2, 20.0])
def test_arrivals_have_their_rate_and_burstiness(arrivals: Any, cv: float, rate: float) -> None:
    workload = SyntheticWorkload(rate=rate, arrivals=arrivals, requests=20_000, lengths=Independent(Fixed(1), Fixed(1)))
    drawn = gaps(list(workload.draw(seed=3)))
    assert drawn.mean() == pytest.approx(1 / rate, rel=0.05)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_a_sweep_over_the_rate_changes_nothing_else() -> None:
    slow, fast = (list(SyntheticWorkload(rate=rate, lengths=SMALL).draw(5)) for rate in (1.0, 10.0))
    assert [r.prompt_length for r in slow] == [r.prompt_length for r in fast]
    assert [r.arrival for r in slow] == pytest.approx([r.arrival * 10 for r in fast])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {request.arrival for request in SyntheticWorkload(rate=inf, requests=9).draw(0)} == {0.0}


def test_a_duration_cuts() -> None:
    requests = list(SyntheticWorkload(rate=10.0, duration=5.0).draw(0))
    assert 25 < len(requests) < 80
    assert requests[-1].arrival < 5


@pytest.mark.parametrize(
    ("length", "low", "high", "mean"),
    [
        (Fixed(7), 7, 7, 7),
        (Uniform(1000, 0.5), 500, 1500, 1000),
        (UniformBelow(1000, 0.5), 500, 1000, 750),
        (UniformBelow(1000), 1, 1000, 500),
        (Lognormal(500.0, 1.0), 1, 500_000, 500),
        (Normal(500.0, 100.0), 1, 1500, 500),
        (Normal(1.0, 50.0), 1, 400, 41),
    ],
)
def test_lengths_keep_their_range_and_mean(length: Any, low: int, high: int, mean: float) -> None:
    drawn = length.draw(np.random.default_rng(1), 50_000)
    assert drawn.dtype == np.int64
    assert low <= drawn.min() and drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, rel=0.03)


def test_length_sets_keep_pairs_together() -> None:
    pairs = {tuple(pair) for pair in LengthSet("bwb").pairs().tolist()}
    prompts, outputs = LengthSet("bwb").draw(np.random.default_rng(0), 5000)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) <= pairs
    assert outputs.mean() == pytest.approx(1613, rel=0.02)
    assert LengthSet("arxiv", max_output=1024).pairs()[:, 1].max() <= 1024
    assert len(LengthSet("azure_conv").pairs()) == 19366


def test_prefix_groups_share_their_prefix_and_nothing_else() -> None:
    prefixes = Prefixes(groups=3, length=100)
    requests = list(SyntheticWorkload(requests=60, lengths=SMALL, prefixes=prefixes).draw(0))
    heads = {request.hashes[:6] for request in requests}
    assert len(heads) == 3
    tails = [block for request in requests for block in request.hashes[6:]]
    assert len(tails) == len(set(tails))
    assert not {block for head in heads for block in head} & set(tails)
    for request in requests:
        assert request.prompt_length > 100
        assert len(request.hashes) == request.prompt_length // 16


def test_tenants_and_priorities() -> None:
    requests = list(SyntheticWorkload(requests=200, lengths=SMALL, tenants=3, priorities=2).draw(0))
    assert {request.tenant for request in requests} == {"tenant-0", "tenant-1", "tenant-2"}
    assert {request.priority for request in requests} == {0, 1}


def test_closed_loop_workload() -> None:
    requests = served(ClosedLoopWorkload(requests=10, concurrency=4, lengths=SMALL), seed=0, latency=2.0)
    assert [request.arrival for request in requests] == [0.0] * 4 + [2.0] * 4 + [4.0] * 2


# Sessions


def test_agent_sessions_keep_their_order() -> None:
    requests = served(SessionWorkload(trace="miniswe", tool_time=1.0), seed=0, latency=0.5)
    assert len(requests) == 402
    recorded: dict[str, list[int]] = {}
    for request in trace(trace="miniswe"):
        recorded.setdefault(request.session, []).append(request.prompt_length)
    played: dict[str, list[Request]] = {}
    for request in requests:
        played.setdefault(request.session, []).append(request)
    assert {name: [r.prompt_length for r in calls] for name, calls in played.items()} == recorded
    for calls in played.values():
        assert all(after.arrival >= before.arrival + 0.5 for before, after in pairwise(calls))


def test_recorded_tool_times_are_scaled() -> None:
    slow, fast = (served(SessionWorkload(trace="miniswe", tool_scale=scale), 0, 0.0) for scale in (1.0, 0.5))
    calls = [[r for r in run if r.session == "miniswe-18"] for run in (slow, fast)]
    assert calls[0][1].arrival - calls[0][0].arrival == pytest.approx(2.58678)
    assert gaps(calls[1]) == pytest.approx(gaps(calls[0]) / 2)


def test_copies_of_sessions_share_no_more_than_sessions_did() -> None:
    played = served(SessionWorkload(trace="miniswe", sessions=45), seed=1)
    sessions: dict[str, set[int]] = {}
    for request in played:
        sessions.setdefault(request.session, set()).update(request.hashes)
    assert len(sessions) == 45
    originals = {name: blocks for name, blocks in sessions.items() if "#" not in name}
    assert len(originals) == 20
    name = next(name for name in sessions if name.endswith("#1"))
    common = sessions[name] & sessions[name.removesuffix("#1")]
    others = [blocks for other, blocks in originals.items() if other != name.removesuffix("#1")]
    assert common <= set().union(*others)
    assert len(common) < len(sessions[name]) / 2


def test_stated_delays_are_tool_times(tmp_path: Path) -> None:
    lines = [
        '{"session_id": "a", "timestamp": 0, "input_length": 5, "output_length": 2}',
        '{"session_id": "a", "delay": 3000, "input_length": 9, "output_length": 2}',
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    workload = SessionWorkload(trace=str(tmp_path / "mine.jsonl"), format="aiperf")
    first, second = served(workload, 0, latency=1.0)
    assert second.arrival == pytest.approx(first.arrival + 4.0)


# ServeGen


def test_servegen_is_as_busy_as_recorded_and_led_by_few_clients() -> None:
    requests = list(ServeGenWorkload(start=0.0, duration=1800.0).draw(0))
    windows = [window for window in read_pool("deepseek-r1").windows if window.start < 1800]
    assert len(requests) == pytest.approx(sum(window.rate for window in windows) * 600, rel=0.01)
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    [(_, most)] = Counter(r.tenant for r in requests).most_common(1)
    assert most > 0.15 * len(requests)


@pytest.mark.parametrize(("pool", "missing"), [("deepseek-r1", "pool"), ("m-large", "pool"), ("m-large", "drop")])
def test_servegen_is_scaled_to_a_rate(pool: str, missing: Any) -> None:
    requests = list(ServeGenWorkload(pool=pool, missing=missing, rate=5.0, start=1800.0, duration=900.0).draw(1))
    assert len(requests) / 900 == pytest.approx(5.0, rel=0.12)
    assert 0 <= requests[0].arrival <= requests[-1].arrival < 900


def test_servegen_lengths_are_those_of_the_study() -> None:
    requests = list(ServeGenWorkload(rate=0.2, start=0.0, duration=86400.0).draw(2))
    assert np.mean([r.prompt_length for r in requests]) == pytest.approx(1270, rel=0.1)
    assert np.mean([r.output_length for r in requests]) == pytest.approx(1530, rel=0.1)


# All


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "trace": lambda: TraceWorkload(trace="azure_conv", requests=50, rate=3.0, arrivals=Gamma(0.5)),
    "synthetic": lambda: SyntheticWorkload(requests=50, lengths=SMALL, prefixes=Prefixes(2, 32), tenants=2),
    "closed": lambda: ClosedLoopWorkload(requests=50, lengths=SMALL),
    "sessions": lambda: SessionWorkload(trace="miniswe", sessions=5, tool_time=2.0),
    "servegen": lambda: ServeGenWorkload(duration=20.0),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_requests(name: str) -> None:
    make = WORKLOADS[name]
    assert served(make(), seed=7) == served(make(), seed=7)
    assert served(make(), seed=7) != served(make(), seed=8)


def test_a_seed_of_its_own_fixes_a_workload() -> None:
    fixed = SyntheticWorkload(requests=9, lengths=SMALL, seed=3)
    assert list(fixed.draw(0)) == list(fixed.draw(1))


@given(st.integers(0, 2**32), st.floats(0.1, 50))
def test_times_are_endless_and_ordered(seed: int, rate: float) -> None:
    endless = times(Gamma(0.3), np.random.default_rng(seed), rate)
    drawn = [next(endless) for _ in range(2100)]
    assert drawn == sorted(drawn)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: conv(rate=-1), "workload.rate=-1 must be greater than 0"),
    (lambda: conv(rate="fast"), "workload.rate=fast must be a number"),
    (lambda: conv(speedup=0), "workload.speedup=0 must be greater than 0"),
    (lambda: conv(rate=1.0, speedup=2.0), "workload.speedup=2.0 does not go with workload.rate"),
    (lambda: conv(start=-5.0), "workload.start=-5.0 must be at least 0"),
    (lambda: conv(duration=0), "workload.duration=0 must be greater than 0"),
    (lambda: conv(requests=0), "workload.requests=0 must be at least 1"),
    (lambda: conv(requests=1.5), "workload.requests=1.5 must be a whole number"),
    (lambda: conv(arrivals="poisson"), "workload.rate=None must be a number"),
    (lambda: conv(arrivals="weibull", rate=1.0), "workload.arrivals=weibull must be constant or poisson, or an object"),
    (lambda: conv(long="cut"), "workload.long=cut must be one of clip, drop"),
    (lambda: conv(max_length=1), "workload.max_length=1 must be at least 2"),
    (lambda: conv(max_tokens=0), "workload.max_tokens=0 must be at least 1"),
    (lambda: conv(seed=-1), "workload.seed=-1 must be at least 0"),
    (lambda: conv(requests=1, rate=2.0), "workload.rate=2.0 cannot be reached by stretching"),
    (lambda: trace(trace="azure"), "workload.trace=azure: there is no such file, nor a shipped trace: azure_code"),
    (lambda: trace(hash_block=0), "workload.hash_block=0 must be at least 1"),
    (lambda: SyntheticWorkload(rate=0), "workload.rate=0 must be greater than 0"),
    (lambda: SyntheticWorkload(rate=None), "workload.rate=None must be greater than 0; inf sends all"),
    (lambda: SyntheticWorkload(arrivals=Gamma(0)), "workload.arrivals.burstiness=0 must be greater than 0"),
    (lambda: SyntheticWorkload(tenants=0), "workload.tenants=0 must be at least 1"),
    (
        lambda: SyntheticWorkload(lengths=Independent(Fixed(0), Fixed(1))),
        "workload.lengths.prompt.length=0 must be at least 1",
    ),
    (
        lambda: SyntheticWorkload(lengths=Independent(Fixed(1), Uniform(9, 1.0))),
        r"workload.lengths.output.ratio=1.0 must lie in \[0, 1\)",
    ),
    (
        lambda: SyntheticWorkload(lengths=Independent(Normal(0.5, 1.0), Fixed(1))),
        "workload.lengths.prompt.mean=0.5 must be at least 1",
    ),
    (lambda: SyntheticWorkload(lengths=LengthSet("sharegtp")), "workload.lengths.name=sharegtp: there is no such file"),
    (lambda: Prefixes(1, 8), "workload.prefixes.length=8 must be at least workload.prefixes.block=16"),
    (lambda: ClosedLoopWorkload(concurrency=0), "workload.concurrency=0 must be at least 1"),
    (lambda: ClosedLoopWorkload(think=-1), "workload.think=-1 must be at least 0"),
    (lambda: SessionWorkload(trace="miniswe", rate=0), "workload.rate=0 must be greater than 0"),
    (lambda: SessionWorkload(trace="miniswe", tool_time=-1), "workload.tool_time=-1 must be at least 0"),
    (lambda: ServeGenWorkload(pool="m-mid"), "workload.pool=m-mid must be one of deepseek-r1, m-large"),
    (lambda: ServeGenWorkload(start=86000.0), "must not exceed a day, 86400 s"),
    (
        lambda: FileWorkload(path="/no/such", format="burstgpt").source(0),
        "workload.path=/no/such: there is no such file",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_option_is_named_in_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_synthetic_requests_left_out_are_drawn_again() -> None:
    workload = SyntheticWorkload(requests=50, lengths=Independent(Uniform(100, 0.9), Fixed(10)), max_prompt=60)
    prompts = [request.prompt_length for request in workload.draw(0)]
    assert len(prompts) == 50
    assert max(prompts) <= 60


def test_impossible_limits_are_told() -> None:
    workload = SyntheticWorkload(requests=5, lengths=Independent(Fixed(100), Fixed(10)), max_length=50)
    with pytest.raises(WorkloadError, match=r"workload\.max_length=50 .* leave none of 500"):
        list(workload.draw(0))
