"""A worker: one rank's process. It hosts an ordinary backend, does the steps it is sent, and reports.

It decides nothing. Two lines lead to the driver: steps and reports go over one, which the main thread reads when it has
nothing else to do; over the other, the lifeline, a thread answers the driver's pings and hears that the driver is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from select import POLLIN, poll
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.errors import EngineError, StepFailed
from engine.parallel.config import WorkerConfig
from engine.parallel.wire import (
    DIALECT,
    Kind,
    Pong,
    Token,
    decode_step,
    encode_pong,
    encode_report,
    kind,
    plain,
    value,
)
from engine.pooled import ALONE, Pooled
from playground.backend import Backend
from playground.core import Step

if TYPE_CHECKING:  # a worker says hello before it imports torch
    import torch

    from engine.models.decoder import Part

LOOK = 2e-4
"""Seconds that a backend with work in flight is waited for between two looks at what has come in."""

ORPHANED = 70
"""The exit code of a worker whose driver is gone."""

_PR_SET_PDEATHSIG = 1


class Hosted(Backend, Protocol):
    """What a worker needs of a backend beyond the seam."""

    def launch(self, step: Step, pooled: Pooled = ALONE) -> None:
        """A step, of which all lanes of `pooled` come back, if there are any: others take part in it."""
        ...

    def start(self) -> None:
        """Warm up and set the clock to 0."""
        ...

    def learn(self, tokens: Sequence[Token]) -> None:
        """Tokens that another stage sampled; before the step that needs them."""
        ...


class Seat(NamedTuple):
    """Where a worker is: its rank, and its number among so many of its host."""

    rank: int
    local_rank: int
    local_size: int


class Lines(NamedTuple):
    """To the driver."""

    steps: Connection
    lifeline: Connection


Make = Callable[[WorkerConfig, Seat], Hosted]


@dataclass(slots=True)
class Progress:
    """Steps that the main thread began and finished last, for the thread that answers pings; -1: none."""

    begun: int = -1
    finished: int = -1


def serve(lines: Lines, seat: Seat, make: Make) -> int:
    """Work for the driver until it says stop; the exit code. With the driver's end the process ends at once."""
    progress = Progress()
    Thread(target=_keep_alive, args=(lines.lifeline, progress), daemon=True).start()
    try:
        lines.steps.send_bytes(plain(Kind.HELLO, {"dialect": DIALECT, "rank": seat.rank}))
        config = WorkerConfig.heard(value(lines.steps.recv_bytes()))
        backend = make(config, seat)
        lines.steps.send_bytes(plain(Kind.READY, asdict(backend.spec)))
        if kind(lines.steps.recv_bytes()) is Kind.START:
            backend.start()
            lines.steps.send_bytes(plain(Kind.STARTED))
            _Work(lines.steps, backend, config.layout.place(seat.rank).tp_rank == 0, progress).run()
        backend.close()
    except EOFError:
        return ORPHANED
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
        return _fail(lines, progress, error)
    return 0


class _Work:
    """The main thread's loop."""

    def __init__(self, line: Connection, backend: Hosted, reports: bool, progress: Progress) -> None:
        self._line = line
        self._backend = backend
        self._reports = reports
        self._progress = progress
        self._base = _second_0(backend)
        self._due = 0

    def run(self) -> None:
        """Until the driver says stop. Without work in flight it sleeps in a read."""
        incoming = poll()
        incoming.register(self._line.fileno(), POLLIN)
        while True:
            if not self._due or incoming.poll(0):
                message = self._line.recv_bytes()
                if kind(message) is Kind.STOP:
                    return
                self._launch(message)
            else:
                self._collect()

    def _launch(self, message: bytes) -> None:
        step, known, pooled = decode_step(message)
        self._progress.begun = step.id
        if known:
            self._backend.learn(known)
        self._backend.launch(step, pooled)
        self._due += len(pooled or step.lanes)

    def _collect(self) -> None:
        done = self._backend.wait(self._backend.now() + LOOK)
        if done is None:
            return
        self._due -= 1
        self._progress.finished = done.step
        if self._reports:  # the other ranks of a team would say the same
            self._line.send_bytes(encode_report(done, self._base))


def _second_0(backend: Backend) -> float:
    """The machine's clock at the backend's second 0."""
    before, now = perf_counter(), backend.now()
    return (before + perf_counter()) / 2 - now


