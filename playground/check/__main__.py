"""Puts a policy through the examination: `python -m playground.check policy=NAME`."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from experiments import conformance
from experiments.errors import explain
from experiments.report import console, for_programs
from playground.check.case import Case, Make, Saved, load, save
from playground.check.decisions import Cost, cost
from playground.check.examination import QUICK, THOROUGH, Report, Verdict, examine, replayed, without_families
from playground.check.page import Drawing, Line, line, page
from playground.check.properties import PROPERTIES, Limits, named
from playground.check.serving import Refused, attend
from playground.oracle import oracles

COST = "The cost of a decision grows no faster than what there is to decide."
ENGINE = "Greedy tokens on the CPU engine are those of the model, whatever is scheduled."
ALONE = ("cost", "engine")
"""Properties that are not about cases."""

HELP = f"""\
Examines a scheduling policy, ours or yours, on small workloads made to trip it up: tiny KV pools, a huge prompt among
short ones, bursts, equal arrivals, priorities, aborts, shared prefixes, pipelines, replicas, ranks in lockstep, plans
ahead of results. Simulated, on a CPU, without torch (but for --engine). Seconds with --quick, a minute or two without.

  python -m playground.check policy=chunked_prefill
  python -m playground.check policy=vllm_v1 policy.budget.tokens=64 policy/victims=largest --quick
  python -m playground.check policy=mypkg:make                  a function or class of your own that makes a policy
  python -m playground.check policy=mypkg.MyPolicy policy.rows=4    with what it takes
  python -m playground.check policy=token_throttling --only starvation,waste
  python -m playground.check policy=orca --engine tiny          tokens on the CPU engine, too (needs torch)
  python -m playground.check replay runs/check/orca/waste.json  one failing case again; policy=... for another policy

Properties
{chr(10).join(f"  {one.name:13} {one.meaning}" for one in PROPERTIES)}
  {"cost":13} {COST}
  {"engine":13} {ENGINE} (--engine MODEL)

