"""How workers come about: started here, on one host; or met over the network, where `torchrun` starts one a rank.

It knows sockets and processes, not what is said over them.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from signal import SIG_BLOCK, SIG_IGN, SIG_SETMASK, SIGINT, SIGTERM, pthread_sigmask, signal
from subprocess import Popen
from time import monotonic, perf_counter, sleep

from engine.errors import EngineError
from engine.parallel.supervise import SAMPLES, Hire, Peer, RemoteClock
from engine.parallel.wire import Kind, decode_pong, plain, value
from engine.parallel.worker import Lines, Make, Seat, make_backend, serve, settle_in

WORKER = (sys.executable, "-m", "engine.parallel.worker")
"""The command of a worker; `numactl` and profilers may stand before it."""

STUCK = 10.0
"""Seconds after which a line that takes no bytes is given up, and for which a stranger may take to say who it is."""

KEY, KEY_FILE = "PLAYGROUND_AUTHKEY", "PLAYGROUND_AUTHKEY_FILE"

PORT = "PLAYGROUND_PORT"
"""Default: the one after MASTER_PORT."""

RETRY = 0.1
"""Seconds between two attempts to reach a driver that is not there yet."""


def spawned(ranks: int, command: Sequence[str] = WORKER) -> Hire:
    """Workers on this host: nothing but sockets that they inherit, which leave nothing behind."""
    return lambda: [spawn(Seat(rank, rank, ranks), command) for rank in range(ranks)]


def spawn(seat: Seat, command: Sequence[str] = WORKER) -> Peer:
    """One worker on this host."""
    steps, lifeline = socket.socketpair(), socket.socketpair()
    theirs = [pair[1].fileno() for pair in (steps, lifeline)]
    numbers = dict(zip(("rank", "local-rank", "local-size", "steps", "lifeline"), (*seat, *theirs), strict=True))
    options = [f"--{name}={number}" for name, number in numbers.items()]
    with _no_interrupt():
        process = Popen([*command, *options], pass_fds=theirs)
    for pair in (steps, lifeline):
        pair[1].close()
    return Peer(seat.rank, _line(steps[0]), _line(lifeline[0]), process)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """A process that `torchrun` has started, as its environment says."""

    seat: Seat
    ranks: int
    address: str
    port: int
    """Where rank 0's process waits for the others; torchrun's own store has the port before it."""

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> Torchrun | None:
        """None: a person has started this process, or nobody else was started with it."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        if (ranks := _whole(environment, "WORLD_SIZE")) == 1:
            return None
        seat = Seat(
            _whole(environment, "RANK"),
            _whole(environment, "LOCAL_RANK", 0),
            _whole(environment, "LOCAL_WORLD_SIZE", 1),
        )
        port = _whole(environment, PORT, _whole(environment, "MASTER_PORT") + 1)
        return cls(seat, ranks, environment["MASTER_ADDR"], port)


