"""Where the devices of a deployment are, who talks to whom over which port, and what a step's exchanges take.

Placement and sizes: durations of kernels are a cost model's, contention is `fabric`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from playground.sim.collectives import Exchange, Team
from playground.sim.links import Link, Links


class Port(NamedTuple):
    """What some devices of a host send through, or receive through (`inward`): `kind` is within or across.

    Links are full duplex: the two directions do not feel each other.
    """

    kind: str
    host: int
    number: int
    inward: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """`replicas` pipelines of `stages` stages of `tp` devices each, packed into hosts.

    Independent replicas lie side by side and straddle a host's border only where they are larger than a host. In
    lockstep (DP attention) a stage of all replicas lies together, since those exchange tokens at every layer.
    """

    links: Links
    tp: int = 1
    stages: int = 1
    replicas: int = 1
    lockstep: bool = False
    tensor: Team = field(init=False)
    """The devices that share each layer."""
    ranks: Team = field(init=False)
    """All devices of a stage of a lockstep group; the tensor team where there is none."""

    def __post_init__(self) -> None:
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        option = f"parallel.tp={self.tp}"
        keep(self, "tensor", Team.of(self.links, self.tp, option))
        together = self.tp * self.replicas if self.lockstep else self.tp
        option += f", parallel.replicas={self.replicas}" if self.lockstep else ""
        keep(self, "ranks", Team.of(self.links, together, option))
        if self.links.across is None and any(self.crosses(0, stage) for stage in range(self.stages - 1)):
            raise ValueError(
                f"parallel.stages={self.stages}: stages of {together} devices need more than one host of "
                f"{self.links.devices_per_host}, and links={self.links.name} has no link between hosts: lower it, or "
                "choose links with one (links.across)"
            )

    def device(self, replica: int, stage: int) -> int:
        """The first of a stage's devices, counted through all hosts."""
        if self.lockstep:
            return (stage * self.replicas + replica) * self.tp
        size, host = self.stages * self.tp, self.links.devices_per_host
        if size > host:
            return replica * -(-size // host) * host + stage * self.tp
        return replica // (host // size) * host + replica % (host // size) * size + stage * self.tp

    def host(self, device: int) -> int:
        return device // self.links.devices_per_host

    def crosses(self, replica: int, stage: int) -> bool:
        """Whether the next stage is on another host."""
        return self.host(self.device(replica, stage)) != self.host(self.device(replica, stage + 1))

    def port(self, device: int, across: bool) -> Port:
        """What a device sends through."""
        host, place = divmod(device, self.links.devices_per_host)
        link = self._link(across)
        return Port("across" if across else "within", host, place // link.shared_by)

    def _link(self, across: bool) -> Link:
        return self.links.across if across and self.links.across else self.links.within

    def send_ports(self, replica: int, stage: int) -> tuple[Port, Port]:
        """What a stage sends to the next through, and what that receives through."""
        across = self.crosses(replica, stage)
        arrival = self.port(self.device(replica, stage + 1), across)
        return self.port(self.device(replica, stage), across), arrival._replace(inward=True)

    def team_ports(self, replica: int, stage: int) -> tuple[Port, Port]:
        """What the collectives of a stage go through: every device sends and receives alike, so the first stands for
        all."""
        port = self.port(self.device(replica, stage), self.ranks.hosts > 1)
        return port, port._replace(inward=True)

    def send(self, replica: int, stage: int, size: float) -> Exchange:
        """Every device of a stage sends `size` bytes to its peer of the next one; those behind one port take turns."""
        link = self._link(self.crosses(replica, stage))
        senders = min(self.ranks.local, link.shared_by)
        return Exchange(self.links.start + link.latency, size * senders / link.rate)
