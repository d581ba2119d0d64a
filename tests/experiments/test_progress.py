from time import sleep

from experiments import progress
from experiments.progress import Lines, Watched, meter, waiting
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


def test_the_source_behind_it_is_unchanged():
    source = watched(Lines("run"))
    assert source.total == 3
    assert source.due() == 0.0
    assert len(source.take(0.0)) == 3


def test_waiting_is_told_after_a_while(capfd, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    with waiting("x: replaying"):
        sleep(0.2)
    assert capfd.readouterr().err == "x: replaying, 0 s\n"
