"""The driver's side of its workers: what they say, whether they live, and how they are ended. It knows no step.

One thread reads all lines. It also starts the processes: Linux ends them with the thread that did.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from signal import Signals
from subprocess import Popen, TimeoutExpired
from threading import Thread
from time import perf_counter
from typing import Protocol

from engine.parallel.wire import Kind, Pong, decode_pong, kind, plain, value

TICK = 0.5
"""Seconds between two looks at who is silent."""

SETTLE = 0.3
"""Seconds for which more is heard after a first failure: who lost a partner often says so before the partner's end."""

GRACE = 3.0
"""Seconds that workers which are told to stop have for it."""

SAMPLES = 30
"""Pings of which the quickest says how far two hosts' clocks are apart."""


class Inbox:
    """Messages of a `Connection`'s other end, from whatever bytes are there: it never waits for the rest of one."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self._bytes = bytearray()

    def read(self) -> list[bytes]:
        """What has arrived; call when there is something to read. `EOFError`: there will be nothing more."""
        try:
            arrived = os.read(self.line.fileno(), 1 << 18)
        except OSError as error:
            raise EOFError from error
        if not arrived:
            raise EOFError
        self._bytes += arrived
        return list(iter(self._message, None))

    def _message(self) -> bytes | None:
        """As `multiprocessing.connection` frames it: the length in four bytes, or -1 and the length in eight."""
        head = 4
        if len(self._bytes) < head:
            return None
        (length,) = struct.unpack_from("!i", self._bytes)
        if length == -1:
            head = 12
            if len(self._bytes) < head:
                return None
            (length,) = struct.unpack_from("!Q", self._bytes, 4)
        if len(self._bytes) < head + length:
            return None
        message = bytes(self._bytes[head : head + length])
        del self._bytes[: head + length]
        return message


class RemoteClock:
    """How far another host's clock is from ours, by ping-pong (NTP's estimate: half of the round trip each way)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def sample(self, asked: float, clock: float, answered: float) -> None:
        """Between two of our instants the other clock showed `clock`."""
        self._samples.append((answered - asked, clock - (asked + answered) / 2))

    @property
    def offset(self) -> float:
        """Seconds to take away from the other clock's; wrong by half of the quickest round trip at most."""
        return min(self._samples)[1]


