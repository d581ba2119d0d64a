"""From settings to parts: wiring only. Each part is built by the `_target_` that its configuration names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from inspect import isclass
from math import inf, isfinite
from pathlib import Path
from textwrap import shorten
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf.errors import OmegaConfBaseException

from analysis.objectives import Objectives
from experiments.errors import explain
from experiments.logger import Logger
from experiments.overrides import default
from experiments.settings import Kv, Limits, Parallel, Queueing, SettingError, Settings
from playground.backend import Backend
from playground.core import Spec
from playground.model import ModelShape
from playground.policy import Policy
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.capacity import RESERVE_BYTES, Layout, kv_blocks
from playground.sim.cluster import Cluster
from playground.sim.contention import TURNS, Gain, Law
from playground.sim.cost import CostModel
from playground.sim.device import Device
from playground.sim.durations import Demanding, Modelled, Repeating
from playground.sim.fabric import Fabric
from playground.sim.links import Links, Sheet
from playground.sim.migration import blocks_beside_spares
from playground.sim.overlap import row_products, shared_experts
from playground.sim.system import Manners, System, check_overlap
from playground.sim.traffic import Traffic, check_experts
from playground.sim.upload import Uploaded, check_uploads, with_uploads
from playground.workload.source import Source


class Workload(Protocol):
    def source(self, seed: int) -> Source: ...


class BackendFactory(Protocol):
    """What `backend._target_` names: it makes the backend of a run from all that is set."""

    def make(self, plan: Plan) -> Backend: ...

    def where(self, plan: Plan) -> str:
        """The device that the run's times are of."""
        ...


class LinksFactory(Protocol):
    """What `links._target_` names: links, or what says which links a device has."""

    def of(self, device: Device) -> Links: ...


class Study(Protocol):
    """What `study._target_` names: a comparison that makes its own runs."""

    def run(self, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """Run everything into subfolders; what there is to say in one JSON line. `overrides` are the user's own."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What a backend is made from. `checkpoint` is what `model.path` says: the engine's weights are there."""

    settings: Settings
    model: ModelShape
    device: Device
    checkpoint: str
    links: LinksFactory = field(default_factory=Sheet)

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
            lockstep=self.settings.parallel.dp_attention,
            **more,
        )

    @property
    def cut(self) -> dict[str, Any]:
        """How the model is cut, as cost models take it. What is as usual is left out: not every model knows of it."""
        parallel = self.settings.parallel
        cut: dict[str, Any] = {"tp": self.tp, "stages": self.stages}
        if parallel.layers is not None:
            cut["layers"] = tuple(parallel.layers)
        if self.model.experts and (parallel.ep > 1 or parallel.dp_attention):
            cut |= {"ep": parallel.ep, "pooling": parallel.replicas if parallel.dp_attention else 1}
        return cut

    def traffic(self) -> Traffic:
        """Who talks to whom in a step, and over what."""
        parallel = self.settings.parallel
        links = self.links.of(self.device)
        cluster = Cluster(links, self.tp, self.stages, parallel.replicas, parallel.dp_attention)
        return Traffic(self.model, cluster, self.layout.layers, parallel.exchange)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, **self.cut)

    @property
    def linked(self) -> bool:
        """Whether what a step sends depends on more than the device's own sheet."""
        parallel = self.settings.parallel
        talks = self.tp > 1 or self.stages > 1
        if parallel.dp_attention or parallel.spare_layers:
            return True
        if parallel.overlap == "two_batch":  # halves read the weights twice, whether or not they talk
            return True
        return talks and (not isinstance(self.links, Sheet) or parallel.overlap != "none")


