"""The links between devices and between hosts, as sheets give them, and what transfers achieve of that.

Figures only: it does not know a model, or who talks to whom. Each file in `conf/links` names its sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.sim.device import Device

ALL_REDUCE = ("auto", "ring", "tree", "one_shot", "two_shot")


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link. Rates in bytes per second and direction of one port, latencies in seconds.

    `fraction` is what large transfers reach of the sheet; `latency` is that of one hop; `shared_by`: devices of a host
    that have one port between them (1: each has its own).
    """

    bandwidth: float
    fraction: float = 1.0
    latency: float = 1e-6
    shared_by: int = 1

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"links.bandwidth={self.bandwidth} must be more than 0 bytes/s")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"links.fraction={self.fraction} must lie in (0, 1]")
        if not self.latency >= 0:
            raise ValueError(f"links.latency={self.latency} must be 0 or more seconds")
        if self.shared_by < 1:
            raise ValueError(f"links.shared_by={self.shared_by} must be at least 1 device")

    @property
    def rate(self) -> float:
        """Bytes/s that large transfers reach through one port."""
        return self.bandwidth * self.fraction


@dataclass(frozen=True, slots=True)
class Links:
    """Hosts of `devices_per_host` devices: linked `within` a host, and `across` hosts (null: hosts are islands).

    `start` is what any collective or send takes before a byte moves, in seconds. `direct`: devices of a host read each
    other's memory (NVLink), so that one-shot and two-shot all-reduces exist. `all_reduce` names an algorithm; `auto`
    takes the fastest for each size, as NCCL's tuner and vLLM's dispatch do. `host_shares`: copies to the host's memory
    leave through the same ports as what devices of a host send each other (PCIe).
    """

    name: str
    within: Link
    across: Link | None = None
    devices_per_host: int = 8
    start: float = 4e-6
    direct: bool = True
    all_reduce: str = "auto"
    host_shares: bool = False

    def __post_init__(self) -> None:
        if self.devices_per_host < 1:
            raise ValueError(f"links.devices_per_host={self.devices_per_host} must be at least 1")
        if not self.start >= 0:
            raise ValueError(f"links.start={self.start} must be 0 or more seconds")
        if self.all_reduce not in ALL_REDUCE:
            raise ValueError(f"links.all_reduce={self.all_reduce} must be one of {', '.join(ALL_REDUCE)}")
        if self.all_reduce in ("one_shot", "two_shot") and not self.direct:
            raise ValueError(f"links.all_reduce={self.all_reduce} needs links.direct=true; ring and tree do not")

    def of(self, device: Device) -> Links:
        """These, whatever the device."""
        return self


ISLAND = 1 << 20
"""Devices of the one host that a device's own sheet speaks of: no number of devices leaves it."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """The links that the device's own sheet states: every device reaches every other over the same kind, by rings."""

    def of(self, device: Device) -> Links:
        within = Link(device.link_bandwidth, device.link_fraction, latency=0.0)
        return Links(
            f"{device.name} sheet", within, None, ISLAND, start=device.link_latency, direct=False, all_reduce="ring"
        )
