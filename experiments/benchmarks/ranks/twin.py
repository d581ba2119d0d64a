"""The simulated twin of recorded pipelines: the same requests, policies and KV, on a roofline of the same device.

    python -m experiments.benchmarks.ranks.twin OUT/ranks.json

It adds a row to the record for each of its rows of bubbles, in place of older ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from experiments import launcher, provenance, settings
from experiments.benchmarks.ranks.pipeline import MODEL, TOKENS, conversations, rules, waited
from experiments.build import build
from experiments.overrides import completing
from playground.backend import Backend

TWIN = ", simulated"
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.ranks.twin", description=__doc__)
    parser.add_argument("record", type=Path, help="what the benchmark wrote")
    file = parser.parse_args().record
    record = json.loads(file.read_text(encoding="utf-8"))
    provenance.write(file, with_twins(record))


def with_twins(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a simulated row for each that was measured."""
    rows = [row for row in record["rows"] if not row["work"].endswith(TWIN)]
    return {**record, "rows": [*rows, *[twin(row) for row in rows if row.get("part") == "bubbles"]]}


def twin(row: Row) -> dict[str, Any]:
    requests = conversations(row["conversations"], row["rate"], row["longest"])
    with tempfile.TemporaryDirectory() as folder:
        found = waited(simulated(row["blocks"]), requests, rules(row["policy"]), Path(folder))
    return {**row, "work": row["work"] + TWIN, "measured": found.ratio, **found.told}


def simulated(blocks: int) -> Backend:
    """Two H200s in a pipeline, as the front door builds them."""
    settings.register()
    launcher.register()
    options = [
        "run_dir=nowhere", "parallel=pp2", f"model={MODEL}", "device=h200", f"kv.blocks={blocks}",
        f"limits.max_tokens={4 * TOKENS}",
    ]  # fmt: skip
    with initialize_config_module("conf", version_base="1.3"):
        config = completing(lambda given: compose("config", given), options)
    return build(settings.read(config)).backend


if __name__ == "__main__":
    main()
