"""What memory holds is measured: of this machine, of processes, and of containers."""

from __future__ import annotations

import gc
from multiprocessing import get_context

import pytest

from experiments import memory
from experiments.launcher import _short
from experiments.workers import Short

MIB = memory.MIB
BALLAST = bytearray(64 * MIB)
"""Shared with a child that is forked."""


def takes(mebibytes, connection):
    gc.disable()  # it writes to whatever it looks at, all of the parent's
    held = bytearray(mebibytes * MIB)
    connection.send(len(held))
    connection.recv()
    del held
    connection.send(0)
    connection.recv()


@pytest.fixture
def child():
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=takes, args=(40, theirs))
    process.start()
    yield process.pid, ours
    process.terminate()
    process.join()


def test_what_a_process_took_is_not_what_it_shares(child):
    pid, line = child
    line.recv()
    assert 40 * MIB <= memory.own(pid) < 40 * MIB + len(BALLAST) / 2
    line.send(None)
    line.recv()
    assert memory.own(pid) < 20 * MIB
    assert 38 * MIB <= memory.most_own(pid) < 40 * MIB + len(BALLAST) / 2, "the most it ever took is remembered"


def test_a_process_that_is_gone_holds_nothing():
    assert memory.own(1 << 30) == memory.most_own(1 << 30) == 0


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available() is None, "nobody says"
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  4096 kB\n")
    assert memory.available() == 4 * MIB
    (tmp_path / "memory.current").write_text(f"{5 * MIB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() == 4 * MIB
    (tmp_path / "memory.max").write_text(f"{6 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {MIB}\n")
    assert memory.available() == 2 * MIB


def test_room_is_for_what_the_largest_took_and_what_runs_may_grow(monkeypatch):
    held = {1: 10, 2: 40}
    monkeypatch.setattr(memory, "available", lambda: 160)
    monkeypatch.setattr(memory, "own", held.get)
    monkeypatch.setattr(memory, "most_own", {3: 50, 4: 60}.get)
    room = memory.Measured()
    room.learn(3)
    assert room.need == 50, "what a point took counts, not what was guessed before"
    assert room.fits([1])  # 160 - (50 - 10) >= 50
    assert room.fits([1, 2])  # 160 - (40 + 10) >= 50
    room.learn(4)
    assert room.need == 60
    assert room.fits([1, 2])  # 160 - (50 + 20) >= 60
    monkeypatch.setattr(memory, "available", lambda: 129)
    assert not room.fits([1, 2])
    monkeypatch.setattr(memory, "available", lambda: None)
    assert room.fits([1, 2])


def test_people_are_told_how_many_fit():
    told = _short(Short(2, 300 * MIB))
    assert told == "sweep: memory holds 2 at a time for now: a point takes up to 300 MiB; the next one waits"
