from time import sleep

import pytest
from rich.progress import Progress

from analysis.waiting import waiting
from experiments import progress
from experiments.progress import Lines, SweepBar, Tally, Watched, meter, sweep_meter
from playground.core import Request
from playground.workload.source import OpenLoop


def watched(shown, count=3):
    return Watched(OpenLoop([Request(i, 0.0, 4, 4) for i in range(count)]), shown)


def test_a_short_run_stays_silent(capfd):
    with meter("run") as shown:
        watched(shown).finished(0, 1.0)
    assert capfd.readouterr().err == ""


def test_a_long_run_says_how_far_it_is(capfd, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    source = watched(Lines("run"))
    source.finished(0, 1.5)
    source.finished(1, 2.5)  # too soon for another line
    assert capfd.readouterr().err == "run: 1 of 3 requests, 1.5 s of the run\n"


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "BAR_EVERY", 0.0)
    with progress._progress() as shown:
        bar = progress.Bar(shown, "run")
        bar.update(2, 3, 1.0)
        (task,) = shown.tasks
        assert (task.completed, task.total, task.visible) == (2, 3, True)


def tally(clock, monkeypatch):
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    return Tally({number: f"rate={number}" for number in range(8)}, over=2)  # two of an earlier session


def test_a_sweep_says_how_long_it_will_take(monkeypatch):
    clock = [100.0]
    stand = tally(clock, monkeypatch)
    assert stand.left(clock[0]) is None
    stand.start(2)
    stand.start(3)
    stand.share(3, 0.5)
    clock[0] = 110.0
    assert stand.left(clock[0]) == pytest.approx(10 / 0.5 * 5.5)
    stand.end(2, "why")
    assert stand.left(clock[0]) == pytest.approx(10 / 1.5 * 4.5)
    assert stand.told() == ", 1 failed, about 30 s left"
    clock[0] = 4000.0
    assert stand.told().endswith("about 3 h 15 min left")


def test_a_sweep_tells_lines_where_nobody_watches(capfd, monkeypatch):
    clock = [0.0]
    stand = tally(clock, monkeypatch)
    with sweep_meter() as shown:
        for clock[0] in (1.0, 3.0, 5.0, 14.0):
            shown.show(stand)
        stand.start(2)
        stand.end(2, "why")
        for clock[0] in (25.0, 36.0):
            shown.show(stand)
    assert capfd.readouterr().err.splitlines() == [
        "sweep: 2 of 8 points",
        "sweep: 2 of 8 points",
        "failed: rate=2: why",
        "sweep: 3 of 8 points, 1 failed, about 2 min left",
        "sweep: 3 of 8 points, 1 failed, about 3 min left",
    ]


def test_a_sweep_has_one_bar_on_a_terminal(monkeypatch):
    stand = tally([0.0], monkeypatch)
    stand.start(2)
    stand.share(2, 0.25)
    with Progress(disable=True) as shown:
        SweepBar(shown).show(stand)
        (task,) = shown.tasks
    assert (task.completed, task.total, task.fields["told"]) == (2.25, 8, "2/8 points, about 0 s left")
    assert task.fields["running"] == "rate=2 25%"


def test_the_source_behind_it_is_unchanged():
    source = watched(Lines("run"))
    assert source.total == 3
    assert source.due() == 0.0
    assert len(source.take(0.0)) == 3


def test_waiting_is_told_after_a_while(capfd, monkeypatch):
    monkeypatch.setattr("analysis.waiting.PATIENCE", 0.02)
    with waiting("x: replaying"):
        sleep(0.2)
    assert capfd.readouterr().err == "x: replaying, 0 s\n"
