"""Tables of README and docs, made from recorded results: between the lines `<!-- table:NAME -->` and `<!-- end -->`.

python -m experiments.benchmarks.tables                          rewrite the tables
python -m experiments.benchmarks.tables --quickstart RUN_DIR     first record that run of the quickstart
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import conclusions, provenance
from experiments.benchmarks.gpu import tables as gpu
from experiments.benchmarks.layout import table
from experiments.benchmarks.ranks.tables import RANKS
from experiments.mutants.tables import MUTANTS
from experiments.peers import speed

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGES = (
    "README.md",
    "docs/conformance.md",
    "docs/decision-cost.md",
    "docs/gpu.md",
    "docs/parallel.md",
    "docs/robustness.md",
)
UNRECORDED = "Not measured yet."
POLICIES = ("chunked_prefill", "vllm_v0", "token_throttling")

DECISIONS = (
    "16+1000 full",
    "256+0 full",
    "256+1000 full",
    "256+1000 tight",
    "256+128 alike",
    "256+1000 room",
    "1024+1000 full",
    "1024+1000 tight",
)

Record = Mapping[str, Any]


def main() -> None:
    """Rewrite every table; with `--quickstart` record a run first."""
    parser = argparse.ArgumentParser(description="Rewrite the tables of README and docs from recorded results.")
    parser.add_argument("--quickstart", type=Path, metavar="RUN_DIR", help="the folder of a run of the quickstart")
    if folder := parser.parse_args().quickstart:
        record_quickstart(folder)
    for page in PAGES:
        file = ROOT / page
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")


def record_quickstart(folder: Path) -> None:
    """Keep the simulated summaries of a quickstart run: deterministic, so the machine does not matter."""
    summaries = {policy: json.loads((folder / "sim" / policy / "summary.json").read_text()) for policy in POLICIES}
    run = json.loads((folder / "sim" / POLICIES[0] / "run.json").read_text())
    kept = {name: run[name] for name in ("revision", "python", "versions", "device", "model", "seed", "spec")}
    provenance.write(RESULTS / "quickstart.json", kept | {"summaries": summaries})


def filled(page: str) -> str:
    """A page with every table made anew."""
    return re.sub(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", _fill, page, flags=re.DOTALL)


def _fill(found: re.Match[str]) -> str:
    name = found[2]
    file = RESULTS / f"{FILES[name]}.json"
    told = TABLES[name](json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else UNRECORDED
    return f"{found[1]}\n{told}\n\n{found[3]}"


METRICS: Mapping[str, tuple[str, str]] = {
    "TTFT, mean (s)": ("mean_ttft_ms", "s"),
    "TTFT, P99 (s)": ("p99_ttft_ms", "s"),
    "TPOT, mean (ms)": ("mean_tpot_ms", "ms"),
    "TPOT, P99 (ms)": ("p99_tpot_ms", "ms"),
    "output tokens a second": ("output_throughput", "plain"),
    "preemptions": ("preemptions", "plain"),
    "pipeline bubbles": ("bubble_ratio", "share"),
}
UNITS: Mapping[str, Callable[[float], str]] = {
    "s": lambda value: f"{value / 1000:.2f}",
    "ms": lambda value: f"{value:.0f}",
    "plain": lambda value: f"{value:,.0f}",
    "share": lambda value: f"{value:.0%}",
}


def _quickstart(record: Record) -> str:
    summaries = record["summaries"]
    rows = [
        [label, *(UNITS[unit](summaries[policy][metric]) for policy in POLICIES)]
        for label, (metric, unit) in METRICS.items()
    ]
    return table(["", *(f"`{policy}`" for policy in POLICIES)], rows)


def _simulator(record: Record) -> str:
    rows = [
        [
            row["case"],
            f"{row['requests']:,}",
            f"{row['steps']:,}",
            f"{row['serving']:.1f}",
            f"{row['requests_per_second']:,.0f}",
            f"{row['steps_per_second']:,.0f}",
        ]
        for row in record["rows"]
    ]
    head = ["", "requests", "steps", "CPU-s", "requests a CPU-s", "steps a CPU-s"]
    return f"{table(head, rows)}\n\n{_made_with(record)}"


def _engine(record: Record) -> str:
    rows = [
        [
            f"{row['model']}, batch {row['batch']}",
            f"{row['prompt_tokens']} + {row['new_tokens']}",
            f"{row['ratio']:.1f}×",
            f"{min(row['ratios']):.1f}×-{max(row['ratios']):.1f}×",
        ]
        for row in record["rows"]
    ]
    return f"{table(['', 'tokens in + out', 'times as fast', 'over rounds'], rows)}\n\n{_made_with(record)}"


def _peers(record: Record) -> str:
    return f"{speed.told(record)}\n\n{_made_with(record)}"


def _overlap(record: Record) -> str:
    rows = [
        [
            row["place"],
            row["work"],
            f"`{row['overlap']}`",
            f"{row['ms']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratios'][0]:.2f}-{row['ratios'][-1]:.2f}",
            "" if row["exposed"] is None else f"{row['exposed']:.0%}",
        ]
        for row in record["rows"]
    ]
    head = ["", "step", "overlap", "ms", "by `none`", "over rounds", "exposed"]
    return f"{table(head, rows)}\n\n{_made_with(record)}"


def _robustness(record: Record) -> str:
    return f"{conclusions.page(record)}\n\n{_made_with(record)}"


def _policies(record: Record) -> str:
    """Every policy, the dearest first."""
    rows = [
        [
            f"`{row['name']}`",
            *(f"{row['times'][where]:.0f}" for where in DECISIONS),
            f"{row['ratio']:.1f}",
            f"{row['growth']:.2f}",
            row["heavy"],
        ]
        for row in sorted(record["rows"], key=lambda row: (-row["worst"], row["name"]))
    ]
    head = ["µs a decision", *DECISIONS, "bare loops", "growth", ""]
    draft = ", ".join(f"{time:.0f} µs with {running} running" for running, time in record["draft"].items())
    routes = [[f"`{name}`", f"{time:.1f}"] for name, time in sorted(record["routes"].items())]
    return (
        f"{table(head, rows)}\n\nMaking a draft: {draft}. A placement among 8 replicas:\n\n"
        f"{table(['', 'µs'], routes)}\n\n{_made_with(record)}"
    )


def _made_with(record: Record) -> str:
    versions = record["versions"]
    names = [f"{name} {versions[name]}" for name in ("torch", "transformers", "simpy") if name in versions]
    revision = record["revision"]["commit"][:7] if record.get("revision") else "no checkout"
    return f"Python {record['python']}, {', '.join(names)}, {record['platform'].split('-')[0]}, commit {revision}."


TABLES: Mapping[str, Callable[[Record], str]] = {
    "quickstart": _quickstart,
    "simulator": _simulator,
    "engine": _engine,
    "peers": _peers,
    "overlap": _overlap,
    "robustness": _robustness,
    "policies": _policies,
    **gpu.ENGINE,
    **gpu.KERNELS,
    **RANKS,
    **MUTANTS,
}
FILES: Mapping[str, str] = {
    "quickstart": "quickstart",
    "simulator": "simulator",
    "engine": "engine_vs_transformers",
    "peers": "peers_speed",
    "overlap": "overlap_cpu",
    "robustness": "robustness",
    "policies": "policies",
    **dict.fromkeys(gpu.ENGINE, "gpu_engine_h200"),
    **dict.fromkeys(gpu.KERNELS, "gpu_kernels_h200"),
    **dict.fromkeys(RANKS, "ranks_h200"),
    **dict.fromkeys(MUTANTS, "mutants"),
}


if __name__ == "__main__":
    main()
