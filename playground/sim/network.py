"""Transfers over ports that others use as well: each holds what it leaves by and what it arrives by.

Ports divide their rate by max-min fairness, as switched full-duplex networks are modelled (Bertsekas and Gallager,
Data Networks, 6.5; SimGrid): the rates of all transfers rise together until a port is full; those through it stay as
they are, the others go on rising. It knows no bytes and no topology: work is in seconds on free ports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf

from simpy.core import Environment
from simpy.events import Event, Timeout

from playground.sim.processor import Finished


@dataclass(slots=True, eq=False)
class _Transfer:
    lane: str
    ports: tuple[Hashable, ...]
    left: float
    """Seconds of it if its ports were free."""
    finished: Finished
    started: float = 0.0
    updated: float = 0.0
    rate: float = 0.0
    timer: Timeout | None = None


class Network:
    """All ports of a cluster. A port is whatever names it; each direction of a full-duplex link is one."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._lanes: dict[str, deque[_Transfer]] = {}
        self._through: dict[Hashable, list[_Transfer]] = {}

    def submit(self, lane: str, ports: tuple[Hashable, ...], work: float, finished: Finished) -> None:
        """Take `work` seconds of all these ports, after everything that was submitted to this lane before."""
        queue = self._lanes.setdefault(lane, deque())
        queue.append(_Transfer(lane, ports, work, finished))
        if len(queue) == 1:
            self._start(queue[0])

    def _start(self, transfer: _Transfer) -> None:
        transfer.started = transfer.updated = self._environment.now
        alone = True
        for port in transfer.ports:
            through = self._through.setdefault(port, [])
            alone = alone and not through
            through.append(transfer)
        if alone:  # most are: spare them the search for others
            self._go_on(transfer, 1.0)
        else:
            self._share(transfer.ports)

    def _share(self, ports: Iterable[Hashable]) -> None:
        """New rates for all who feel that one came to these ports, or went."""
        transfers = self._reached(ports)
        for transfer, rate in zip(transfers, max_min([one.ports for one in transfers]), strict=True):
            if rate != transfer.rate:
                self._go_on(transfer, rate)

    def _reached(self, ports: Iterable[Hashable]) -> list[_Transfer]:
        """Transfers through these ports, through ports that those use, and so on."""
        found: dict[_Transfer, None] = {}
        left = list(ports)
        while left:
            for transfer in self._through.get(left.pop(), ()):
                if transfer not in found:
                    found[transfer] = None
                    left += transfer.ports
        return list(found)

    def _go_on(self, transfer: _Transfer, rate: float) -> None:
        now = self._environment.now
        transfer.left = max(transfer.left - (now - transfer.updated) * transfer.rate, 0.0)
        transfer.updated, transfer.rate = now, rate
        transfer.timer = Timeout(self._environment, transfer.left / rate)
        assert transfer.timer.callbacks is not None
        transfer.timer.callbacks.append(lambda timer: self._fire(transfer, timer))

    def _fire(self, transfer: _Transfer, timer: Event) -> None:
        if timer is not transfer.timer:  # its rate has changed since
            return
        for port in transfer.ports:
            self._through[port].remove(transfer)
        if left := [port for port in transfer.ports if self._through[port]]:
            self._share(left)
        queue = self._lanes[transfer.lane]
        queue.popleft()
        if queue:
            self._start(queue[0])
        transfer.finished(transfer.started, self._environment.now)


def max_min(transfers: list[tuple[Hashable, ...]]) -> list[float]:
    """The share of their ports' rate that transfers through these ports get, in [0, 1]."""
    if transfers.count(transfers[0]) == len(transfers):  # all through the same ports
        return [1 / len(transfers)] * len(transfers)
    shares = [inf] * len(transfers)
    users: dict[Hashable, list[int]] = {}
    for index, ports in enumerate(transfers):
        for port in ports:
            users.setdefault(port, []).append(index)
    free = dict.fromkeys(users, 1.0)
    while users:
        fullest = min(users, key=lambda port: free[port] / len(users[port]))
        share = free[fullest] / len(users[fullest])
        for index in list(users[fullest]):
            shares[index] = share
            for port in transfers[index]:
                users[port].remove(index)
                free[port] -= share
        users = {port: left for port, left in users.items() if left}
    return shares