A property that fails is told with the smallest workload found in which it fails, saved as a file that `replay` plays.
The folder (--out) also gets report.html. Exit code: 0 all hold, 1 one fails, 2 something to mend in the options.
In your own tests: pytest --policy=mypkg:make, or the fixture `conformance` (docs/conformance.md).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a property failed, 2 for what the user can mend."""
    parser = _parser()
    wanted = parser.parse_intermixed_args(arguments)
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # what cannot be imported is told below, in one line
    try:
        if wanted.words[:1] == ["replay"]:
            return _replay(wanted)
        return _examine(wanted)
    except Exception as error:
        if isinstance(error, Refused):
            print(f"error: the policy will have none of the backends: {error}", file=sys.stderr)
            return 2
        told = str(error) if isinstance(error, ValueError) and "\n" not in str(error) else explain(error)
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m playground.check", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="policy=NAME", help="the policy and its options; or: replay FILE")
    add("--quick", action="store_true", help=f"{QUICK} cases of each kind instead of {THOROUGH}")
    add("--only", metavar="A,B", help="these properties only")
    add("--seed", type=int, default=0, help="of the cases (default 0)")
    add("--engine", metavar="MODEL", help="compare tokens on the CPU engine as well: tiny, or a checkpoint's folder")
    add("--out", type=Path, metavar="FOLDER", help="for the report and failing cases (default runs/check/POLICY)")
    defaults = Limits()
    for field in fields(Limits):
        default = getattr(defaults, field.name)
        shown = "2 x steps in flight + 4" if default is None else default
        kind = float if isinstance(default, float) else int
        add(f"--{field.name}", type=kind, default=default, metavar="N", help=f"{BOUNDS[field.name]} (default {shown})")
    return parser


BOUNDS = {
    "passed": "steps in a row that may leave out a decode that is ready",
    "preemptions": "times that a sequence may lose its KV",
    "waste": "tokens computed again for each that is needed",
    "share": "requests of the fullest replica over the mean",
    "pace": "time until the last end over that of a plain policy",
}


def _limits(wanted: argparse.Namespace) -> Limits:
    for field in fields(Limits):
        value = getattr(wanted, field.name)
        if value is not None and not value >= 0:
            raise ValueError(f"--{field.name} {value} must be 0 or more")
    return Limits(**{field.name: getattr(wanted, field.name) for field in fields(Limits)})


# --- an examination


def _examine(wanted: argparse.Namespace) -> int:
    words = tuple(wanted.words)
    if not words:
        raise ValueError("say which policy: policy=NAME or policy=my.module:make (--help tells more)")
    limits, names = _limits(wanted), _names(wanted)
    make = conformance.factory(words)
    name = _name(words)
    folder: Path = wanted.out or Path("runs") / "check" / name
    folder.mkdir(parents=True, exist_ok=True)
    asked = named(name for name in names if name not in ALONE)
    with conformance.shown(f"examining {name}") as progress:
        report = examine(make, QUICK if wanted.quick else THOROUGH, wanted.seed, asked, limits, progress)
    _excuse(report, make)
    alone = [*_cost(make, names), *_engine(make, names, wanted.engine)]
    lines = [*(line(verdict) for verdict in report.verdicts), *alone]
    drawings = list(filter(None, (_drawing(verdict, make, words, folder) for verdict in report.verdicts)))
    summary = _summary(report)
    (folder / "report.html").write_text(page(f"{name}: conformance", summary, lines, drawings), encoding="utf-8")
    return _tell(name, summary, lines, drawings, folder)


def _names(wanted: argparse.Namespace) -> list[str]:
    """Which properties; those beside the cases, too."""
    if wanted.only is None:
        return [*(one.name for one in PROPERTIES), "cost", *(["engine"] if wanted.engine else [])]
    names: list[str] = wanted.only.split(",")
    named(name for name in names if name not in ALONE)
    if "engine" in names and not wanted.engine:
        raise ValueError("--only engine: say on which model, too: --engine tiny")
    return names


def _name(words: Sequence[str]) -> str:
    """For a folder: the policy and what was set in it."""
    told = "-".join(word.removeprefix("policy").lstrip("=./") for word in words)
    return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in told)[:80]


def _excuse(report: Report, make: Make) -> None:
    declared = oracles(make())
    for verdict in report.verdicts:
        if verdict.property.name == "oracle" and declared:
            verdict.excused = f"{', '.join(type(one).__name__ for one in declared)} is told true lengths, and says so"


def _cost(make: Make, names: Sequence[str]) -> list[Line]:
    if "cost" not in names:
        return []
    found: Cost = cost(make, conformance.clock)
    told = ", ".join(f"{micros:.0f} us with {size} seats" for size, micros in found.micros.items())
    value = f"{found.growth:.2f} exponent"
    return [Line("cost", COST, "failed" if found.problem else "passed", value, found.problem or told)]


def _engine(make: Make, names: Sequence[str], model: str | None) -> list[Line]:
    if "engine" not in names or model is None:
        return []
    problem = conformance.same_tokens(make, model)
    return [Line("engine", ENGINE, "failed" if problem else "passed", "", problem or f"12 prompts on {model}")]


def _summary(report: Report) -> str:
    refused = "; ".join(f"{family}: refused, {why}" for family, why in report.refused.items())
    cut = f"; `{report.cut}` fails, and ended the examination there" if report.cut else ""
    return f"{report.served} cases, {report.steps:,} steps{'; ' + refused if refused else ''}{cut}"


def _drawing(verdict: Verdict, make: Make, words: tuple[str, ...], folder: Path) -> Drawing | None:
    """Failing cases are saved on the way; of those that pass, the worst gap is drawn."""
    name, case = verdict.property.name, verdict.case
    file = folder / f"{name}.json"
    if not verdict.problem:
        file.unlink(missing_ok=True)  # of an earlier examination
    if case is None or not (verdict.problem or name == "starvation"):
        return None
    if verdict.problem:
        save(file, Saved(words, name, verdict.problem, case))
    command = _command(file) if verdict.problem else ""
    return Drawing(name, verdict.problem or "The worst case; it holds.", case, attend(case, make), command)


def _command(file: Path) -> str:
    return f"python -m playground.check replay {shlex.quote(os.path.relpath(file))}"


def _tell(name: str, summary: str, lines: list[Line], drawings: list[Drawing], folder: Path) -> int:
    failed = [line.name for line in lines if line.status == "failed"]
    console().print(conformance.told(lines))
    print(f"{name}: {summary}; {len(failed)} of {len(lines)} properties {'fails' if len(failed) == 1 else 'fail'}")
    for drawing in drawings:
        if drawing.command:
            print(f"  {drawing.name}: {drawing.command}")
    print(f"Report: {folder / 'report.html'}")
    for_programs({"policy": name, "failed": failed, "report": str(folder / "report.html")})
    return 1 if failed else 0


# --- one case again


def _replay(wanted: argparse.Namespace) -> int:
    files = [word for word in wanted.words[1:] if "=" not in word]
    if len(files) != 1:
        raise ValueError("replay: name one file that an examination wrote, as runs/check/POLICY/PROPERTY.json")
    saved = load(Path(files[0]))
    words = tuple(word for word in wanted.words[1:] if "=" in word) or saved.policy
    if words == ("policy=",):
        raise ValueError(f"{files[0]}: kept by a test, which knows no name of its policy: add policy=MODULE:MAKE")
    make = conformance.factory(words)
    (property,) = named([saved.property])
    finding, outcome = replayed(saved.case, make, without_families(property), _limits(wanted))
    print(f"{saved.case}\n{property.name}: {property.meaning}")
    _print_steps(saved.case, outcome.steps)
    if finding is None:
        other = outcome.problem
        print(f"not judged: {other.property} breaks before, {other.what}" if other else "not judged in this case")
        return 1 if other else 0
    print(f"fails: {finding.problem}" if finding.problem else "holds")
    return 1 if finding.problem else 0


def _print_steps(case: Case, steps: list) -> None:  # type: ignore[type-arg]
    for request in case.lines():
        print(f"  {request}")
    for step in steps[:MOST]:
        parts = zip(step.columns.sequence, step.columns.start, step.columns.length, strict=True)
        told = ", ".join(f"{id}: {start}..{start + length - 1}" for id, start, length in parts)
        print(f"  {step.planned:8.3f} s  step {step.id}  {told or 'copies only'}")
    if len(steps) > MOST:
        print(f"  ... and {len(steps) - MOST} more steps")


MOST = 40
"""Steps that a replay prints."""

if __name__ == "__main__":
    sys.exit(main())
