"""Ranks without the seconds that each takes to import torch: forked from a process that has imported it.

Workers among them serve the driver as those do that `launch.spawned` starts; only how they come about is another.
"""

from __future__ import annotations

import os
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from subprocess import TimeoutExpired

from engine.parallel.supervise import Hire, Peer
from engine.parallel.worker import Lines, Seat, make_backend, serve, settle_in

SERVER = get_context("forkserver")
"""Starts processes as `multiprocessing` does."""

SERVER.set_forkserver_preload(["engine.load", "engine.backend", "engine.parallel.comm", "engine.parallel.worker"])


def forked(ranks: int) -> Hire:
    """Workers on this host."""
    return lambda: [_fork(Seat(rank, rank, ranks)) for rank in range(ranks)]


class Forked:
    """A process as `subprocess` would have it."""

    def __init__(self, process: BaseProcess) -> None:
        self.pid = process.pid
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("a worker", timeout or 0.0)
        return self._process.exitcode


def _fork(seat: Seat) -> Peer:
    (steps, their_steps), (lifeline, their_lifeline) = Pipe(), Pipe()
    process = SERVER.Process(target=_work, args=(their_steps, their_lifeline, seat), daemon=True)
    process.start()
    their_steps.close()
    their_lifeline.close()
    return Peer(seat.rank, steps, lifeline, Forked(process))  # type: ignore[arg-type]


def _work(steps: Connection, lifeline: Connection, seat: Seat) -> None:
    settle_in()
    os._exit(serve(Lines(steps, lifeline), seat, make_backend))
