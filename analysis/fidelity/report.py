"""Everything a study says, put together: as data, as a table for a terminal, as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.fidelity import layers
from analysis.fidelity.page import page
from analysis.fidelity.study import Pair, read
from analysis.fidelity.verdicts import verdicts

VERSION = 1
DATA, PAGE = "fidelity.json", "fidelity.html"


def report(study: Path, out: Path) -> dict[str, Any]:
    """Write `fidelity.json` and `fidelity.html`; what the former holds."""
    pairs = read(study)
    found = judge(pairs)
    out.mkdir(parents=True, exist_ok=True)
    (out / DATA).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (out / PAGE).write_text(page(found, pairs), encoding="utf-8")
    return found


def judge(pairs: Sequence[Pair]) -> dict[str, Any]:
    """All layers, the hardware's spread, and the verdicts."""
    spread = layers.spreads(pairs)
    found: dict[str, Any] = {
        "version": VERSION,
        "pairs": [{**pair.about, "parity": None} for pair in pairs],
        "kernel": layers.kernel(pairs),
        "host_gaps": layers.host_gaps(pairs),
        "decision": layers.decision(pairs),
        "trajectory": layers.trajectory(pairs),
        "distances": layers.distances(pairs),
        "spread": spread,
        "conclusion": layers.conclusion(pairs, spread),
    }
    return found | {"verdicts": verdicts(pairs, found, spread)}


def told(found: dict[str, Any]) -> str:
    """For a terminal of 100 columns: targets, then runs."""
    lines = ["Targets"]
    for row in found["verdicts"]:
        lines.append(f"  {row['verdict']:12}  {row['target']}")
        lines.append(f"  {'':12}  {row['figure']}")
        lines += [f"  {'':12}  - {name}" for name in row["missed_by"][:MOST_TOLD]]
        if (more := len(row["missed_by"]) - MOST_TOLD) > 0:
            lines.append(f"  {'':12}  - and {more} more")
    return "\n".join([*lines, "", *_runs(found)])


MOST_TOLD = 8
COLUMNS = ("throughput", "ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2el_p50", "e2el_p90")


def _runs(found: dict[str, Any]) -> list[str]:
    """Errors of every run, the simulation against the hardware."""
    width = max(len(pair["name"]) for pair in found["pairs"])
    errors = {(row["name"], row["metric"]): row["error"] for row in found["trajectory"]}
    steps = {row["name"]: row["mape"] for row in found["kernel"] if row["kind"] == "all"}
    head = f"{'run':{width}}  {'steps':>6}" + "".join(f" {name.replace('throughput', 'req/s'):>8}" for name in COLUMNS)
    lines = [head, "-" * len(head)]
    for pair in found["pairs"]:
        name = pair["name"]
        shown = "".join(f" {errors[name, column]:>+8.1%}" for column in COLUMNS)
        lines.append(f"{name:{width}}  {steps[name]:>6.1%}{shown}")
    return lines
