"""What the driver makes of its workers' reports; they are real processes, and what they host computes nothing."""

import os
import signal
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.parallel import supervise
from engine.parallel.backend import LATE, ParallelBackend
from engine.parallel.launch import spawned
from engine.parallel.layout import Layout
from engine.parallel.supervise import RemoteClock
from engine.parallel.wire import DIALECT
from playground.core import MAIN, Step
from tests.engine.parallel.crews import COMMAND, PROMPT, config, decode, fake, prefill, processes
from tests.engine.parallel.fake_worker import token

HZ = 100


def cpu(process):
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HZ


def test_a_step_of_one_group():
    with closing(fake(sizes={"replicas": 2}, delay=0.01)) as backend:
        assert (backend.spec.ranks, backend.spec.stages, backend.spec.forwards_tokens) == (2, 1, True)
        backend.launch(prefill(3, group=1))
        done = backend.wait()
        assert (done.step, done.lane, done.tokens, done.stages) == (3, MAIN, {101: (token(3),)}, ())
        assert 0 <= done.launched <= done.started <= done.finished - 0.0099
        assert done.finished <= backend.now()


def test_replicas_run_beside_one_another():
    with closing(fake(sizes={"replicas": 2}, delay=0.4)) as backend:
        backend.now()
        for group in range(2):
            backend.launch(prefill(group, group))
        first, second = backend.wait(), backend.wait()
        assert sorted([first.step, second.step]) == [0, 1]
        assert first.finished <= second.finished < first.finished + 0.3


def test_steps_of_a_lane_come_back_in_the_order_of_their_launch():
    """And one that was sent ahead begins when the one before it ends."""
    with closing(fake(delay=0.03)) as backend:
        backend.launch(prefill(0))
        for step in range(1, 20):
            backend.launch(decode(step, len(PROMPT) + step - 1))
        dones = [backend.wait() for _ in range(20)]
        assert [done.step for done in dones] == list(range(20))
        assert all(after.started == pytest.approx(before.finished) for before, after in pairwise(dones[1:]))


def test_stages_say_when_they_worked_and_hear_what_the_last_one_sampled():
    """The fake's first stage refuses a decode whose token nobody has told it."""
    with closing(fake(sizes={"stages": 3}, delay=0.01)) as backend:
        assert (backend.spec.stages, backend.spec.forwards_tokens) == (3, False)
        backend.launch(prefill(0))
        for step in range(1, 6):
            done = backend.wait()
            spans = done.stages
            assert len(spans) == 3
            assert all(start <= end for start, end in spans)
            assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
            assert (done.started, done.finished) == (spans[0][0], spans[-1][1])
            assert done.host == 1e-4
            backend.launch(decode(step, len(PROMPT) + step - 1))


def test_the_smallest_pool_counts():
    with closing(fake(sizes={"replicas": 2}, rank=1, blocks=7)) as backend:
        assert backend.spec.blocks == 7


def test_until_comes_before_a_completion_that_is_later():
    with closing(fake(delay=0.1)) as backend:
        backend.launch(prefill(0))
        until = backend.now() + 0.02
        assert backend.wait(until) is None
        assert until <= backend.now() < until + 1.0
        assert backend._floor == until
        done = backend.wait()
        assert done.finished > until


def test_times_of_another_host_are_told_on_the_drivers_clock():
    with closing(fake()) as backend:
        backend.now()
        clock = backend._crew._peers[0].clock = RemoteClock()
        clock.sample(0.0, -100.0, 0.0)
        backend.launch(prefill(0))
        assert backend.wait(1000.0).started == pytest.approx(100.0, abs=5.0)


def test_what_was_under_way_when_somebody_looked_is_finished_after_that():
    """Its report arrives once a wait has told the loop that nothing had finished by then."""
    with closing(fake(sizes={"stages": 2})) as backend:
        backend.now()
        backend._floor = until = backend.now() + 0.5
        backend.launch(prefill(0))
        done = backend.wait()
        assert until < done.finished < until + 1e-6
        assert done.stages[1][1] == done.finished


