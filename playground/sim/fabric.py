"""The devices and links of a cluster as SimPy resources: who uses the same thing at the same time slows the other.

A port is a processor that divides its rate evenly among the transfers in it. Latency occupies nothing. It does not know
what is sent; `cluster` says who sends through which port.
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
from playground.sim.processor import Finished, Processor


class Ports:
    """Every port of a cluster that somebody uses, made when it is first asked for."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._ports: dict[Port, Processor] = {}

    def at(self, port: Port) -> Processor:
        if port not in self._ports:
            self._ports[port] = Processor(self._environment)
        return self._ports[port]


class Route:
    """From one stage to the next: latency, and time on a port that others may use as well.

    Transfers of one lane arrive in the order in which they were sent. `send` says what so many bytes take.
    """

    def __init__(self, environment: Environment, port: Processor, name: str, send: Callable[[float], Exchange]) -> None:
        self._environment = environment
        self._port = port
        self._name = name
        self._send = send

    def submit(self, lane: str, work: float, finished: Finished) -> None:
        """Carry `work` bytes."""
        latency, wire = self._send(work)

        def sent(started: float, ended: float) -> None:
            _after(self._environment, latency, lambda: finished(started, ended + latency))

        self._port.submit(f"{self._name} {lane}", wire, sent)


@dataclass(slots=True)
class _Job:
    """One lane's step on a stage."""

    work: Work
    finished: Finished
    pending: int = 0
    """Of kernels and exchanges, how many are not done."""
    started: float = 0.0


class StageDevices:
    """The devices of a stage and the port of their collectives.

    Within a lane steps follow one another; while one lane communicates the others have the device. A step's own
    kernels and exchanges follow one another, too, unless its work says that they overlap.
    """

    def __init__(self, environment: Environment, device: Processor, port: Processor, name: str) -> None:
        self._environment = environment
        self._device = device
        self._port = port
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
            self._port.submit(f"{self._name} {lane}", job.work.wire, part_done)

        if job.work.overlaps:
            self._port.submit(f"{self._name} {lane}", job.work.wire, part_done)
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
    """Swaps KV; what goes out to the host may share a port with what devices send, what comes in arrives alone."""

    def __init__(self, environment: Environment, port: Processor, name: str) -> None:
        self._inward = Processor(environment)
        self._outward = port
        self._name = name

    def submit(self, lane: str, work: float, finished: Finished) -> None:
        """Copy for `work` seconds."""
        if lane == COPY_OUT:
            self._outward.submit(f"{self._name} {lane}", work, finished)
        else:
            self._inward.submit(lane, work, finished)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Makes the resources of a simulation in which groups share ports."""

    cluster: Cluster
    law: Law = TURNS

    def __call__(self, environment: Environment, spec: Spec) -> Machine:
        ports = Ports(environment)
        stages, links = range(spec.stages), range(spec.stages - 1)

        def devices(group: int, stage: int) -> StageDevices:
            port = ports.at(self.cluster.team_port(group, stage))
            return StageDevices(environment, Processor(environment, self.law), port, f"{group}.{stage}")

        def route(group: int, stage: int) -> Route:
            port = ports.at(self.cluster.send_port(group, stage))
            return Route(environment, port, f"{group}.{stage} send", partial(self.cluster.send, group, stage))

        def engine(group: int) -> Resource:
            if not self.cluster.links.host_shares:
                return Processor(environment, APART)
            # All stages swap at once: the first one's port stands for all.
            return CopyEngine(environment, ports.at(self.cluster.team_port(group, 0)), f"{group}")

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
