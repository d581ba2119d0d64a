"""Many mutants of the built-in policies, or of what serves them, against the kit: found, lawful, or without effect."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from random import Random
from signal import SIGXCPU
from typing import Any

import yaml  # type: ignore[import-untyped]

from experiments.mutants.operators import Mutant, mutants

FOUND, LAWFUL, WITHOUT, HANGS = "found", "lawful", "no effect", "does not return"
DEAD, UNASKED = "cannot be made", "not examined"
"""The policy cannot even be made; the kit has no case for the part as it is."""
PATIENCE = 1800.0
"""Seconds by the clock; what goes round in circles ends before, by the worker's own bound of CPU time."""
LITTLE = {
    "tokens": 16, "max_prefill": 32, "min_prefill": 4, "batch": 16, "most": 8, "fallback": 4, "prefill_tokens": 16,
    "long_prefill_threshold": 8, "step": 0.01, "prefill": 0.0005, "per_decode": 0.0005, "ageing": 20.0, "ahead": 2,
    "own": "true",
}  # fmt: skip
"""Options, so that they bind in the kit's small steps, or are what its device takes, or are in force at all."""
PLAIN = {
    "": ["policy=chunked_prefill", "policy.budget.tokens=16"],
    "budget": ["policy=chunked_prefill"],
    "order/predictor": ["policy=chunked_prefill", "policy.budget.tokens=16", "policy/order=srtf"],
}
"""By group of options, what a part is tried in."""
COMPOSED = "policies.composed.Composed"
SHARED = {"policies.dispatched": "policies.route.LeastOutstanding", "policies.ranking": "policies.order.Sjf"}
"""Modules of which there is nothing to choose, with somebody who uses them."""
CORE = ("playground.scheduler", "playground.draft", "playground.rank", "playground.kv", "playground.sequence")
"""What a policy decides with."""
WITH_CORE = [*PLAIN[""], "policy/victims=cost_aware"]
"""A composition that uses most of it: it computes again and swaps."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant; `failed`: by property, what it does that the original does not."""

    module: str
    line: int
    owner: str
    kind: str
    before: str
    after: str
    words: list[str]
    verdict: str
    failed: dict[str, str]


def options(root: Path) -> dict[str, list[str]]:
    """By class (`policies.order.Fcfs`), the words that choose it in a plain composition."""
    found: dict[str, list[str]] = {COMPOSED: PLAIN[""]}
    for file in sorted(root.rglob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        group = "/".join(file.relative_to(root).parent.parts)
        part = content.get("policy", {}).get(group, content)  # some parts set other groups, too
        target = str(part.get("_target_", ""))
        if not target.startswith("policies.") or target == COMPOSED:
            continue
        words = [*PLAIN.get(group, PLAIN[""]), f"policy/{group}={file.stem}"]
        key = group.replace("/", ".")
        words += [f"policy.{key}.{name}={value}" for name, value in LITTLE.items() if name in _options(target)]
        found.setdefault(target, words)
    return found


def _options(target: str) -> set[str]:
    module, _, name = target.rpartition(".")
    kind = getattr(import_module(module), name)
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


def chosen(mutant: Mutant, known: Mapping[str, Sequence[str]]) -> list[str] | None:
    """The words whose policy has the mutant in it: its class's, else a class's of the module that makes use of it."""
    if mutant.module in CORE:
        return WITH_CORE
    own = known.get(SHARED.get(mutant.module) or f"{mutant.module}.{mutant.owner}")
    near = {target: words for target, words in known.items() if target.rpartition(".")[0] == mutant.module}
    users = [words for target, words in near.items() if mutant.owner in _names(target)]
    return list(own or next(iter([*users, *near.values()]), [])) or None


@cache
def _names(target: str) -> frozenset[str]:
    """All names in a class, and in what of its module they name."""
    module, _, name = target.rpartition(".")
    tops = {top.name: top for top in ast.parse(source(module)).body if isinstance(top, ast.ClassDef | ast.FunctionDef)}
    found, due = {name}, [name]
    while due:
        node = tops.get(due.pop())
        new = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - found if node else set()
        found |= new
        due += new
    return frozenset(found)


def drawn(of: str, count: int, seed: int) -> list[Mutant]:
    """So many of all there are in `of` ("policies" or "core"), spread over modules as evenly as they allow."""
    random = Random(seed)
    piles = []
    for module in _modules(of):
        pile = list(mutants(module, source(module)))
        random.shuffle(pile)
        piles.append(pile)
    random.shuffle(piles)
    found: list[Mutant] = []
    while len(found) < count and any(piles):
        for pile in piles:
            if pile and len(found) < count:
                found.append(pile.pop())
    return found


def _modules(of: str) -> list[str]:
    if of == "core":
        return list(CORE)
    return [f"policies.{file.stem}" for file in sorted(Path(str(files("policies"))).glob("*.py"))]


def source(module: str) -> str:
    """A module's source as it is."""
    package, _, name = module.rpartition(".")
    return (Path(str(files(package))) / f"{name}.py").read_text(encoding="utf-8")


def survey(
    picked: Sequence[Mutant], each: int, seed: int, workers: int, progress: Callable[[int, int], None]
) -> Iterator[Result]:
    """One result for each mutant that some composition holds, as they come."""
    known = options(Path(str(files("conf"))) / "policy")
    work = [(mutant, words) for mutant in picked if (words := chosen(mutant, known))]
    keys = list(dict.fromkeys(" ".join(words) for _, words in work))
    with ThreadPoolExecutor(workers) as pool:
        answers = pool.map(lambda key: _examined("", "", key.split(" "), each, seed), keys)
        originals = dict(zip(keys, answers, strict=True))
        flights = [
            pool.submit(_result, mutant, list(words), originals[" ".join(words)], each, seed) for mutant, words in work
        ]
        for number, flight in enumerate(as_completed(flights), 1):
            progress(number, len(flights))
            yield flight.result()


def _examined(module: str, changed: str, words: Sequence[str], each: int, seed: int) -> dict[str, Any]:
    asked = {"module": module, "source": changed, "words": list(words), "each": each, "seed": seed}
    command = [sys.executable, "-m", "experiments.mutants.worker"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"hangs": True}
    if done.returncode == -SIGXCPU:
        return {"hangs": True}
    if done.returncode:
        return {"dead": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _result(mutant: Mutant, words: list[str], original: Mapping[str, Any], each: int, seed: int) -> Result:
    if "failed" not in original:
        answer: Mapping[str, Any] = {"unasked": original["dead"]}
    else:
        answer = _examined(mutant.module, mutant.of(source(mutant.module)), words, each, seed)
    told = {name: value for name, value in asdict(mutant).items() if name != "place"}
    return Result(**told, words=words, **_judged(answer, original))


def _judged(answer: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    if "unasked" in answer:
        return {"verdict": UNASKED, "failed": {"made": answer["unasked"]}}
    if "hangs" in answer:
        return {"verdict": HANGS, "failed": {}}
    if "dead" in answer:
        return {"verdict": DEAD, "failed": {"made": answer["dead"]}}
    new = {name: problem for name, problem in answer["failed"].items() if name not in original["failed"]}
    if new:
        return {"verdict": FOUND, "failed": new}
    same = answer["digest"] == original["digest"] and answer["refused"] == original["refused"]
    return {"verdict": WITHOUT if same else LAWFUL, "failed": {}}
