"""When a rank, or the driver, is lost: everybody ends within seconds, and what is known of it is told and kept."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import StepFailed
from engine.parallel.layout import Layout
from playground.core import Request
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.trace import Trace, read
from playground.workload.source import OpenLoop
from policies.budget import Unified
from policies.composed import Composed
from tests.engine.parallel.crews import PROMPT, decode, fake, gone, prefill, processes
from tests.engine.parallel.layouts import Case, crew, made
from tests.parity.runs import record

SOON = 15.0
"""Seconds within which all must have ended."""


def run_until_lost(backend, steps=20):
    """Step after step until one does not come back; those that did, the error, and how long it took to be told."""
    backend.launch(prefill(0))
    came = []
    with pytest.raises(StepFailed) as caught:
        for step in range(1, steps):
            began = time.monotonic()
            came.append(backend.wait().step)
            backend.launch(decode(step, len(PROMPT) + step - 1))
    return came, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("die", "rank 1 (stage 1) was killed by SIGKILL; it was in step 5, the last step it finished was 4"),
        ("leave", "rank 1 (stage 1) ended with code 3; it was in step 5, the last step it finished was 4"),
        ("raise", "rank 1 (stage 1): all wrong; it was in step 5, the last step it finished was 4"),
        (
            "freeze",
            "rank 1 (stage 1) has not answered for 1 seconds; it was in step 5, the last step it finished was 4",
        ),
        ("die_late", "rank 1 (stage 1) was killed by SIGKILL; it was in step 5, the last step it finished was 4"),
    ],
)
def test_a_rank_of_a_pipeline(act, said, monkeypatch):
    """`die_late`: its partner complains of the broken line before the driver hears of the death."""
    monkeypatch.setattr("engine.parallel.backend.SILENCE", 0.6)
    with closing(fake(sizes={"stages": 2}, rank=1, step=5, act=act)) as backend:
        came, error, took = run_until_lost(backend)
        assert came == [0, 1, 2, 3, 4]
        assert error == said
        assert took < SOON
        assert all(gone(process.pid, 1.0) for process in processes(backend))
        backend.launch(decode(9, 9))
        with pytest.raises(StepFailed, match="rank 1"):
            backend.wait()


def test_a_rank_that_lives_and_does_not_get_on():
    with closing(fake(sizes={"stages": 2}, patience=1.0, rank=1, step=2, act="sleep")) as backend:
        came, error, took = run_until_lost(backend)
        assert came == [0, 1]
        assert error == (
            "rank 1 (stage 1) has not finished a step for 1 seconds; it was in step 2, the last step it finished was 1"
        )
        assert took < SOON
        assert all(gone(process.pid, 1.0) for process in processes(backend))


def test_long_steps_are_not_taken_for_hanging(monkeypatch):
    monkeypatch.setattr("engine.parallel.backend.SILENCE", 0.5)
    with closing(fake(delay=2.0)) as backend:
        backend.launch(prefill(0))
        assert backend.wait().step == 0


def test_a_rank_that_speaks_for_nobody():
    """Of a team's ranks only the first one reports; where the others are is known from it."""
    with closing(fake(sizes={"tp": 2}, rank=1, step=3, act="die", delay=0.01)) as backend:
        backend.launch(prefill(0))
        for step in range(1, 4):
            backend.launch(decode(step, len(PROMPT) + step - 1))
        with pytest.raises(StepFailed, match=r"rank 1 \(tp_rank 1\) was killed by SIGKILL; it .* finished was [23]"):
            for _ in range(5):
                backend.wait(backend.now() + 5)


def test_an_idle_rank_is_missed_at_once():
    with closing(fake(sizes={"replicas": 2})) as backend:
        backend.launch(prefill(0))
        backend.wait()
        os.kill(processes(backend)[1].pid, signal.SIGKILL)
        with pytest.raises(StepFailed, match=r"rank 1 .* SIGKILL; it had no step to do, it had finished no step"):
            backend.wait(backend.now() + SOON)