def _whole(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise EngineError(f"{name}={text} must be a whole number: set it to one, or start this without torchrun")
    return int(text)


def secret(environment: Mapping[str, str]) -> bytes:
    """What both ends of a line between hosts must know."""
    if key := environment.get(KEY):
        return key.encode()
    if not (name := environment.get(KEY_FILE)):
        raise EngineError(
            f"{KEY_FILE}: not set; write a secret into a file on every host and set it to the file's path"
        )
    try:
        key = Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise EngineError(f"{KEY_FILE}={name}: {error.strerror}; give a file with a secret in it") from error
    if not key:
        raise EngineError(f"{KEY_FILE}={name}: the file is empty; write a secret into it")
    return key.encode()


def gathered(here: Torchrun, key: bytes, patience: float, command: Sequence[str] = WORKER) -> Hire:
    """Workers of several hosts: rank 0's is started here, the others come (see `follow`)."""
    return lambda: _gather(here, key, patience, command)


def _gather(here: Torchrun, key: bytes, patience: float, command: Sequence[str]) -> list[Peer]:
    try:
        server = socket.create_server(("", here.port), backlog=2 * here.ranks)
    except OSError as error:
        raise EngineError(
            f"{PORT}={here.port}: {error.strerror}; set it to a port that is free, on all hosts"
        ) from error
    with server:
        lines = _meet(server, here.ranks, key, patience)
    own = spawn(here.seat, command)
    return [own, *[_distant(rank, *lines[rank]) for rank in range(1, here.ranks)]]


def _meet(server: socket.socket, ranks: int, key: bytes, patience: float) -> dict[int, Lines]:
    """Both lines of every rank but the first."""
    met: dict[tuple[int, str], Connection] = {}
    deadline = monotonic() + patience
    while len(met) < 2 * (ranks - 1):
        server.settimeout(max(deadline - monotonic(), 0.001))
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            missing = [rank for rank in range(1, ranks) if (rank, "lifeline") not in met]
            raise EngineError(
                f"parallel.patience={patience:g}: no word from ranks {', '.join(map(str, missing))} of {ranks} in so "
                "many seconds; start them, or check the network and the secret"
            ) from None
        if named := _introduced(accepted, key, ranks):
            met[named[0], named[1]] = named[2]
    return {rank: Lines(met[rank, "steps"], met[rank, "lifeline"]) for rank in range(1, ranks)}


def _introduced(accepted: socket.socket, key: bytes, ranks: int) -> tuple[int, str, Connection] | None:
    """Who it is; None: nobody of ours."""
    _limit(accepted, socket.SO_RCVTIMEO, STUCK)
    line = _line(accepted)
    try:
        deliver_challenge(line, key)
        answer_challenge(line, key)
        told = value(line.recv_bytes(1 << 10))
    except (OSError, EOFError, AuthenticationError):
        line.close()
        return None
    if told["ranks"] != ranks:
        raise EngineError(
            f"parallel: rank {told['rank']} was started as one of {told['ranks']} ranks, here are {ranks}"
        )
    return told["rank"], told["line"], line


def _distant(rank: int, steps: Connection, lifeline: Connection) -> Peer:
    """A worker that is connected, and how its clock differs."""
    clock = RemoteClock()
    for _ in range(SAMPLES):
        asked = perf_counter()
        lifeline.send_bytes(plain(Kind.PING))
        clock.sample(asked, decode_pong(lifeline.recv_bytes()).clock, perf_counter())
    return Peer(rank, steps, lifeline, clock=clock)


def follow(here: Torchrun, key: bytes, patience: float, make: Make = make_backend) -> int:
    """Be the worker of a rank above 0, until the driver says stop; the exit code."""
    settle_in()
    deadline = monotonic() + patience
    lines = Lines(*[_introduce(here, key, line, deadline) for line in Lines._fields])
    signal(SIGTERM, SIG_IGN)  # torchrun sends it to all when one is lost: the driver is to tell which, and ends them
    return serve(lines, here.seat, make)


def _introduce(here: Torchrun, key: bytes, line: str, deadline: float) -> Connection:
    connection = _line(_connected(here, deadline))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError) as error:
        raise EngineError(f"{KEY}: the driver at {here.address} has another secret; give all hosts the same") from error
    connection.send_bytes(plain(Kind.HELLO, {"rank": here.seat.rank, "ranks": here.ranks, "line": line}))
    return connection


def _connected(here: Torchrun, deadline: float) -> socket.socket:
    """The driver may take its time to come, and its host's name to be known."""
    while True:
        try:
            connected = socket.create_connection((here.address, here.port), timeout=max(deadline - monotonic(), RETRY))
        except OSError as error:
            if monotonic() >= deadline:
                raise EngineError(
                    f"MASTER_ADDR={here.address}, {PORT}={here.port}: no driver is there ({error}); start rank 0, or "
                    "check the network"
                ) from error
            sleep(RETRY)
            continue
        connected.settimeout(None)
        return connected


def free_port(address: str) -> int:
    """A port of this host that nobody uses now."""
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


def _line(end: socket.socket) -> Connection:
    """A socket as a connection of messages. Who writes to somebody that does not read gives up after a while."""
    _limit(end, socket.SO_SNDTIMEO, STUCK)
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(end.detach())


def _limit(end: socket.socket, option: int, seconds: float) -> None:
    whole = int(seconds)
    end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """A process that starts inherits what is blocked: Ctrl-C cannot hit it before it has settled in."""
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)