def _fail(lines: Lines, progress: Progress, error: Exception) -> int:
    """Say what happened, and hold still: who left now would be the reason of other ranks' errors."""
    if not isinstance(error, EngineError | StepFailed):
        traceback.print_exception(error)
    told = {
        "why": str(error) or type(error).__name__,
        "usage": isinstance(error, EngineError),
        "pong": [perf_counter(), progress.begun, progress.finished],
    }
    try:
        lines.steps.send_bytes(plain(Kind.FAILED, told))
        while kind(lines.steps.recv_bytes()) is not Kind.STOP:
            pass
    except (EOFError, OSError):
        return ORPHANED
    return 1


def _keep_alive(lifeline: Connection, progress: Progress) -> None:
    """Answer pings. When the line ends the driver is gone: nobody can be told, so nothing is wound up."""
    try:
        while kind(lifeline.recv_bytes()) is Kind.PING:
            lifeline.send_bytes(encode_pong(Pong(perf_counter(), progress.begun, progress.finished)))
    except (EOFError, OSError):
        pass
    os._exit(ORPHANED)


def make_backend(config: WorkerConfig, seat: Seat) -> Hosted:
    """The backend of one rank's share of the model."""
    import torch

    from engine.load import LONE, Share, load_model, random_model
    from engine.models.decoder import WHOLE

    torch.set_num_threads(max(_cores() // seat.local_size, 1))
    # Ranks meet where they are told: with this set, tcp:// would mean that torchrun's agent is there already.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    layout, device = config.layout, _device(config, seat)
    together = layout.tp * layout.stages > 1 or layout.lockstep
    part = _joined(config, seat, torch.device(device)) if together else replace(WHOLE, overlap=config.overlap)
    share = Share(layout, layout.place(seat.rank), part) if together else replace(LONE, part=part)
    if config.weights == "random":
        model = random_model(config.path, config.dtype, device, config.kernels, config.seed, share)
    else:
        model = load_model(config.path, config.dtype, device, config.kernels, share)
    if config.device == "cuda":
        from engine.cuda.backend import CudaBackend

        return CudaBackend(model, **config.sizes)
    from engine.backend import TorchBackend

    return TorchBackend(model, **config.sizes)


def _joined(config: WorkerConfig, seat: Seat, device: torch.device) -> Part:
    from engine.config import find_config
    from engine.parallel.comm import join
    from engine.parallel.moving import mover

    shape = find_config(config.path).shape
    many = None if shape.experts is None else shape.experts.count
    part = join(
        config.layout,
        seat.rank,
        config.rendezvous,
        device,
        config.patience,
        many,
        config.overlap,
        near=config.device == "cuda" and _near(config.layout.ranks, seat),
        share_gpus=config.share_gpus,
    )
    return replace(part, mover=mover(config.layout, seat.rank, shape.layers, device))


def _near(ranks: int, seat: Seat) -> bool:
    """Whether all ranks are on GPUs of this host that see one another's memory."""
    import torch

    from engine.cuda.team import in_reach

    return seat.local_size == ranks and in_reach(range(min(ranks, torch.cuda.device_count())))


def _device(config: WorkerConfig, seat: Seat) -> str:
    if config.device == "cpu":
        return config.device
    import torch

    if seat.local_size > (count := torch.cuda.device_count()) and not (config.share_gpus and count):
        raise EngineError(f"parallel: {seat.local_size} ranks on a host with {count} GPUs; take fewer ranks, or hosts")
    number = seat.local_rank % count
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle_in() -> None:
    """Leave Ctrl-C to the driver, which a terminal sends it to as well, and die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # The lifeline ends workers, too, but only if its thread gets to run.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None, make: Make = make_backend) -> int:
    """Serve a driver over two sockets that were inherited from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rank", "local-rank", "local-size", "steps", "lifeline"):
        parser.add_argument(f"--{name}", type=int, required=True)
    told = parser.parse_args(arguments)
    settle_in()
    lines = Lines(Connection(told.steps), Connection(told.lifeline))
    return serve(lines, Seat(told.rank, told.local_rank, told.local_size), make)


if __name__ == "__main__":
    # No interpreter's end: it would wait for threads that a failed step has left in the middle of an exchange.
    os._exit(main())
