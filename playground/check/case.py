"""A case: everything that one examined run depends on but the policy, as a value that a file can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from playground.core import Request, Slo, Spec
from playground.policy import Policy

Make = Callable[[], Policy]
"""Makes a fresh policy: one may keep state from step to step."""

DEFAULTS = {field.name: field.default for field in fields(Request) if field.name not in ("slo", "sampling")}


@dataclass(frozen=True, slots=True)
class Case:
    """A small workload on a small backend.

    `family` says what it is meant to provoke. A step takes `seconds` and `per_token` seconds for each of its tokens.
    `run_ahead` overrides how many steps the policy wants outstanding (None: as the policy says). `aborts` are
    (seconds, request). `reports`: interval, steps and delay of what a router is told, as `playground.reports.Reports`.
    """

    family: str
    spec: Spec
    requests: tuple[Request, ...]
    aborts: tuple[tuple[float, int], ...] = ()
    run_ahead: int | None = None
    seconds: float = 0.01
    per_token: float = 0.0
    requeue: str = "front"
    prefix_cache: bool = True
    reports: tuple[float, int, float] = (0.0, 0, 0.0)
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens of all requests, at most."""
        return sum(request.prompt_length + request.max_tokens for request in self.requests)

    def lines(self) -> list[str]:
        """The requests for a reader, one a line: what is as usual is left out."""
        return [_told(request) for request in self.requests]

    def __str__(self) -> str:
        spec = self.spec
        ranks = f", {spec.ranks} {'ranks in lockstep' if spec.lockstep else 'replicas'}" if spec.ranks > 1 else ""
        stages = f", {spec.stages} stages" if spec.stages > 1 else ""
        return (
            f"{self.family}: {len(self.requests)} requests, {spec.blocks} blocks of {spec.block_size}, "
            f"max_tokens {spec.max_tokens}, max_seqs {spec.max_seqs}{stages}{ranks}"
        )


def _told(request: Request) -> str:
    answer = request.output_length or request.max_tokens
    most = f" (of {request.max_tokens})" if answer < request.max_tokens else ""
    more = [f"{name} {value}" for name in ("priority", "tenant", "session") if (value := getattr(request, name))]
    more += [f"{name} within {value:g} s" for name, value in asdict(request.slo).items() if value < float("inf")]
    if request.hashes:
        more.append(f"prefix {'-'.join(map(str, request.hashes))}")
    told = f"request {request.id}: at {request.arrival:g} s, {request.prompt_length} + {answer}{most} tokens"
    return ", ".join([told, *more])


@dataclass(frozen=True, slots=True)
class Saved:
    """A case that failed, with what failed in it and the words that named the policy."""

    policy: tuple[str, ...]
    property: str
    problem: str
    case: Case


def save(file: Path, saved: Saved) -> None:
    """Write it as JSON."""
    content = asdict(saved) | {"case": _to_json(saved.case)}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(file: Path) -> Saved:
    """Read it back. `ValueError`, in one line, if the file is no saved case."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Saved(tuple(content["policy"]), content["property"], content["problem"], _from_json(content["case"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no saved case ({error})"
        raise ValueError(f"{file}: {reason}: name a file that `python -m playground.check` wrote") from error


def _to_json(case: Case) -> dict[str, Any]:
    return asdict(case) | {"requests": [_request_to_json(request) for request in case.requests]}


def _request_to_json(request: Request) -> dict[str, Any]:
    """What differs from the defaults: a person reads this file."""
    values = {name: getattr(request, name) for name in DEFAULTS}
    told = {name: value for name, value in values.items() if value != DEFAULTS[name]}
    slo = {name: value for name, value in asdict(request.slo).items() if value != float("inf")}
    return told | ({"slo": slo} if slo else {})


def _from_json(content: dict[str, Any]) -> Case:
    spec = Spec(**content.pop("spec"))
    requests = tuple(_request_from_json(request) for request in content.pop("requests"))
    aborts = tuple((at, id) for at, id in content.pop("aborts"))
    interval, steps, delay = content.pop("reports")
    return Case(spec=spec, requests=requests, aborts=aborts, reports=(interval, steps, delay), **content)


def _request_from_json(content: dict[str, Any]) -> Request:
    slo, hashes = Slo(**content.pop("slo", {})), tuple(content.pop("hashes", ()))
    return Request(**content, hashes=hashes, slo=slo)
