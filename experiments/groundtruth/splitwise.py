"""Splitwise's profile of static batches on DGX machines (vLLM of 2023): times of prompts and of decode steps."""

from __future__ import annotations

from statistics import median

from experiments.groundtruth import data
from experiments.groundtruth.case import Case, Skipped, Split
from experiments.groundtruth.costs import Hardware
from experiments.groundtruth.static import Batch

SOURCE = "splitwise-perfmodel"
NAME = "vLLM 2023"
MODELS = {"llama2-70b": "llama-2-70b"}
DEVICES = {"a100-80gb": "a100_80", "h100-80gb": "h100"}
Key = tuple[str, str, int, int, int, int]
"""Model, hardware, tp, batch, prompt, output."""


def cases() -> list[Case]:
    """One for each shape and split: the medians over its repetitions."""
    grouped: dict[tuple[Key, Split], list[dict[str, str]]] = {}
    for number, row in enumerate(_rows()):
        if not _obstacle(row):
            split: Split = "fit" if number % 2 else "test"
            grouped.setdefault((_key(row), split), []).append(row)
    return [_case(key, split, rows) for (key, split), rows in grouped.items()]


def skipped() -> list[Skipped]:
    told: dict[tuple[str, str], int] = {}
    for row in _rows():
        if why := _obstacle(row):
            what = f"{row['model']} on {row['hardware']}"
            told[what, why] = told.get((what, why), 0) + 1
    return [Skipped(SOURCE, what, count, why) for (what, why), count in told.items()]


def _rows() -> list[dict[str, str]]:
    return data.table("splitwise/perf_model.csv.xz")


def _obstacle(row: dict[str, str]) -> str:
    if row["model"] not in MODELS:
        return "its architecture (ALiBi, no gated MLP) is not modelled"
    return "" if row["hardware"] in DEVICES else "power-capped: how far clocks fell is not known"


def _key(row: dict[str, str]) -> Key:
    sizes = (int(row[name]) for name in ("tensor_parallel", "batch_size", "prompt_size", "token_size"))
    return (row["model"], row["hardware"], *sizes)  # type: ignore[return-value]


def _case(key: Key, split: Split, rows: list[dict[str, str]]) -> Case:
    model, device, tp, size, prompt, output = key
    ttft, tpot, e2el = (median(float(row[name]) / 1e3 for row in rows) for name in _COLUMNS)
    hardware = Hardware(MODELS[model], DEVICES[device], tp)
    return Case(
        source=SOURCE,
        name=f"batch {size} of {prompt}/{output} tokens",
        split=split,
        engine=NAME,
        model=hardware.model,
        device=hardware.device,
        tp=tp,
        load="static",
        measured={"ttft": ttft, "tpot": tpot, "e2el": e2el},
        trial=Batch(hardware, f"{NAME}, {hardware.device}", size, prompt, output),
    )


_COLUMNS = ("prompt_time", "token_time", "e2e_time")