def test_a_frozen_rank_that_takes_no_more_bytes(monkeypatch):
    """Whoever writes to it is let go, and what it had begun to say keeps nobody waiting."""
    monkeypatch.setattr("engine.parallel.backend.SILENCE", 0.6)
    with closing(fake()) as backend:
        backend.launch(prefill(0))
        backend.wait()
        os.kill(processes(backend)[0].pid, signal.SIGSTOP)
        began = time.monotonic()
        for step in range(1, 20_000):
            backend.launch(decode(step, step))
            if backend._failure:
                break
        with pytest.raises(StepFailed, match="has not answered"):
            backend.wait()
        assert time.monotonic() - began < SOON


def test_the_trace_up_to_then_can_be_read(tmp_path):
    """A run of the real loop and scheduler over two replicas, one of which dies in the middle."""
    backend = fake(sizes={"replicas": 2}, rank=1, step=30, act="die", delay=0.002)
    scheduler = Scheduler(backend.spec, Composed(Unified(64)), seed=1)
    workload = [Request(id, 0.0, 8, 40, 40) for id in range(4)]
    with closing(backend), pytest.raises(StepFailed, match="rank 1"), Trace(tmp_path) as trace:
        serve(OpenLoop(workload), scheduler, backend, trace)
    steps = read(tmp_path, "steps").to_pydict()
    assert len(steps["step"]) >= 20
    assert set(steps["group"]) == {0, 1}
    assert max(step for step, group in zip(steps["step"], steps["group"], strict=True) if group == 1) < 30


def test_a_rank_in_lockstep_behind_a_stage(tmp_path):
    """Real ranks: others wait for its experts, and for its tokens, in the middle of their exchanges."""
    case, shared = Case("vllm_v1", "swap", ahead=2), set(os.listdir("/dev/shm"))
    with closing(crew("dpa2_pp2_ep2", "qwen3-moe", tmp_path)) as workers:
        ranks, (turn, asked) = processes(workers.backend), workers.turn(case)
        launch = turn.launch

        def strike(step):
            launch(step)
            if step.id == 12:
                os.kill(ranks[3].pid, signal.SIGKILL)

        turn.launch = strike
        said = r"rank 3 \(replica 1, stage 1\) was killed by SIGKILL; it was in step \d+, the last step it"
        with pytest.raises(StepFailed, match=said):
            record(tmp_path / "run", made(case), turn, asked)
        assert all(gone(one.pid) for one in ranks)
    assert read(tmp_path / "run", "steps").num_rows > 5
    assert set(os.listdir("/dev/shm")) <= shared


DRIVER = """
import sys, time
from tests.engine.parallel.crews import *
backend = fake(sizes={"stages": 2}, delay=0.2)
backend.launch(prefill(0))
print(*[process.pid for process in processes(backend)], flush=True)
try:
    backend.wait()
    backend.wait(backend.now() + 60)
finally:
    backend.close()
"""


@pytest.fixture
def driver():
    """A driver as a process, in a process group of its own as a shell makes it, and its workers' ids."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    yield process, workers
    process.kill()
    process.communicate()


@pytest.mark.parametrize("who", ["all", "driver"])
def test_interrupt(driver, who):
    """A terminal sends Ctrl-C to everybody; the driver alone decides."""
    process, workers = driver
    (os.killpg if who == "all" else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SOON)
    assert errors.count("KeyboardInterrupt") == errors.count("Traceback") == 1
    assert all(gone(pid, 1.0) for pid in workers)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_is_killed(driver, how):
    process, workers = driver
    os.kill(process.pid, how)
    assert all(gone(pid, SOON) for pid in workers)


def test_a_frozen_worker_dies_with_its_driver(driver):
    """It cannot notice anything: the kernel ends it."""
    process, workers = driver
    os.kill(workers[1], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    assert all(gone(pid, SOON) for pid in workers)


def test_names_of_ranks():
    assert Layout(stages=2, tp=2).named(3) == "rank 3 (stage 1, tp_rank 1)"
