"""The client side of the loop: order, concurrency, sessions, aborts."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Abort, Arrive, Request
from playground.workload.errors import WorkloadError
from playground.workload.source import ClosedLoop, OpenLoop, Session, Sessions, Source


def request(number: int, arrival: float = 0.0) -> Request:
    return Request(number, arrival, prompt_length=8, max_tokens=4, output_length=4)


def drain(source: Source, latency: float = 1.0) -> list[tuple[float, int]]:
    """(arrival, id) of everything, in a world where each request takes so long."""
    running: list[tuple[float, int]] = []
    seen: list[tuple[float, int]] = []
    while running or source.due() < inf:
        now = min([source.due(), *(end for end, _ in running)])
        for event in source.take(now):
            if isinstance(event, Arrive):
                assert event.request.arrival <= now
                seen.append((event.request.arrival, event.request.id))
                running.append((now + latency, event.request.id))
        for end, number in sorted(running):
            if end <= now:
                running.remove((end, number))
                source.finished(number, end)
    return seen


@given(st.lists(st.floats(0, 100), max_size=30), st.lists(st.floats(0, 120), max_size=8))
def test_open_loop_hands_out_each_request_once_in_order(arrivals: list[float], instants: list[float]) -> None:
    requests = [request(number, at) for number, at in enumerate(sorted(arrivals))]
    source = OpenLoop(requests)
    assert source.total == len(requests)
    taken = []
    for now in [*sorted(instants), 200.0]:
        taken += [event.request for event in source.take(now)]
        assert all(each.arrival <= now for each in taken)
        assert source.due() > now
    assert taken == requests


def test_open_loop_streams_an_iterator_one_request_at_a_time() -> None:
    read = []

    def endless():
        number = 0
        while True:
            read.append(number)
            yield request(number, float(number))
            number += 1

    source = OpenLoop(endless())
    assert source.total is None
    assert [event.request.id for event in source.take(2.5)] == [0, 1, 2]
    assert len(read) == 4
    assert source.due() == 3.0


@pytest.mark.parametrize(
    ("arrivals", "numbers"), [([1.0, 0.5], [0, 1]), ([1.0, 1.0], [3, 2]), ([-1.0], [0]), ([0.0, nan], [0, 1])]
)
def test_open_loop_refuses_requests_out_of_order(arrivals: list[float], numbers: list[int]) -> None:
    requests = [request(number, at) for number, at in zip(numbers, arrivals, strict=True)]
    with pytest.raises(WorkloadError, match=f"request {numbers[-1]}: arrival=.* needs requests sorted by arrival"):
        OpenLoop(requests).take(10.0)


def test_aborts_come_in_order_after_their_request_and_not_once_it_ended() -> None:
    source = OpenLoop([request(0), request(1), request(2, 1.0)], aborts=[(1.0, 0), (2.0, 1), (0.0, 1), (3.0, 2)])
    assert source.take(0.0) == [Arrive(request(0)), Arrive(request(1)), Abort(1)]
    assert source.due() == 1.0
    source.finished(0, 0.5)
    assert source.take(1.0) == [Arrive(request(2, 1.0))]
    # The second abort of 1 means nothing any more.
    assert source.due() == 3.0
    assert source.take(9.0) == [Abort(2)]
    assert source.due() == inf


@given(st.integers(0, 20), st.integers(1, 8), st.floats(0, 3), st.floats(0.1, 5))
def test_closed_loop_keeps_its_concurrency(count: int, concurrency: int, think: float, latency: float) -> None:
    source = ClosedLoop([request(number) for number in range(count)], concurrency, think)
    seen = drain(source, latency)
    assert [number for _, number in seen] == list(range(count))
    for at, _ in seen:
        running = sum(start <= at < start + latency for start, _ in seen)
        assert running <= concurrency
    if count > concurrency:
        assert seen[concurrency][0] == pytest.approx(latency + think)


def test_closed_loop_waits_for_answers() -> None:
    source = ClosedLoop((request(number) for number in range(9)), concurrency=2, think=0.5)
    assert source.total is None
    assert len(source.take(100.0)) == 2
    assert source.due() == inf
    source.finished(1, 3.0)
    assert source.due() == 3.5
    assert [event.request.arrival for event in source.take(3.5)] == [3.5]


def test_a_request_may_end_only_once() -> None:
    source = ClosedLoop([request(number) for number in range(3)], concurrency=1)
    source.finished(0, 1.0)
    with pytest.raises(WorkloadError, match="request 0 ended, but it is unknown or had ended before"):
        source.finished(0, 1.0)


@pytest.mark.parametrize(("concurrency", "think", "option"), [(0, 0.0, "concurrency=0"), (1, -1.0, "think=-1.0")])
def test_closed_loop_names_a_bad_option(concurrency: int, think: float, option: str) -> None:
    with pytest.raises(WorkloadError, match=f"workload.{option} must be at least"):
        ClosedLoop([], concurrency, think)


def test_a_session_goes_on_a_tool_time_after_each_end() -> None:
    calls = tuple(request(number) for number in range(3))
    other = Session(1.0, (request(3),), ())
    source = Sessions([Session(2.0, calls, (0.5, 4.0)), other])
    assert source.total == 4
    assert drain(source, latency=1.0) == [(1.0, 3), (2.0, 0), (3.5, 1), (8.5, 2)]


@given(st.lists(st.lists(st.floats(0, 5), max_size=4), min_size=1, max_size=5), st.floats(0.1, 3))
def test_calls_of_a_session_never_overlap(tools: list[list[float]], latency: float) -> None:
    numbers = iter(range(100))
    sessions = [
        Session(start, tuple(request(next(numbers)) for _ in range(len(gaps) + 1)), tuple(gaps))
        for start, gaps in enumerate(tools)
    ]
    arrived = {number: at for at, number in drain(Sessions(sessions), latency)}
    assert len(arrived) == sum(len(session.calls) for session in sessions)
    for session in sessions:
        for before, after, gap in zip(session.calls, session.calls[1:], session.gaps, strict=False):
            assert arrived[after.id] == pytest.approx(arrived[before.id] + latency + gap)


def test_sessions_refuse_what_cannot_be() -> None:
    with pytest.raises(WorkloadError, match="2 gaps do not fit between 1 calls"):
        Session(0.0, (request(0),), (1.0, 1.0))
    with pytest.raises(WorkloadError, match="must be at least 0"):
        Session(-1.0, (request(0),), ())
    with pytest.raises(WorkloadError, match="a request id occurs twice"):
        Sessions([Session(0.0, (request(0),), ()), Session(0.0, (replace(request(0), priority=1),), ())])
