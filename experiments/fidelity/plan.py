"""A plan of runs as data: which policies meet which loads of which workloads, with how much room for KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from experiments.settings import SettingError

PLANS = Path(__file__).parent / "plans"
LOADS = ("below", "near", "past")


@dataclass(frozen=True, slots=True)
class Point:
    """One run. Those that differ in `repeat` alone are the same run again."""

    policy: str
    workload: str
    load: str
    pool: str
    repeat: int
    overrides: tuple[str, ...]

    @property
    def setting(self) -> tuple[str, str, str]:
        """What policies are compared in."""
        return self.workload, self.load, self.pool

    @property
    def group(self) -> str:
        return "-".join([*self.setting, self.policy])

    @property
    def name(self) -> str:
        return f"{self.group}-{self.repeat}" if self.repeat else self.group

    def labels(self) -> dict[str, Any]:
        """As a pair keeps them."""
        shown = {name: getattr(self, name) for name in ("policy", "workload", "load", "pool", "repeat")}
        return {"name": self.name, "group": self.group, **shown}


def read(plan: str) -> list[Point]:
    """Points in order, each once. `plan`: a file, or the name of one that ships."""
    file = Path(plan) if plan.endswith(".yaml") else PLANS / f"{plan}.yaml"
    try:
        return _points(OmegaConf.to_container(OmegaConf.load(file)))  # type: ignore[arg-type]
    except OSError as error:
        shipped = ", ".join(sorted(found.stem for found in PLANS.glob("*.yaml")))
        raise SettingError(f"plan={plan}: {error.strerror}; give a YAML file or one of: {shipped}") from error
    except (YAMLError, KeyError, TypeError, AttributeError) as error:
        told = " ".join(str(error).split())
        raise SettingError(
            f"plan={plan}: not a plan ({type(error).__name__}: {told}); see {PLANS / 'cpu.yaml'}"
        ) from error


def _points(content: Mapping[str, Any]) -> list[Point]:
    points: dict[str, Point] = {}
    for run in content["runs"]:
        chosen = [_some(content, part, run) for part in ("policies", "workloads", "loads", "pools")]
        for policy, workload, load, pool in product(*chosen):
            for repeat in range(int(run.get("repeats", 0)) + 1):
                point = _point(content, policy, workload, load, pool, repeat)
                points[point.name] = point
    return list(points.values())


def _some(content: Mapping[str, Any], part: str, run: Mapping[str, Any]) -> Sequence[str]:
    """Names that a run asks for; all there are where it says `all`."""
    known = LOADS if part == "loads" else tuple(content[part])
    wanted = run[part]
    names = known if wanted == "all" else tuple(wanted)
    if unknown := [name for name in names if name not in known]:
        raise SettingError(f"plan: {part} has no {unknown[0]}; there are {', '.join(known)}")
    return names


def _point(content: Mapping[str, Any], policy: str, workload: str, load: str, pool: str, repeat: int) -> Point:
    asked = content["workloads"][workload]
    overrides = [
        *content["base"],
        *content["policies"][policy],
        *asked["overrides"],
        f"workload.rate={asked['rates'][load]}",
        *asked.get("pools", {}).get(pool, content["pools"][pool]),
    ]
    return Point(policy, workload, load, pool, repeat, tuple(map(str, overrides)))