@dataclass(frozen=True, slots=True)
class Simulated:
    """SimPy and a cost model.

    `cost` makes the model of (model, device, tp, stages, block_size). `utilization` and `reserve_bytes` say how much
    of the memory KV may fill; `contention`: the law by which lanes share a device; `uploads`: a step's inputs travel
    in the host's own time (`none`), `before` its kernels, or in the `lane` of inward copies; `skip_ahead`: advance
    quiet stretches at once, with the same outcome.
    """

    cost: Callable[..., CostModel]
    contention: Law = TURNS
    uploads: str = "none"
    utilization: float = 0.9
    reserve_bytes: float = RESERVE_BYTES
    skip_ahead: bool = True

    def __post_init__(self) -> None:
        check_uploads(self.uploads)

    def make(self, plan: Plan) -> SimBackend:
        parallel = plan.settings.parallel
        sharing = plan.tp * (parallel.replicas if parallel.dp_attention else 1)
        check_experts(plan.model, parallel.ep, sharing, parallel.exchange)
        check_overlap(parallel.overlap, plan.model, plan.tp, parallel.dp_attention)
        manners = Manners(
            parallel.padding,
            parallel.overlap,
            parallel.overlap_rows,
            parallel.overlap_threshold,
            parallel.overlap_chunks,
        )
        spec = self._spec(plan)
        cost = self.cost_model(plan)
        if not plan.linked and self.uploads != "lane":
            told = Modelled if isinstance(self.contention, Gain) else Demanding
            return self._alone(plan, spec, told(cost, plan.stages))
        traffic = plan.traffic()
        shared = len(spec.groups) > 1 or spec.stages > 1 or parallel.overlap == "lanes"
        shared = shared or not isinstance(self.contention, Gain) or self.uploads == "lane"
        more: dict[str, Any] = {"row_products": row_products(plan.model, plan.device, plan.tp)}
        if parallel.spare_layers:
            more["recut"] = partial(self._recut, plan)
            more["layer_block_bytes"] = spec.block_size * plan.layout.kv_bytes_per_token_layer
        system = System(cost, traffic, manners, shared, shared_experts(plan.model, plan.device, plan.tp), **more)
        if not shared:
            return self._alone(plan, spec, system)
        fabric = Fabric(traffic.cluster, self.contention)
        if self.uploads == "none":
            return SimBackend(spec, system, build=fabric)
        build = with_uploads(fabric) if self.uploads == "lane" else fabric
        return SimBackend(spec, self._uploaded(plan, system), build=build)

    def _alone(self, plan: Plan, spec: Spec, durations: Repeating) -> SimBackend:
        """Where nobody shares anything but lanes a device."""
        if self.uploads == "none":
            return SimBackend(spec, durations, self.contention)
        return SimBackend(spec, self._uploaded(plan, durations), self.contention)

    def _uploaded(self, plan: Plan, durations: Repeating) -> Uploaded:
        return Uploaded(durations, plan.device, plan.settings.kv.block_size, self.uploads)

    def where(self, plan: Plan) -> str:
        return plan.device.name

    def cost_model(self, plan: Plan) -> CostModel:
        return self._cost_model(plan, plan.cut)

    def _cost_model(self, plan: Plan, cut: dict[str, Any]) -> CostModel:
        return self.cost(model=plan.model, device=plan.device, block_size=plan.settings.kv.block_size, **cut)

    def _recut(self, plan: Plan, layers: tuple[int, ...]) -> CostModel:
        """The cost model when stages hold so many layers each."""
        return self._cost_model(plan, plan.cut | {"layers": layers})

    def _spec(self, plan: Plan) -> Spec:
        fitting = kv_blocks(
            plan.model,
            plan.device,
            block_size=plan.settings.kv.block_size,
            utilization=self.utilization,
            reserve_bytes=self.reserve_bytes,
            **plan.cut,
        )
        moving: dict[str, Any] = {}
        if spare := plan.settings.parallel.spare_layers:
            room = plan.device.memory_bytes * self.utilization - self.reserve_bytes
            fitting = blocks_beside_spares(plan.layout, spare, plan.device, plan.settings.kv.block_size, room)
            moving = {"layers": plan.layout.layers, "spare_layers": spare}
        return plan.spec(fitting, forwards_tokens=True, repeats=self.skip_ahead, **moving)


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
    logger: Logger = make("logger", settings.logger, Logger)
    make("policy", settings.policy, Policy)
    source = _source(settings)
    plan = plan_of(settings)
    factory: BackendFactory = make("backend", settings.backend, BackendFactory)
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


PARTS = {"kernels", *(part.name for part in fields(Settings))}
OPTIONS = {
    option.name: group
    for group, kind in {"parallel": Parallel, "kv": Kv, "limits": Limits, "queueing": Queueing}.items()
    for option in fields(kind)
}
"""The group that an option of the front door belongs to."""


def make(part: str, config: Any, kind: Any) -> Any:
    """What `config` describes, checked to be of this kind: values before it is built, what it offers after that."""
    with setting(part):
        if not _is_part(config):
            raise SettingError(f"{part}={_shown(config)} names no _target_: choose an option of the group {part}")
        _check_values(part, config)
        # Plain containers inside: DictConfig stops at the front door. Under its name, so that errors say where.
        made = instantiate({part: config}, _convert_="all")[part]
        _check_offer(part, config, made, kind)
        return made


def _is_part(config: Any) -> bool:
    return isinstance(config, dict) and "_target_" in config


def _check_values(path: str, node: Mapping[str, Any]) -> None:
    """Against the annotations of what the values go to, or a wrong type would surface as a traceback, much later."""
    if not isinstance(node["_target_"], str):
        raise SettingError(f"{path}._target_={_shown(node['_target_'])} must be text, the name of a class or function")
    hints = _hints(node["_target_"])
    for name, value in node.items():
        option = f"{path}.{name}"
        if _may_be_endless(node["_target_"], name, value):
            continue
        if name in hints and (wanted := _expected(hints[name], value)):
            raise SettingError(f"{option}={_shown(value)} must be {wanted}")
        if _is_part(value):
            _check_values(option, value)


