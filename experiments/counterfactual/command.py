"""`python -m experiments counterfactual RUN --policy ... --from-step K`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments import provenance
from experiments.counterfactual import model, report
from experiments.counterfactual.play import Played, Recorded, play, policy_of, recorded
from experiments.errors import carried_out
from experiments.progress import meter
from experiments.settings import SettingError
from playground.trace import read

VERSION = 1
HELP = """\
What would have been: a recorded run is played again up to step K, as it was, and goes on under another policy.

  python -m experiments counterfactual RUN --policy policy=orca --from-step 200
  python -m experiments counterfactual RUN --policy policy.budget.tokens=256 --at 12.5
  python -m experiments counterfactual RUN --policy policy/victims=largest --cost roofline

From there on a cost model says how long steps take: a simulated run's own, else the calibrated profile of the device.
The recorded policy is simulated from step K on, too: what the other policy changes is simulation against simulation,
and how far the simulated one is from the recorded run is the model's error, beside it. The policy at the branch knows
nothing of what was before; requests, KV and steps in flight are as they were. Answers are as long as they were.
Where arrivals answer to completions (closed loops, sessions) they are made anew: then the result is approximate.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "counterfactual",
        help="a recorded run under another policy from some step on",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="the folder of a run, of an engine or simulated step by step")
    add("--policy", nargs="+", required=True, metavar="OVERRIDE", help="policy=NAME, policy/PART=NAME, policy.X=VALUE")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--from-step", type=int, metavar="K", help="the first step that the other policy decides (0)")
    where.add_argument("--at", type=float, metavar="SECONDS", help="the first step planned then or later")
    add("--cost", nargs="+", default=[], metavar="NAME", help="a cost model (backend/cost), and its options")
    add("-o", "--out", type=Path, metavar="FOLDER", help="for the runs and the tables (RUN/counterfactual)")
    parser.set_defaults(obey=obey)


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done. 2: something to mend."""
    return carried_out(lambda: _compare(given, more), resumes=False)


def _compare(given: argparse.Namespace, more: Sequence[str]) -> int:
    if more:
        raise SettingError(f"{more[0]}: not known here; see --help")
    run = recorded(given.run_dir, _cost(given.cost))
    at = _step(given, run)
    other = policy_of(run.config, given.policy)
    out: Path = given.out or given.run_dir / "counterfactual"
    if out.exists():
        raise SettingError(f"{out} is there already: choose another -o, or remove it")
    same = play(run, run.config.policy, at, out / "simulated", "the recorded policy, simulated", meter)
    found = play(run, other, at, out / "other", "the other policy", meter)
    _report(run, at, out, same, found)
    return 0


def _cost(words: Sequence[str]) -> list[str]:
    """As overrides."""
    return [word if "=" in word else f"backend/cost={word}" for word in words]


def _step(given: argparse.Namespace, run: Recorded) -> int:
    at = given.from_step or 0
    if given.at is not None:
        later = (step for step, one in sorted(run.recording.decisions.items()) if one.planned >= given.at)
        if (found := next(later, None)) is None:
            raise SettingError(f"--at {given.at:g}: no step was planned then or later")
        at = found
    if not 0 <= at < run.steps:
        raise SettingError(f"--from-step {at}: the run has steps 0 to {run.steps - 1:,}")
    return int(at)


def _report(run: Recorded, at: int, out: Path, same: Played, other: Played) -> None:
    requests = report.touched(run.folder, same.folder, other.folder, same.instant)
    found, pairs = report.changes(requests), report.paired(requests)
    folders = {"real": run.folder, "same": same.folder, "other": other.folder}
    off = model.off(run.folder, run.cost, at, out / "predicted.parquet")
    about: dict[str, Any] = {
        "version": VERSION,
        "run": str(run.folder),
        "from_step": at,
        "instant": same.instant,
        "requests": len(requests),
        "approximate": same.closed,
        "cost": OmegaConf.to_container(run.config.backend.cost, resolve=True),
        "cost_file": _file(run),
        "model": off,
        "spans": report.spans(folders, same.instant),
    }
    requests.to_csv(out / "requests.csv", index=False)
    whole = about | {
        "changes": [asdict(one) | {"effect": one.effect, "error": one.error, "verdict": one.verdict} for one in found],
        "paired": [asdict(one) for one in pairs],
    }
    provenance.write(out / "counterfactual.json", _finite(whole))
    print(f"{run.folder} from step {at:,} on")
    print(f"cost model: {type(run.cost).__name__}{f' ({_file(run)})' if _file(run) else ''}; on the recorded steps:")
    print("".join(f"  {line}\n" for line in model.told(off)))
    print(report.told(about, found, pairs, requests))
    _tell_left_out(run, requests, same.instant)
    if same.closed:
        print("approximate: arrivals answer to completions, and clients are taken to answer as the workload says")
    print(f"Runs and tables: {out}")


def _file(run: Recorded) -> str | None:
    """Which the cost model was read from."""
    found = getattr(run.cost, "file", None) or getattr(run.cost, "path", None)
    return str(found) if found else None


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_finite(child) for child in value]
    return None if isinstance(value, float) and isnan(value) else value


def _tell_left_out(run: Recorded, requests: Any, instant: float) -> None:
    """Who finished in one of the runs only is in no figure."""
    rows = read(run.folder, "requests", ["finished"]).column("finished").to_pylist()
    if left := sum(finished > instant for finished in rows) - len(requests):
        print(f"note: {left:,} requests did not finish in all three runs, and are left out")