def test_a_step_without_lanes_brings_nothing():
    with closing(fake()) as backend:
        backend.launch(Step(0, 0, 0.0, (), ends=(5,)))
        backend.launch(prefill(1))
        assert backend.wait().step == 1
        with pytest.raises(RuntimeError, match="nothing is in flight"):
            backend.wait()


def test_the_idle_use_no_core():
    with closing(fake(sizes={"replicas": 2})) as backend:
        backend.launch(prefill(0))
        backend.wait()
        before, own = [cpu(process) for process in processes(backend)], time.process_time()
        time.sleep(1.0)
        assert [cpu(process) - then for process, then in zip(processes(backend), before, strict=True)] == [0, 0]
        assert time.process_time() - own < 0.1


def test_nothing_is_left_behind():
    def left():
        files = {path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()}
        return files, {path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}

    with closing(fake()) as backend:
        backend.now()
    _, sockets = left()
    with closing(fake(sizes={"replicas": 2})) as backend:
        backend.launch(prefill(0))
        backend.wait()
        crew = processes(backend)
    assert [process.returncode for process in crew] == [0, 0]
    backend.close()
    assert {str(link) for link in left()[1]} <= {str(link) for link in sockets}


def test_closing_with_steps_in_flight_takes_no_time():
    backend = fake(sizes={"stages": 2}, delay=0.05)
    backend.launch(prefill(0))
    began = time.monotonic()
    backend.close()
    assert time.monotonic() - began < 2
    assert [process.returncode for process in processes(backend)] == [0, 0]


def test_who_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE", 0.3)
    backend = fake(sizes={"replicas": 2}, rank=1, step=0, act="sleep")
    backend.launch(prefill(0, group=1))
    time.sleep(0.1)
    backend.close()
    assert [process.returncode for process in processes(backend)] == [0, -9]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("refuse", r"^model.path=x: no such folder; give another \(rank 1 \(replica 1\)\)$"),
        ("raise", r"^parallel: rank 1 \(replica 1\) all wrong, while it was starting$"),
        ("die", r"^parallel: rank 1 \(replica 1\) was killed by SIGKILL while it was starting$"),
        ("leave", r"^parallel: rank 1 \(replica 1\) ended with code 3 while it was starting$"),
        ("freeze", r"^parallel: rank 1 \(replica 1\) has not answered for 1 seconds while it was starting$"),
    ],
)
def test_a_rank_that_cannot_start(act, said):
    with pytest.raises(EngineError, match=said):
        fake(sizes={"replicas": 2}, patience=0.6 if act == "freeze" else 60.0, rank=1, step="load", act=act)


def test_a_command_that_is_no_worker():
    with pytest.raises(EngineError, match=r"^parallel: rank 0 ended with code 1 while it was starting"):
        ParallelBackend(config(Layout()), spawned(1, ("/bin/false",)))
    with pytest.raises(FileNotFoundError, match="no/such"):
        ParallelBackend(config(Layout()), spawned(1, ("/no/such",)))


def test_an_interrupt_before_a_worker_has_settled_in():
    def hire():
        peers = spawned(1, COMMAND)()
        os.kill(peers[0].process.pid, signal.SIGINT)
        return peers

    with closing(ParallelBackend(config(Layout()), hire)) as backend:
        backend.launch(prefill(0))
        assert backend.wait().step == 0


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("engine.parallel.backend.DIALECT", "0-little")
    with pytest.raises(EngineError, match=f"rank 0 speaks version {DIALECT}, the driver 0-little; install one version"):
        ParallelBackend(config(Layout()), spawned(1, COMMAND))


def test_completions_that_are_heard_of_too_late_lie_apart():
    """Where two replicas' finished at the same instant, a replay might take them the other way round."""
    with closing(fake(sizes={"replicas": 3})) as backend:
        backend._floor = backend.now() + 0.2  # somebody looked until then
        for group in range(3):
            backend.launch(prefill(group, group=group))
        finished = [backend.wait().finished for _ in range(3)]
        assert all(after - before > LATE / 2 for before, after in pairwise(finished))
