"""From settings to parts: wiring only. Each part is built by the `_target_` that its configuration names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Protocol

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from analysis.metrics import Objectives
from experiments.errors import explain
from experiments.logger import Logger
from experiments.settings import Kv, Limits, Parallel, Queueing, SettingError, Settings
from playground.backend import Backend
from playground.core import Spec
from playground.model import ModelShape
from playground.policy import Policy
from playground.scheduler import Scheduler
from playground.sim.backend import Modelled, SimBackend
from playground.sim.capacity import RESERVE_BYTES, kv_blocks
from playground.sim.cost import CostModel
from playground.sim.device import Device
from playground.workload.source import Source


class Workload(Protocol):
    def source(self, seed: int) -> Source: ...


class BackendFactory(Protocol):
    """What `backend._target_` names: it makes the backend of a run from all that is set."""

    def make(self, plan: Plan) -> Backend: ...

    def where(self, plan: Plan) -> str:
        """The device that the run's times are of."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What a backend is made from. `checkpoint` is what `model.path` says: the engine's weights are there."""

    settings: Settings
    model: ModelShape
    device: Device
    checkpoint: str

    @property
    def tp(self) -> int:
        return self.settings.parallel.tp

    @property
    def stages(self) -> int:
        return self.settings.parallel.stages

    def spec(self, fitting: int, **more: Any) -> Spec:
        """With as many blocks as fit, or as `kv.blocks` caps them to."""
        kv, limits = self.settings.kv, self.settings.limits
        return Spec(
            blocks=fitting if kv.blocks is None else min(kv.blocks, fitting),
            block_size=kv.block_size,
            host_blocks=kv.host_blocks,
            max_seqs=limits.max_seqs,
            max_tokens=limits.max_tokens,
            max_length=self.model.max_length,
            stages=self.stages,
            ranks=self.settings.parallel.replicas,
            **more,
        )


@dataclass(frozen=True, slots=True)
class Simulated:
    """SimPy and a cost model.

    `cost` makes the model of (model, device, tp, stages, block_size). `utilization` and `reserve_bytes` say how much
    of the memory KV may fill; `lane_gain` how well lanes overlap (0: they take turns); `skip_ahead`: advance quiet
    stretches at once, with the same outcome.
    """

    cost: Callable[..., CostModel]
    lane_gain: float = 0.0
    utilization: float = 0.9
    reserve_bytes: float = RESERVE_BYTES
    skip_ahead: bool = True

    def make(self, plan: Plan) -> SimBackend:
        return SimBackend(self._spec(plan), Modelled(self.cost_model(plan), plan.stages), self.lane_gain)

    def where(self, plan: Plan) -> str:
        return plan.device.name

    def cost_model(self, plan: Plan) -> CostModel:
        size = plan.settings.kv.block_size
        return self.cost(model=plan.model, device=plan.device, tp=plan.tp, stages=plan.stages, block_size=size)

    def _spec(self, plan: Plan) -> Spec:
        fitting = kv_blocks(
            plan.model,
            plan.device,
            plan.tp,
            plan.stages,
            block_size=plan.settings.kv.block_size,
            utilization=self.utilization,
            reserve_bytes=self.reserve_bytes,
        )
        return plan.spec(fitting, forwards_tokens=True, repeats=self.skip_ahead)


@dataclass(frozen=True, slots=True)
class Parts:
    """All that one run needs."""

    source: Source
    scheduler: Scheduler
    backend: Backend
    device: str
    logger: Logger
    objectives: Objectives


def build(settings: Settings) -> Parts:
    """Cheap parts first, so that a wrong option is told before weights are loaded."""
    logger: Logger = _make("logger", settings.logger)
    _make("policy", settings.policy)
    source = _source(settings)
    plan = _plan(settings)
    factory: BackendFactory = _make("backend", settings.backend)
    with setting("backend"):
        backend = factory.make(plan)
    return Parts(source, scheduler(settings, backend.spec), backend, factory.where(plan), logger, objectives(settings))


def objectives(settings: Settings) -> Objectives:
    slo = settings.slo
    return Objectives(*(inf if limit is None else limit for limit in (slo.ttft, slo.tpot, slo.e2el)))


@contextmanager
def setting(part: str) -> Iterator[None]:
    """What goes wrong while a part is built is the user's to mend: one line, no traceback."""
    try:
        yield
    except SettingError:
        raise
    except (ValueError, TypeError, OSError, ImportError, HydraException, OmegaConfBaseException) as error:
        raise SettingError(explain(error) or _about(part, str(error))) from error


def _about(part: str, problem: str) -> str:
    """With the option's full name where a part, which cannot know it, says `tp=3 ...`."""
    if problem.startswith(f"{part}."):
        return problem
    if not (found := re.match(r"(\w+)[\w.]*=", problem)):
        return f"{part}: {problem}"
    return problem if found[1] in PARTS else f"{OPTIONS.get(found[1], part)}.{problem}"


PARTS = {part.name for part in fields(Settings)}
OPTIONS = {
    option.name: group
    for group, kind in {"parallel": Parallel, "kv": Kv, "limits": Limits, "queueing": Queueing}.items()
    for option in fields(kind)
}
"""The group that an option of the front door belongs to."""


def _make(part: str, config: Any) -> Any:
    with setting(part):
        if not (isinstance(config, dict) and "_target_" in config):
            raise SettingError(f"{part}={config} names no _target_: choose an option of the group {part}")
        # Plain containers inside: DictConfig stops at the front door. Under its name, so that errors say where.
        return instantiate({part: config}, _convert_="all")[part]


def _source(settings: Settings) -> Source:
    workload: Workload = _make("workload", settings.workload)
    with setting("workload"):
        return workload.source(settings.seed)


def _plan(settings: Settings) -> Plan:
    model: ModelShape = _make("model", settings.model)
    device: Device = _make("device", settings.device)
    return Plan(settings, model, device, str(settings.model.get("path", "")))


def scheduler(settings: Settings, spec: Spec) -> Scheduler:
    """With a fresh policy: policies may keep state from step to step."""
    queueing = settings.queueing
    policy: Policy = _make("policy", settings.policy)
    with setting("policy"):
        return Scheduler(
            spec,
            policy,
            seed=settings.seed,
            prefix_cache=settings.kv.prefix_cache,
            requeue=queueing.requeue,
            report_interval=queueing.report_interval,
        )
