"""`evaluate(policy_path)`: a figure of merit, or why there is none.

The policy runs in a process of its own, which ends with its time: one that hangs, exits or takes the interpreter down
scores nothing and takes nobody with it. It is no jail: who must keep a program from the machine runs all of this in a
container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from experiments.evaluate.suite import HELD_OUT, SPLITS, TRAIN
from experiments.settings import SettingError
from playground.check.properties import PROPERTIES

METRICS = tuple(
    f"{name}_{statistic}" for name in ("ttft", "tpot", "e2el") for statistic in ("mean", "p50", "p90", "p99")
)
TIMEOUT = 600.0
"""Seconds."""
LOOKS = "held_out.jsonl"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the process is told. `words` are overrides that describe the policy, `path` what must be importable."""

    words: tuple[str, ...]
    path: str = ""
    split: str = TRAIN
    metric: str = "e2el_mean"
    seeds: int = 3
    excused: tuple[str, ...] = ()
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`score`: how many times as good as the baseline, the geometric mean over cases and seeds (more is better), with
    its 95 % interval; None where the policy scores nothing, and `why` says what it did.

    `cases`: by case, seed, the metric in milliseconds of the policy and of the baseline. `failed`: properties of the
    conformance kit that do not hold. `digest`: of the policy's file, where it is one.
    """

    policy: str
    split: str
    metric: str
    score: float | None = None
    interval: tuple[float, float] | None = None
    why: str = ""
    cases: tuple[Mapping[str, Any], ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    digest: str = ""


def evaluate(
    policy_path: str,
    *options: str,
    split: str = TRAIN,
    metric: str = "e2el_mean",
    seeds: int = 3,
    excused: Sequence[str] = (),
    timeout: float = TIMEOUT,
    workers: int | None = None,
    folder: str | Path = "runs/evaluate",
) -> Evaluation:
    """Score the policy at `my_policy.py:Class`, `package.module:Class` or `policy=NAME`, made with `options`
    (`policy.rows=4`).

    `split`: `train`, or `held_out`, for a last word; each look at the latter is counted in `folder`. `excused`:
    properties of the conformance kit that need not hold. `timeout` in seconds, for all of it.

    Raises SettingError for what its caller can mend: no such file, a wrong option. What the policy does wrong is told
    in the result.
    """
    _check(split, metric, seeds, timeout, excused)
    words, path, digest = _described(policy_path, options)
    asked = Asked(words, path, split, metric, seeds, tuple(excused), workers)
    began = monotonic()
    told = _ask(asked, timeout)
    seconds = round(monotonic() - began, 2)
    if mistake := told.pop("mistake", None):
        raise SettingError(mistake)
    name = " ".join((policy_path, *options))
    if split == HELD_OUT:
        _count(Path(folder), name, digest, told.get("score"))
    if told.get("interval"):
        told["interval"] = tuple(told["interval"])
    return Evaluation(name, split, metric, seconds=seconds, digest=digest, **told)


def looks(folder: str | Path = "runs/evaluate") -> int:
    """How often held-out cases were looked at."""
    file = Path(folder) / LOOKS
    return len(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else 0


def _check(split: str, metric: str, seeds: int, timeout: float, excused: Sequence[str]) -> None:
    if split not in SPLITS:
        raise SettingError(f"--split {split} must be one of {', '.join(SPLITS)}")
    if metric not in METRICS:
        raise SettingError(f"--metric {metric} must be one of {', '.join(METRICS)}")
    if seeds < 1:
        raise SettingError(f"--seeds {seeds} must be at least 1")
    if not timeout > 0:
        raise SettingError(f"--timeout {timeout:g} must be more than 0 seconds")
    known = [property.name for property in PROPERTIES]
    if strange := [name for name in excused if name not in known]:
        raise SettingError(f"--excuse {strange[0]}: no such property; there are {', '.join(known)}")


def _described(policy: str, options: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Overrides, the folder that a file is imported from, and the file's digest."""
    if strange := [word for word in options if not word.startswith(("policy.", "policy/", "+policy."))]:
        raise SettingError(f"{strange[0]}: only a policy is evaluated: policy.PART.OPTION=..., policy/PART=...")
    if policy.startswith("policy="):
        return (policy, *options), "", ""
    place, colon, name = policy.rpartition(":")
    if not colon or not name.isidentifier():
        raise SettingError(
            f"{policy}: name a class or function: my_policy.py:Class, package.module:Class or policy=NAME"
        )
    if not place.endswith(".py"):
        return (f"policy._target_={place}.{name}", *options), "", ""
    file = Path(place).resolve()
    if not file.is_file():
        raise SettingError(f"{policy}: there is no file {place}")
    if not file.stem.isidentifier():
        raise SettingError(f"{policy}: {file.name} cannot be imported, its name is no identifier: rename it")
    digest = sha256(file.read_bytes()).hexdigest()
    return (f"policy._target_={file.stem}.{name}", *options), str(file.parent), digest


def _ask(asked: Asked, timeout: float) -> dict[str, Any]:
    """The process's answer, or what became of it."""
    with TemporaryDirectory() as place:
        answer, output = Path(place) / "answer.json", Path(place) / "output.txt"
        command = [sys.executable, "-m", "experiments.evaluate.worker", json.dumps(asdict(asked)), str(answer)]
        with output.open("wb") as kept:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=kept, stderr=kept, start_new_session=True
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return {"why": f"it took more than {timeout:g} s"}
            finally:
                _end(process)
        if not answer.is_file():
            return {"why": f"its process ended with code {code}{_last(output)}"}
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its children, which share its session."""
    if process.poll() is None:
        os.killpg(process.pid, SIGKILL)
        process.wait()


def _last(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _count(folder: Path, name: str, digest: str, score: float | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOOKS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"policy": name, "digest": digest, "score": score}) + "\n")
