"""The schema of the front door: what a user may set, and the only place where its defaults live.

Values and their limits. Which parts they lead to is `experiments.build`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from playground.reports import check_reports

MOST_REPLICAS = 4096


class SettingError(ValueError):
    """Something the user set that cannot be. One line: the option, its value, and what would do."""


@dataclass
class Parallel:
    """How many devices share the work: pipeline `stages` of `tp` devices each, in `replicas` copies.

    `layers`: how many each stage holds (null: as even as it goes). `dp_attention`: the replicas are ranks of one group,
    which step together and pool their tokens for the experts; `ep`: over how many ranks whole experts are dealt out.
    `exchange`, `padding`, `overlap` and `overlap_...`: see `playground.sim.traffic.Traffic` and `system.Manners`.
    `spare_layers`: room on each stage for so many more, which a policy may move there (`policy/placement`).
    """

    stages: int = 1
    tp: int = 1
    replicas: int = 1
    layers: list[int] | None = None
    dp_attention: bool = False
    ep: int = 1
    exchange: str = "all_gather"
    padding: str = "graphs"
    overlap: str = "none"
    overlap_rows: int = 0
    overlap_threshold: float = 0.48
    overlap_chunks: int = 2
    spare_layers: int = 0

    def __post_init__(self) -> None:
        _at_least_one("parallel", self, "stages", "tp", "replicas", "ep")
        if self.layers is not None:
            self._count_stages(self.layers)
        if self.spare_layers < 0 or (self.spare_layers and self.stages == 1):
            raise SettingError(
                f"parallel.spare_layers={self.spare_layers} must be 0, or more with parallel.stages of at least 2"
            )
        if self.replicas > MOST_REPLICAS:
            raise SettingError(f"parallel.replicas={self.replicas} must be at most {MOST_REPLICAS}")

    def _count_stages(self, layers: list[int]) -> None:
        if self.stages not in (1, len(layers)):
            raise SettingError(
                f"parallel.layers={layers} are {len(layers)} stages and parallel.stages={self.stages}: "
                "give one of the two"
            )
        self.stages = len(layers)


@dataclass
class Kv:
    """The paged KV cache of one rank.

    `blocks` caps the pool, in both backends (null: as many as the memory holds); `block_size` is in tokens;
    `host_blocks` is room for swapped-out blocks.
    """

    blocks: int | None = None
    block_size: int = 16
    prefix_cache: bool = True
    host_blocks: int = 0

    def __post_init__(self) -> None:
        _at_least_one("kv", self, "blocks", "block_size")
        if self.host_blocks < 0:
            raise SettingError(f"kv.host_blocks={self.host_blocks} must be 0 (no swapping) or more")


@dataclass
class Limits:
    """Of one rank: sequences admitted at any time, and tokens in one step."""

    max_seqs: int = 256
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        _at_least_one("limits", self, "max_seqs", "max_tokens")


@dataclass
class Queueing:
    """Where a preempted sequence waits (`front` or `back`), and when ranks tell a router of their load.

    All at multiples of `report_interval` seconds, or each after every `report_steps` steps; reports arrive
    `report_delay` seconds later. With neither a router sees present loads.
    """

    requeue: str = "front"
    report_interval: float = 0.0
    report_steps: int = 0
    report_delay: float = 0.0

    def __post_init__(self) -> None:
        try:
            check_reports(self.report_interval, self.report_steps, self.report_delay)
        except ValueError as error:
            raise SettingError(f"queueing.{error}") from error


@dataclass
class Slo:
    """Latency objectives in seconds that goodput and attainment are counted against; null: none."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2el"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise SettingError(f"slo.{name}={value} must be more than 0 seconds (null: no objective)")


@dataclass
class Settings:
    """Everything. Parts that a user's own package may supply are open (`Any`): they are built by their `_target_`."""

    policy: Any = MISSING
    workload: Any = MISSING
    backend: Any = MISSING
    model: Any = MISSING
    device: Any = MISSING
    links: Any = MISSING
    parallel: Parallel = field(default_factory=Parallel)
    kv: Kv = field(default_factory=Kv)
    limits: Limits = field(default_factory=Limits)
    queueing: Queueing = field(default_factory=Queueing)
    slo: Slo = field(default_factory=Slo)
    logger: Any = MISSING
    seed: int = 0
    weights: str = "checkpoint"
    """What the engine computes with: `checkpoint`, or `random` weights for any model's shape, read from nowhere."""
    plots: bool = False
    """Draw latency distributions, tokens per step and KV use into the run folder (needs the extra `report`)."""
    study: Any = None
    """A whole comparison instead of one run: see conf/experiment/quickstart.yaml."""
    run_dir: str = MISSING

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SettingError(f"seed={self.seed} must be 0 or more")
        check_weights(self.weights)


def register() -> None:
    """Let configurations start from the schema: a typo is then refused when they are composed."""
    ConfigStore.instance().store(name="schema", node=Settings, provider="playground")


def read(config: DictConfig) -> Settings:
    """The settings as typed values. The open parts stay mappings, to be built later."""
    # A + adds what nobody would read: refused rather than ignored.
    if added := [str(key) for key in config if key not in Settings.__dataclass_fields__]:
        raise SettingError(f"+{added[0]}: nothing takes it; without the + you would be told what there is")
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, Settings)
    return settings


def check_weights(weights: str) -> None:
    """Refuse what the engine cannot compute with."""
    if weights not in ("checkpoint", "random"):
        raise SettingError(f"weights={weights} must be checkpoint or random")


def _at_least_one(group: str, settings: object, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) is not None and value < 1:
            raise SettingError(f"{group}.{name}={value} must be at least 1")