@dataclass(slots=True)
class Peer:
    """A worker, as the driver knows it. `process`: where this process has started it. `clock`: if it has another."""

    rank: int
    steps: Connection
    lifeline: Connection
    process: Popen[bytes] | None = None
    clock: RemoteClock | None = None
    asked: float | None = None
    """When the ping was sent that has no answer yet."""
    pong: Pong = field(default=Pong(0.0, -1, -1))
    gone: bool = False

    @property
    def offset(self) -> float:
        return 0.0 if self.clock is None else self.clock.offset


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank that is of no use any more. `why` goes on after its name; `usage`: what it was given cannot be used.

    `died`: it could not say so itself. `begun`, `finished`: the last steps that it is known to have begun and finished.
    """

    rank: int
    why: str
    died: bool = True
    usage: bool = False
    clock: float = inf
    begun: int = -1
    finished: int = -1


class Listener(Protocol):
    """Whom a crew tells, from its own thread."""

    def heard(self, peer: Peer, message: bytes) -> None:
        """A worker said something."""
        ...

    def patience(self, rank: int) -> float | None:
        """For how many seconds a rank may leave a ping unanswered; None: nothing is asked of it now."""
        ...

    def stalled(self) -> Loss | None:
        """Somebody who lives and does not get on."""
        ...

    def lost(self, loss: Loss | Exception) -> None:
        """All is over; called once."""
        ...


Hire = Callable[[], list[Peer]]
"""Starts workers, or meets them: one for each rank, in order."""


class Crew:
    """All workers of a driver."""

    def __init__(self, hire: Hire, listener: Listener) -> None:
        self._hire = hire
        self._listener = listener
        self._peers: list[Peer] = []
        self._selector = DefaultSelector()
        self._stopping = False
        self._losses: list[Loss] = []
        self._settled = inf
        self._thread = Thread(target=self._run, name="crew", daemon=True)

    def start(self) -> None:
        """Hire, and listen from now on."""
        self._thread.start()

    def send(self, rank: int, message: bytes) -> None:
        """To a worker. If it is gone nothing happens: the listener hears of that."""
        _send(self._peers[rank].steps, message)

    def stop(self) -> None:
        """Tell all workers to stop, and end those that do not in time. Safe to call twice, and after a loss."""
        self._stopping = True
        try:
            for peer in self._peers:
                if not peer.gone:
                    _send(peer.steps, plain(Kind.STOP))
            self._thread.join(GRACE)
        finally:  # also where a person is impatient
            self._end()
            self._thread.join(GRACE)
            # Not where they are lost: this thread might be about to send, to whatever has the line's number by then.
            for peer in self._peers:
                peer.steps.close()

    # --- in the crew's thread

    def _run(self) -> None:
        try:
            self._peers = self._hire()
            if not self._stopping:
                self._listen()
        except Exception as error:  # noqa: BLE001 - nobody else sees what happens in this thread
            self._listener.lost(error)
        finally:
            self._end()
            self._selector.close()
            for peer in self._peers:
                peer.gone = True
                peer.lifeline.close()

    def _listen(self) -> None:
        for peer in self._peers:
            self._selector.register(peer.steps, EVENT_READ, (peer, Inbox(peer.steps), self._hear))
            self._selector.register(peer.lifeline, EVENT_READ, (peer, Inbox(peer.lifeline), self._hear_pong))
        while self._selector.get_map() or (self._losses and not self._stopping):
            for key, _ in self._selector.select(min(TICK, max(self._settled - perf_counter(), 0.0))):
                peer, inbox, hear = key.data
                self._read(peer, inbox, hear)
            if self._stopping:
                continue
            self._ask()
            if self._losses and perf_counter() >= self._settled:
                self._listener.lost(_first(self._losses))
                return

    def _read(self, peer: Peer, inbox: Inbox, hear: Callable[[Peer, bytes], None]) -> None:
        try:
            messages = inbox.read()
        except EOFError:
            self._selector.unregister(inbox.line)
            if inbox.line is peer.lifeline:
                self._bury(peer)
            return
        for message in messages:
            hear(peer, message)

    def _hear(self, peer: Peer, message: bytes) -> None:
        if kind(message) is not Kind.FAILED:
            self._listener.heard(peer, message)
            return
        told = value(message)
        pong = Pong(*told["pong"])
        clock = pong.clock - peer.offset
        self._lose(Loss(peer.rank, told["why"], False, told["usage"], clock, pong.begun, pong.finished))

    def _hear_pong(self, peer: Peer, message: bytes) -> None:
        peer.pong = decode_pong(message)
        if peer.clock is not None and peer.asked is not None:
            peer.clock.sample(peer.asked, peer.pong.clock, perf_counter())
        peer.asked = None

    def _ask(self) -> None:
        """Ping those that have something to do, and lose who has been silent for too long."""
        for peer in self._peers:
            patience, now = self._listener.patience(peer.rank), perf_counter()
            if peer.gone or patience is None:
                peer.asked = None if patience is None else peer.asked
            elif peer.asked is None:
                peer.asked = now
                _send(peer.lifeline, plain(Kind.PING))
            elif now - peer.asked > patience:
                self._lose(self._known(peer, f"has not answered for {now - peer.asked:.0f} seconds"))
        if not self._losses and (loss := self._listener.stalled()):
            self._lose(loss)

    def _bury(self, peer: Peer) -> None:
        peer.gone = True
        if not self._stopping:
            self._lose(self._known(peer, _death(peer)))

    def _known(self, peer: Peer, why: str) -> Loss:
        return Loss(peer.rank, why, begun=peer.pong.begun, finished=peer.pong.finished)

    def _lose(self, loss: Loss) -> None:
        self._losses.append(loss)
        self._settled = min(self._settled, perf_counter() + SETTLE)

    # ---

    def _end(self) -> None:
        """What still runs here is killed; on other hosts workers leave when their lifeline ends."""
        for peer in self._peers:
            if peer.process is not None:
                peer.process.kill()
                with suppress(TimeoutExpired):  # in a driver's call: it ends after that
                    peer.process.wait(GRACE)
            if not peer.gone:
                for line in (peer.lifeline, peer.steps):
                    _shut(line)


def _send(line: Connection, message: bytes) -> None:
    with suppress(OSError):  # the end of the lifeline says why
        line.send_bytes(message)


def _shut(line: Connection) -> None:
    """End both directions, for who waits in a read or a write, too."""
    # The other end may be faster, or this one closed already.
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _first(losses: list[Loss]) -> Loss:
    """The reason of the others: who died, else who complained first."""
    return min(losses, key=lambda loss: (not loss.died, loss.clock))


def _death(peer: Peer) -> str:
    if peer.process is None:
        return "is gone: its process or its host went down, or the network between"
    try:
        code = peer.process.wait(1.0)
    except TimeoutExpired:
        return "has closed its lines to the driver"
    return f"was killed by {Signals(-code).name}" if code < 0 else f"ended with code {code}"
