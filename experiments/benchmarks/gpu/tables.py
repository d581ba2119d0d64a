"""The tables of docs/gpu.md, each from one record of `gpu_engine.py` or `gpu_kernels.py`.

A part that the record lacks is a line that says so: a run may leave parts out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.benchmarks.layout import table

Record = Mapping[str, Any]
Row = Mapping[str, Any]

MISSING = "Not part of the recorded run."


def found(record: Record) -> str:
    """What was measured where."""
    facts = record["facts"]
    good, of = _good(record)
    return f"{_machine(facts)} {good} of {of} correctness checks good."


def targets(record: Record) -> str:
    """Work with a figure to reach, two steps ahead."""
    rows: dict[str, Row] = {}
    for row in record["rows"]:
        if row["target"] and _ahead(row) in (None, 2):
            rows.setdefault(_work(row), row)
    lines = [
        [
            work,
            _time(row["limit"], row["unit"]) if row["limit"] else "",
            _time(row["target"], row["unit"]),
            _time(row["measured"], row["unit"]),
            f"{row['limit'] / row['measured']:.0%}" if row["limit"] else "",
            "yes" if row["measured"] <= row["target"] else "**no**",
        ]
        for work, row in rows.items()
    ]
    return _or_missing(["work", "limit", "to reach", "measured", "of the limit", "reached"], lines)


def ahead(record: Record) -> str:
    """The same work with one step outstanding and with two."""
    pairs: dict[str, dict[int, Row]] = {}
    for row in record["rows"]:
        if (depth := _ahead(row)) and row["limit"]:
            pairs.setdefault(_work(row), {})[depth] = row
    lines = [
        [
            work,
            *(_time(by[n]["measured"], by[n]["unit"]) for n in (1, 2)),
            *(_share(by[n]["idle_share"]) for n in (1, 2)),
        ]
        for work, by in pairs.items()
        if {1, 2} <= by.keys()
    ]
    return _or_missing(["work", "`run_ahead` 1", "2", "idle with 1", "with 2"], lines)


def host(record: Record) -> str:
    """The host's time a step of 256 decodes, by part; the first workload of each depth."""
    rows: dict[int, Row] = {}
    for row in record["rows"]:
        if row["work"].strip().startswith("host a step"):
            rows.setdefault(_ahead(row) or 0, row)
    names = ("scheduling_ms", "launch_ms", "measured", "tokens_in_ms", "device_ms")
    lines = [
        [f"`run_ahead` {depth}", *(_time(row[name], "ms") for name in names), _share(row["idle_share"])]
        for depth, row in sorted(rows.items())
    ]
    head = ["256 decodes", "scheduling", "input and launch", "both", "tokens in", "device step", "device idle"]
    return _or_missing(head, lines)


def graphs(record: Record) -> str:
    """Small mixed steps, as graphs and eager."""
    ways: dict[str, dict[str, Row]] = {}
    for row in record["rows"]:
        if row["work"].startswith("steps of "):
            work, _, way = row["work"].rpartition(", ")
            ways.setdefault(work, {})[way] = row
    lines = [
        [work, _time(by["graphs"]["measured"], "ms"), _time(by["no graphs"]["measured"], "ms"),
         _time(by["graphs"]["host_ms"], "ms"), _time(by["no graphs"]["host_ms"], "ms")]
        for work, by in ways.items()
    ]  # fmt: skip
    return _or_missing(["", "graphs", "eager", "host, graphs", "host, eager"], lines)


def memory(record: Record) -> str:
    """What the device's memory was used for, and how long the start took."""
    facts = record["facts"]
    if "memory" not in facts:
        return MISSING
    lines = [[name, f"{size / 1e9:.2f} GB"] for name, size in facts["memory"].items() if size]
    blocks = facts["kv_blocks"]
    told = f"{blocks:,} blocks: KV of {blocks * 16:,} tokens."
    if "graphs" in facts:
        told += f" {facts['graphs']} graphs."
    start = f"Kernels compiled and graphs captured in {facts['warm_up_s']:.0f} s."
    return f"{table(['use', 'memory'], lines)}\n\n{told} {start}"


def swap(record: Record) -> str:
    lines = [
        [row["work"], f"{row['gigabytes']:.2f} GB", f"{row['measured']:.1f} GB/s", f"{row['back']:.1f} GB/s"]
        for row in record["rows"]
        if row["work"].startswith("swap of ")
    ]
    return _or_missing(["", "size", "to the host", "back"], lines)


