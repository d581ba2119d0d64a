"""What a calibration keeps of a device, a model and a cut: tables of step times, lines for all else, their errors.

A file of JSON that says where it comes from. Seconds, tokens and blocks throughout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from os import environ
from pathlib import Path
from typing import Any

from playground.model import ModelShape
from playground.sim.cost.fitted import Error

VERSION = 1
MAKE = "python -m playground +experiment=calibrate backend=engine"
OWN = Path(environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "serving-playground" / "profiles"
"""Where a user's own calibrations are kept: they go before those that ship."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Steps of nothing but decodes, by rows: `seconds[i]` of `rows[i]` that read one block each, padding included.

    `contexts[i]`: what `context_rows[i]` take besides where they read `keys` on average, points of (keys, seconds).
    `ragged_rows`, `ragged`: the same where contexts differ, as they do when one serves, the longest three times the
    average; what lies between is between both. `longest`: seconds for each key that the longest reads beyond
    that, or beyond the average where nothing ragged was timed. `factors`: how many times as long as that
    reading takes in the graph of so many rows, as (rows, factor); of others what the next one on the same side of a
    power of two does, for there kernels are cut otherwise.
    """

    rows: list[int]
    seconds: list[float]
    context_rows: list[int]
    contexts: list[list[list[float]]]
    longest: float
    factors: list[list[float]] = field(default_factory=list)
    ragged_rows: list[int] = field(default_factory=list)
    ragged: list[list[list[float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Steps with chunks of prompts: the kernels' seconds at so many `tokens`, padding included, and what comes on top.

    Attention of chunks takes `work` for each (query, key) pair in whole tiles or, where that is more, `path` for each
    key of the longest. `head`: points of (sampled rows, seconds). `padded`: what a graph of so many rows and tokens
    takes beyond all that, as [rows, tokens, seconds]. `tile`: more tokens than that take what the next multiple does.
    """

    tokens: list[int]
    seconds: list[float]
    work: float
    path: float
    keys: float
    chunk: float
    row: float
    head: list[list[float]]
    padded: list[list[float]]
    tile: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """What the host needs to launch a step kernel by kernel: no such step is over sooner."""

    base: float = 0.0
    sequence: float = 0.0


@dataclass(frozen=True, slots=True)
class Throttle:
    """Clocks that fall while prompts are computed at the power limit.

    Heat goes from 0 towards the share of time that products take, with the time constant `seconds`; beyond `onset`
    such a step takes `slope` times as much longer for each unit of it.
    """

    seconds: float = 1.0
    onset: float = 0.0
    slope: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """`base` and so much for each unit of what it is multiplied with, by name; `low` and `high` bound 95 % of fits."""

    coefficients: dict[str, float]
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)

    def at(self, **units: float) -> float:
        """Of units that the line does not know it says nothing."""
        found = self.coefficients
        return found["base"] + sum([found[name] * value for name, value in units.items() if name in found])


@dataclass(frozen=True, slots=True)
class HeldOut(Error):
    """Of steps that nothing was fitted to; `low` and `high` bound 95 % of the MAPEs of steps drawn again from them.

    None in a profile of before they were kept.
    """

    low: float | None = None
    high: float | None = None


MEASURED, TABLES = "measurements", "tables"


@dataclass(frozen=True, slots=True)
class Straight:
    """The fitted model: a line of `playground.sim.cost.straight.FEATURES` for each stage instead of its tables.

    `fitted_to`: `measurements`, or `tables` where it was made from the profile's own, which alone were left; then
    `held_out` says how far it is from them, not from the device. `points`: how many steps it is fitted to.
    """

    knee: int
    stages: list[Line]
    held_out: dict[str, HeldOut]
    fitted_to: str
    points: int


@dataclass(frozen=True, slots=True)
class Stage:
    decodes: Decodes
    prompts: Prompts
    launch: Launch