def _hints(target: str) -> dict[str, Any]:
    """Annotations of what a target takes; none where they cannot be told."""
    try:
        found = get_object(target)
        return get_type_hints(found.__init__ if isclass(found) and not is_dataclass(found) else found)
    except (ImportError, NameError, TypeError, ValueError, AttributeError):
        return {}  # building it will say why


def _expected(hint: Any, value: Any) -> str | None:
    """What a value must be that does not fit the annotation; None where it fits, or where we cannot tell."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        told = [_expected(arm, value) for arm in arguments]
        return None if None in told else " or ".join(dict.fromkeys(str(one) for one in told))
    if origin is Literal:
        return None if value in arguments else f"one of {', '.join(map(str, arguments))}"
    if hint in _SCALARS:
        words, fits = _SCALARS[hint]
        return None if fits(value) else words
    if origin in (list, tuple, Sequence):
        return None if isinstance(value, list | tuple) else "a list"
    if origin in (dict, Mapping):
        return None if isinstance(value, Mapping) else "a mapping"
    return None if _is_part(value) or not _wants_part(hint, origin) else "a part: give it a _target_"


def _wants_part(hint: Any, origin: Any) -> bool:
    return origin is Callable or (isclass(hint) and (_is_protocol(hint) or is_dataclass(hint)))


def _is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _may_be_endless(target: str, name: str, value: Any) -> bool:
    """Infinity, where that means something: in options that are known for it, or have it for a default."""
    return value == inf and (name in ENDLESS or default(target, name) == inf)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


ENDLESS = ("rate", "duration")
_SCALARS: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", _number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    Path: ("a path", lambda value: isinstance(value, str)),
    NoneType: ("null", lambda value: value is None),
}


def _check_offer(path: str, node: Mapping[str, Any], made: Any, kind: Any) -> None:
    if lacking := _lacking(made, kind):
        name = path.rpartition(".")[2]
        raise SettingError(f"{path}._target_={node['_target_']} is no {name}: it {lacking}")
    if not is_dataclass(made):
        return
    hints = _hints(node["_target_"])
    for name, value in node.items():
        if name in hints and _is_part(value) and hasattr(made, name):
            _check_offer(f"{path}.{name}", value, getattr(made, name), hints[name])


def _lacking(made: Any, kind: Any) -> str | None:
    """What a part of this kind must have and this one has not; None if nothing, or if we cannot tell."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        told = [_lacking(made, arm) for arm in arguments if arm is not NoneType]
        return None if None in told else told[0]
    if origin is Callable:
        return None if callable(made) else "cannot be called"
    if not isclass(kind) or not (_is_protocol(kind) or is_dataclass(kind)):
        return None
    if not _is_protocol(kind) and isinstance(made, kind):
        return None
    names = [name for name in dir(kind) if not name.startswith("_")]
    if missing := [name for name in names if not hasattr(made, name)]:
        return f"has no {missing[0]}"
    return "cannot be called" if _is_protocol(kind) and "__call__" in vars(kind) and not callable(made) else None


def _shown(value: Any) -> str:
    """As on the command line."""
    return shorten(_typed(value), 80, placeholder="...")


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_typed(child)}" for key, child in value.items()) + "}"
    return "[" + ", ".join(map(_typed, value)) + "]" if isinstance(value, list) else str(value)


def _source(settings: Settings) -> Source:
    workload: Workload = make("workload", settings.workload, Workload)
    with setting("workload"):
        return workload.source(settings.seed)


def plan_of(settings: Settings) -> Plan:
    """What a backend is made from."""
    model: ModelShape = make("model", settings.model, ModelShape)
    device: Device = make("device", settings.device, Device)
    links: LinksFactory = make("links", settings.links, LinksFactory)
    return Plan(settings, model, device, str(settings.model.get("path", "")), links)


def scheduler(settings: Settings, spec: Spec, policy: Policy | None = None) -> Scheduler:
    """With a fresh policy, unless one is given: policies may keep state from step to step."""
    queueing = settings.queueing
    if policy is None:
        policy = make("policy", settings.policy, Policy)
        assert policy is not None
    with setting("policy"):
        return Scheduler(
            spec,
            policy,
            seed=settings.seed,
            prefix_cache=settings.kv.prefix_cache,
            requeue=queueing.requeue,
            report_interval=queueing.report_interval,
            report_steps=queueing.report_steps,
            report_delay=queueing.report_delay,
        )
