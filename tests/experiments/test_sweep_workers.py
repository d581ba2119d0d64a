"""Processes of a sweep: what happens to one reaches no other."""

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from signal import SIGKILL
from time import sleep

import pytest
from omegaconf import OmegaConf

from experiments import launcher, workers
from experiments.workers import Ended, Pool, Short, Started, Told


def events(task, numbers, most=2, method="fork", room=None):
    with closing(Pool(task, most, method, room).run(numbers)) as told:
        return [event for event in told if not isinstance(event, workers.Tick)]


def says_who(number, line):
    line.tell((number, os.getpid()))


def dies(number, line):
    if number == 1:
        os.kill(os.getpid(), SIGKILL)


def notes_spans(folder, number, line):
    """Odd ones want to be alone."""
    if number % 2:
        line.alone()
    Path(folder, f"{number}-in").touch()
    sleep(0.05)
    Path(folder, f"{number}-out").touch()


def waits(number, line):
    line.tell(os.getpid())
    sleep(60)


@pytest.mark.parametrize(("method", "processes"), [("fork", 5), ("spawn", 1)])
def test_every_task_is_served_once(method, processes):
    told = events(says_who, range(5), 1, method)
    words = [event.word for event in told if isinstance(event, Told)]
    assert [number for number, _ in words] == list(range(5))
    assert len({pid for _, pid in words}) == processes, (
        "memory of a forked task is given back, a spawned serves several"
    )
    assert [event.number for event in told if isinstance(event, Ended)] == list(range(5))


def test_a_death_is_told_and_stops_no_other():
    ended = {event.number: event.died for event in events(dies, range(4)) if isinstance(event, Ended)}
    assert ended.keys() == {0, 1, 2, 3}
    assert ended.pop(1).startswith("its process was killed by SIGKILL (for lack of memory?")
    assert set(ended.values()) == {None}


def test_never_more_at_a_time_than_asked_for():
    running, most = 0, 0
    for event in events(says_who, range(7), 3):
        running += isinstance(event, Started) - isinstance(event, Ended)
        most = max(most, running)
    assert most == 3


class Space:
    """So many processes, and who was learnt of."""

    need = 7

    def __init__(self, most):
        self.most = most
        self.learnt = []

    def fits(self, running):
        assert all(os.kill(process, 0) is None for process in running)
        return len(running) < self.most

    def learn(self, process):
        os.kill(process, 0)  # it is still there to be looked at
        self.learnt.append(process)


@pytest.mark.parametrize(("space", "expected"), [(2, 2), (0, 1)])
def test_never_more_at_a_time_than_memory_holds(space, expected):
    """One always runs: nothing would become of a sweep whose every point takes more than is free."""
    room, running, most, short = Space(space), 0, 0, []
    for event in events(says_who, range(7), 4, room=room):
        running += isinstance(event, Started) - isinstance(event, Ended)
        most = max(most, running)
        short += [event] if isinstance(event, Short) else []
    assert (most, len(room.learnt)) == (expected, 7)
    assert short == [Short(expected, 7)], "told once, not at every look"


def test_what_measures_time_has_the_machine_to_itself(tmp_path):
    events(partial(notes_spans, tmp_path), range(6), 3)
    span = {n: [(tmp_path / f"{n}-{end}").stat().st_mtime_ns for end in ("in", "out")] for n in range(6)}
    for odd in (1, 3, 5):
        assert not [n for n in range(6) if n != odd and span[n][0] < span[odd][1] and span[odd][0] < span[n][1]]


def test_who_stops_listening_ends_them_all():
    with closing(Pool(waits, 2, "fork").run(range(4))) as told:
        pids = []
        while len(pids) < 2:
            if isinstance(event := next(told), Told):
                pids.append(event.word)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("target", "alone"), [
    ("experiments.engines.Engine", True), ("experiments.engines.Costed", False), ("experiments.build.Simulated", False),
    ("nowhere.Backend", False),
])  # fmt: skip
def test_engines_are_measured_alone(target, alone):
    assert launcher._measures(OmegaConf.create({"backend": {"_target_": target}})) is alone


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1)])
def test_a_container_has_the_cores_of_its_quota(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(workers, "CGROUP", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert workers.cores() == expected


def test_cuda_in_use_is_not_forked(monkeypatch):
    class Torch:
        class cuda:
            is_initialized = staticmethod(lambda: True)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert workers.method() == "fork"
    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert workers.method() == "spawn"