def transformers(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        if row["work"].startswith("transformers ") and "ratio" in row:
            ours = row.get("ours_ms", row.get("ours_tokens_per_s"))
            lines.append(
                [f"{row['work'].removeprefix('transformers ')}{_cut(row)}", _time(row["measured"], row["unit"]),
                 _time(ours, row["unit"]), f"{row['ratio']:.1f}×", _choices(row)]
            )  # fmt: skip
    return _or_missing(["`transformers`", "theirs", "ours", "times as fast", "what it chose"], lines)


def flight(record: Record) -> str:
    lines = [
        [
            row["work"].partition(": ")[2],
            _time(row["limit"], "ms"),
            _time(row["limit_with_prompts_ms"], "ms") if "limit_with_prompts_ms" in row else "",
            _time(row["measured"], "ms"),
            _time(row["vllm_fp8_ms"], "ms"),
            f"{row['output_tokens_per_s']:,.0f}" if "output_tokens_per_s" in row else "",
            _time(row["ttft_ms"], "ms") if "ttft_ms" in row else "",
        ]
        for row in record["rows"]
        if "vllm_fp8_ms" in row and ": " in row["work"]
    ]
    head = ["", "limit, decodes", "limit, with prompts", "ours, bf16", "vLLM, FP8", "output tokens/s", "TTFT"]
    return _or_missing(head, lines)


# --- kernels

SECTIONS: Mapping[str, Callable[[str], bool]] = {
    "Attention of decodes, of the copy rate": lambda name: name.startswith("decode"),
    "Attention of prompts, of cuDNN's rate": lambda name: name.startswith("prefill"),
    "Projections with what surrounds them, of the copy rate": lambda name: name.startswith(("ours ", "cublas ")),
    "Small kernels and sampling, of the copy rate": lambda name: not name.startswith("step "),
    "Whole steps of 36 layers": lambda name: True,
}
"""Each kernel belongs to the first that takes it."""


def kernels(record: Record) -> str:
    """Time and share of the ceiling: a table a section, kernels by cases."""
    left = [row for row in record["timings"] if "share" in row]
    parts = []
    for title, takes in SECTIONS.items():
        mine = [row for row in left if takes(row["name"])]
        left = [row for row in left if not takes(row["name"])]
        if mine:
            parts.append(_section(title, mine))
    good, of = _good(record)
    told = f"{_machine(record['versions'])} {good} of {of} checks against the reference good."
    return "\n\n".join([told, *parts]) if parts else MISSING


def _section(title: str, rows: Sequence[Row]) -> str:
    """Kernels beside cases; the other way round where many cases belong to few kernels."""
    names, cases = _distinct(rows, "name"), _distinct(rows, "case")
    cell = {(row["name"], row["case"]): f"{_micro(row['us'])} ({row['share']:.0%})" for row in rows}
    if len(cases) > len(names):
        lines = [[case, *(cell.get((name, case), "") for name in names)] for case in cases]
        return table([title, *names], lines)
    return table([title, *cases], [[name, *(cell.get((name, case), "") for case in cases)] for name in names])


def _distinct(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


# --- words


def _machine(facts: Record) -> str:
    parts = [facts["device"], *(f"{name} {facts[name]}" for name in ("torch", "triton")), f"driver {facts['driver']}"]
    commit = facts.get("commit", "")
    known = re.fullmatch("[0-9a-f]{7,40}", commit)
    date = facts.get("date", "").partition("T")[0]
    return f"{', '.join(parts)}{', ' + date if date else ''}, commit {commit[:7] if known else 'not recorded'}."


def _good(record: Record) -> tuple[int, int]:
    return sum(check["good"] for check in record["checks"]), len(record["checks"])


def _or_missing(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return table(head, lines) if lines else MISSING


def _ahead(row: Row) -> int | None:
    """How many steps were outstanding; None if the row does not say."""
    told = re.search(r", (?:run_)?ahead (\d)$", row["work"])
    return int(told[1]) if told else None


def _work(row: Row) -> str:
    return re.sub(r", (?:run_)?ahead \d$", "", row["work"]).strip()


def _time(value: float, unit: str) -> str:
    digits = {"s": 3 if value < 1 else 2, "ms": 2 if value < 20 else 1, "tokens/s": 0}.get(unit, 2)
    return f"{value:,.{digits}f} {unit}"


def _micro(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _cut(row: Row) -> str:
    if row.get("finished", 0) == row.get("requests", 0):
        return ""
    return f" (cut after {row['seconds']:.0f} s, {row['finished']} of {row['requests']} done)"


def _choices(row: Row) -> str:
    chosen = row.get("choices")
    if not chosen:
        return ""
    names = {"cuda_graphs": "graphs", "asynchronous": "asynchronous"}
    told = [f"{'' if 'True' in chosen[name] else 'no '}{word}" for name, word in names.items()]
    return f"{chosen['attention'].replace('|', ' ')}, {', '.join(told)}"


ENGINE: Mapping[str, Callable[[Record], str]] = {
    "gpu_found": found, "gpu_targets": targets, "gpu_ahead": ahead, "gpu_host": host, "gpu_graphs": graphs,
    "gpu_memory": memory, "gpu_swap": swap, "gpu_transformers": transformers, "gpu_flight": flight,
}  # fmt: skip
KERNELS: Mapping[str, Callable[[Record], str]] = {"gpu_kernels": kernels}