@dataclass(frozen=True, slots=True)
class Profile:
    """All that `Calibrated` needs, and what a reader wants to know of it."""

    device: str
    model: dict[str, Any]
    """Sizes that a model must have to be this one."""
    tp: int
    layers: list[int]
    graph_rows: int
    """Decodes that graphs were captured for; 0: none were."""
    stages: list[Stage]
    throttle: Throttle
    host: Line
    copy_out: Line
    copy_in: Line
    transfer: Line
    largest: dict[str, float]
    """Of each quantity of a step, the largest value that was timed."""
    held_out: dict[str, HeldOut]
    """By source and kind of step: how far the tables are off on steps that nothing was fitted to."""
    spread: float
    """Median over probes of (largest - least) / median of their repetitions."""
    facts: dict[str, Any]
    """Device, driver, versions, revision, clocks, when."""
    fitted: Straight | None = None
    version: int = VERSION

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path | str) -> Profile:
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ValueError(f"it is of version {content['version']}, and this reads {VERSION}")
            return cls(**content | _parts(content))
        except OSError as error:
            raise ValueError(f"cost.path={file}: cannot be read ({error.strerror}); make it with {MAKE}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _unreadable(file, error) from error


def _unreadable(file: Path | str, error: Exception) -> ValueError:
    problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"cost.path={file}: no profile that this can read ({problem}); delete it and make it: {MAKE}")


def _parts(content: Mapping[str, Any]) -> dict[str, Any]:
    lines = {name: Line(**content[name]) for name in ("host", "copy_out", "copy_in", "transfer")}
    return {
        "stages": [_stage(stage) for stage in content["stages"]],
        "throttle": Throttle(**content["throttle"]),
        "held_out": _held_out(content["held_out"]),
        "fitted": _fitted(content["fitted"]) if content.get("fitted") else None,
        **lines,
    }


def _stage(content: Mapping[str, Any]) -> Stage:
    decodes, prompts = Decodes(**content["decodes"]), Prompts(**content["prompts"])
    tables: dict[str, tuple[list[Any], list[Any]]] = {
        "decodes.seconds": (decodes.rows, decodes.seconds),
        "decodes.contexts": (decodes.context_rows, decodes.contexts),
        "decodes.ragged": (decodes.ragged_rows, decodes.ragged),
        "prompts.seconds": (prompts.tokens, prompts.seconds),
    }
    for name, (at, values) in tables.items():
        if len(at) != len(values):
            raise ValueError(f"{name} has {len(values)} entries and not {len(at)}")
    return Stage(decodes, prompts, Launch(**content["launch"]))


def _held_out(content: Mapping[str, Any]) -> dict[str, HeldOut]:
    return {name: HeldOut(**error) for name, error in content.items()}


def _fitted(content: Mapping[str, Any]) -> Straight:
    stages = [Line(**line) for line in content["stages"]]
    return Straight(**{**content, "stages": stages, "held_out": _held_out(content["held_out"])})


SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocabulary")


def sizes_of(model: ModelShape) -> dict[str, Any]:
    """What tells models apart."""
    return {name: getattr(model, name) for name in SIZES} | {"experts": model.experts.count if model.experts else 0}


def cut_name(tp: int, layers: Sequence[int]) -> str:
    """The name of a profile's file: `tp2_pp2`, or `single`."""
    parts = [f"tp{tp}"] * (tp > 1) + [f"pp{len(layers)}"] * (len(layers) > 1)
    return "_".join(parts) or "single"


def place(device: str, model: str, tp: int, layers: Sequence[int]) -> Path:
    """Where a profile is kept below a root: `h200/qwen3-8b/single.json`."""
    return Path(_plain(device), _plain(Path(model).name), f"{cut_name(tp, layers)}.json")


def _plain(name: str) -> str:
    return "-".join(name.lower().split())


def shipped() -> Path:
    return Path(str(files("conf").joinpath("device", "profiles")))


def find(model: ModelShape, device: str, tp: int, layers: Sequence[int]) -> Path:
    """The profile of this model, by its sizes, on this device, cut so: a user's own, else one that ships.

    `ValueError` names those that there are.
    """
    name, wanted = f"{cut_name(tp, layers)}.json", sizes_of(model)
    known = [file for root in (OWN, shipped()) for file in sorted(root.glob("*/*/*.json"))]
    for file in known:
        if file.parent.parent.name == _plain(device) and file.name == name and _model(file) == wanted:
            return file
    there = ", ".join(dict.fromkeys(f"{file.parent.parent.name}/{file.parent.name}/{file.stem}" for file in known))
    raise ValueError(
        f"cost.path=null: no profile of this model on device={device} cut as {name[:-5]}; there are: "
        f"{there or 'none'}; make one with {MAKE} device={device} ..."
    )


def _model(file: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(file, error) from error
