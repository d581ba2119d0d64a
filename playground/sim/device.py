"""One accelerator and its links, as a data sheet gives them, and what kernels achieve of that.

Figures only: it does not know a model. Each sheet in `conf/device` names the source of each figure.
"""

from __future__ import annotations

from dataclasses import dataclass

_POSITIVE = ("peak_flops", "memory_bandwidth", "memory_bytes", "link_bandwidth", "host_bandwidth", "gemm_tile")
_FRACTIONS = (
    "gemm_fraction",
    "expert_fraction",
    "eight_bit_fraction",
    "eight_bit_expert_fraction",
    "attention_fraction",
    "bandwidth_fraction",
    "gather_fraction",
    "unpack_fraction",
    "link_fraction",
    "host_fraction",
)
_SECONDS = (
    "link_latency",
    "host_latency",
    "kernel_latency",
    "expert_latency",
    "dealt_latency",
    "dealt_packed_latency",
    "quantise_latency",
    "eager_launch",
    "graph_launch",
)


@dataclass(frozen=True, slots=True)
class Device:
    """Rates are per second and per direction, sizes in bytes, latencies in seconds.

    A fraction is what good kernels reach of the sheet's figure on large work: above 0 and at most 1, so that no
    prediction beats the sheet. Defaults are H200 measurements (docs/cost-model.md) and only a guess elsewhere.
    """

    name: str
    peak_flops: float
    """Dense (no sparsity) FLOP/s of matrix products in the model's dtype, accumulating in float32."""
    memory_bandwidth: float
    memory_bytes: float
    """What the driver reports, not the rounded figure of the sheet."""
    link_bandwidth: float
    """To another device of the same host: NVLink where there is one, else PCIe."""
    host_bandwidth: float
    """To pinned memory of the host, for swap copies."""
    eight_bit_flops: float | None = None
    """Dense FLOP/s of FP8 or INT8 products. None: the device has none, and such weights are multiplied in the dtype."""
    gemm_fraction: float = 0.8
    expert_fraction: float = 0.76
    """Of the grouped products of wide experts."""
    eight_bit_fraction: float = 0.6
    eight_bit_expert_fraction: float = 0.37
    attention_fraction: float = 0.53
    bandwidth_fraction: float = 0.9
    gather_fraction: float = 0.6
    """Of what streaming kernels reach, while tokens are gathered for experts and what these made is added up."""
    unpack_fraction: float = 0.7
    """Of what streaming kernels reach, where experts of 4 bits are unpacked on their way."""
    link_fraction: float = 0.5
    host_fraction: float = 0.85
    link_latency: float = 5e-6
    """Of one collective or one send."""
    host_latency: float = 1e-5
    """Of one batched copy."""
    kernel_latency: float = 2e-5
    """Start and drain of the kernels of one layer: paid on the device in every step, graph or not."""
    expert_latency: float = 3e-5
    """What a layer with experts takes more: routing, sorting and gathering, and start and drain of two more kernels."""
    dealt_latency: float = 1e-5
    """What it takes more where ranks hold experts of their own, and look for the tokens that are theirs."""
    dealt_packed_latency: float = 5e-5
    """The same where experts are of 4 bits: their kernels sort out what is a rank's own, and gather nothing else."""
    quantise_latency: float = 1.7e-5
    """What it takes more where tokens are quantised before each of the two 8-bit products."""
    expert_width: int = 120
    """How wide a rank's slice of an expert is when its grouped products reach half of the rate of wide ones."""
    decode_tile: int = 1
    """Queries that a decode takes the time of in the one launch of attention that it shares with prefills. 1: decodes
    have a launch of their own, or the heads that share keys are packed into one tile (FlashAttention 3). 64: each
    head's one query fills a tile by itself (FlashAttention 2, which vLLM runs on all but Hopper)."""
    eager_launch: float = 6e-5
    """Host time to launch the kernels of one layer one by one; hidden while the device is busier than that."""
    graph_launch: float = 5e-5
    """Host time to replay the CUDA graph of a whole step."""
    gemm_tile: int = 64
    """Matrix products of more tokens than this work on so many at a time: 257 cost as much as 320."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"device.{name}={value} must be greater than 0")
        if self.eight_bit_flops is not None and not self.eight_bit_flops > 0:
            raise ValueError(f"device.eight_bit_flops={self.eight_bit_flops} must be greater than 0, or null")
        if self.expert_width < 0:
            raise ValueError(f"device.expert_width={self.expert_width} must be 0 or more")
        if self.decode_tile < 1:
            raise ValueError(f"device.decode_tile={self.decode_tile} must be at least 1")
        for name in _FRACTIONS:
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"device.{name}={value} must lie in (0, 1]")
        for name in _SECONDS:
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"device.{name}={value} must be 0 or more seconds")

    @property
    def gemm_flops(self) -> float:
        """FLOP/s that large matrix products reach."""
        return self.peak_flops * self.gemm_fraction

    def products(self, eight_bit: bool) -> float:
        """FLOP/s that large matrix products reach, at the 8-bit rate where it is asked for and there is one."""
        if eight_bit and self.eight_bit_flops:
            return self.eight_bit_flops * self.eight_bit_fraction
        return self.gemm_flops

    def expert_products(self, eight_bit: bool) -> float:
        """FLOP/s that the grouped products of experts reach."""
        if eight_bit and self.eight_bit_flops:
            return self.eight_bit_flops * self.eight_bit_expert_fraction
        return self.peak_flops * self.expert_fraction

    @property
    def attention_flops(self) -> float:
        """FLOP/s that prefill attention reaches."""
        return self.peak_flops * self.attention_fraction

    @property
    def bandwidth(self) -> float:
        """Bytes/s that kernels reach when they stream from device memory."""
        return self.memory_bandwidth * self.bandwidth_fraction

    @property
    def link(self) -> float:
        """Bytes/s that collectives and sends reach."""
        return self.link_bandwidth * self.link_fraction

    @property
    def host_link(self) -> float:
        """Bytes/s that copies to and from pinned host memory reach."""
        return self.host_bandwidth * self.host_fraction
