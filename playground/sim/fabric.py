"""The devices and links of a cluster as SimPy resources: who uses the same thing at the same time slows the other.

Transfers hold a port where they leave and one where they arrive (`network`). Latency occupies nothing. It does not know
what is sent; `cluster` says who sends through which ports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from simpy.core import Environment
from simpy.events import Event, Timeout

from playground.core import COPY_OUT, Spec
from playground.sim.backend import Machine, Resource
from playground.sim.cluster import Cluster, Port
from playground.sim.collectives import Exchange
from playground.sim.contention import APART, TURNS, Law
from playground.sim.durations import Work
from playground.sim.network import Network
from playground.sim.processor import Finished, Processor


class Route:
    """From one stage to the next: latency, and time on ports that others may use as well.

    Transfers of one lane arrive in the order in which they were sent. `send` says what so many bytes take.
    """

    def __init__(
        self,
        environment: Environment,
        network: Network,
        ports: tuple[Port, Port],
        name: str,
        send: Callable[[float], Exchange],
    ) -> None:
        self._environment = environment
        self._network = network
        self._ports = ports
        self._name = name
        self._send = send

    def submit(self, lane: str, work: float, finished: Finished) -> None:
        """Carry `work` bytes."""
        latency, wire = self._send(work)

        def sent(started: float, ended: float) -> None:
            _after(self._environment, latency, lambda: finished(started, ended + latency))

        self._network.submit(f"{self._name} {lane}", self._ports, wire, sent)


@dataclass(slots=True)
class _Job:
    """One lane's step on a stage."""

    work: Work
    finished: Finished
    pending: int = 0
    """Of kernels and exchanges, how many are not done."""
    started: float = 0.0


class StageDevices:
    """The devices of a stage and the ports of their collectives.

    Within a lane steps follow one another; while one lane communicates the others have the device. A step's own
    kernels and exchanges follow one another, too, unless its work says that they overlap.
    """

    def __init__(
        self, environment: Environment, device: Processor, network: Network, ports: tuple[Port, Port], name: str
    ) -> None:
        self._environment = environment
        self._device = device
        self._network = network
        self._ports = ports
        self._name = name
        self._lanes: dict[str, deque[_Job]] = {}

    def submit(self, lane: str, work: Any, finished: Finished) -> None:
        """Do a `Work` after everything that was submitted to this lane before."""
        assert isinstance(work, Work)
        queue = self._lanes.setdefault(lane, deque())
        queue.append(_Job(work, finished))
        if len(queue) == 1:
            self._start(lane, queue[0])

    def _start(self, lane: str, job: _Job) -> None:
        job.started = self._environment.now
        job.pending = 2

        def part_done(_started: float, _ended: float) -> None:
            job.pending -= 1
            if job.pending == 0:
                _after(self._environment, job.work.tail, lambda: self._end(lane))

        def exchange(_started: float, _ended: float) -> None:
            job.pending -= 1
            self._network.submit(f"{self._name} {lane}", self._ports, job.work.wire, part_done)

        if job.work.overlaps:
            self._network.submit(f"{self._name} {lane}", self._ports, job.work.wire, part_done)
            self._device.submit(lane, job.work.demand, part_done)
        else:
            self._device.submit(lane, job.work.demand, exchange)

    def _end(self, lane: str) -> None:
        queue = self._lanes[lane]
        job = queue.popleft()
        if queue:
            self._start(lane, queue[0])
        job.finished(job.started, self._environment.now)


class CopyEngine:
    """Swaps KV over the ports that devices send and receive through."""

    def __init__(self, network: Network, ports: tuple[Port, Port], name: str) -> None:
        self._network = network
        self._out, self._in = ports
        self._name = name

    def submit(self, lane: str, work: float, finished: Finished) -> None:
        """Copy for `work` seconds."""
        port = self._out if lane == COPY_OUT else self._in
        self._network.submit(f"{self._name} {lane}", (port,), work, finished)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Makes the resources of a simulation in which groups share ports."""

    cluster: Cluster
    law: Law = TURNS

    def __call__(self, environment: Environment, spec: Spec) -> Machine:
        network = Network(environment)
        stages, links = range(spec.stages), range(spec.stages - 1)

        def devices(group: int, stage: int) -> StageDevices:
            ports = self.cluster.team_ports(group, stage)
            return StageDevices(environment, Processor(environment, self.law), network, ports, f"{group}.{stage}")

        def route(group: int, stage: int) -> Route:
            ports = self.cluster.send_ports(group, stage)
            return Route(environment, network, ports, f"{group}.{stage} send", partial(self.cluster.send, group, stage))

        def engine(group: int) -> Resource:
            if not self.cluster.links.host_shares:
                return Processor(environment, APART)
            # All stages swap at once: the first one's port stands for all.
            return CopyEngine(network, self.cluster.team_ports(group, 0), f"{group}")

        groups = range(len(spec.groups))
        return Machine(
            [[devices(group, stage) for stage in stages] for group in groups],
            [[route(group, stage) for stage in links] for group in groups],
            [engine(group) for group in groups],
        )


def _after(environment: Environment, delay: float, then: Any) -> None:
    if delay <= 0:
        then()
        return
    timer = Timeout(environment, delay)
    assert timer.callbacks is not None

    def fire(_: Event) -> None:
        then()

    timer.callbacks.append(fire)
