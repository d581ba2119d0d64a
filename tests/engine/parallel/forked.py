"""Ranks without the seconds that each takes to import torch: forked from a process that has imported it.

Workers among them serve the driver as those do that `launch.spawned` starts; only how they come about is another.
"""

from __future__ import annotations

import os
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

from engine.parallel.supervise import Hire, Peer
from engine.parallel.worker import Lines, Seat, make_backend, serve, settle_in

SERVER = get_context("forkserver")
"""Starts processes as `multiprocessing` does."""

SERVER.set_forkserver_preload(["engine.load", "engine.backend", "engine.parallel.comm", "engine.parallel.worker"])


def forked(ranks: int) -> Hire:
    """Workers on this host, which end with their lifelines: nobody kills them."""
    return lambda: [_fork(Seat(rank, rank, ranks)) for rank in range(ranks)]


def _fork(seat: Seat) -> Peer:
    (steps, their_steps), (lifeline, their_lifeline) = Pipe(), Pipe()
    SERVER.Process(target=_work, args=(their_steps, their_lifeline, seat), daemon=True).start()
    their_steps.close()
    their_lifeline.close()
    return Peer(seat.rank, steps, lifeline)


def _work(steps: Connection, lifeline: Connection, seat: Seat) -> None:
    settle_in()
    os._exit(serve(Lines(steps, lifeline), seat, make_backend))
