"""Our simulator's speed beside its peers', in one run on one machine.

    python -m experiments.peers.speed --environments FOLDER [--rounds 3]

Requests per CPU-second on one core: the same requests (Poisson, prompts and outputs about N(512, 256)), KV blocks and
limits (256 sequences, chunked prefill of 2048 tokens) for one 8B replica on an H200. Every run is a process of its own;
contestants take turns, round after round, and a ratio is of two runs of the same round. Start-up (until the first
event) is told apart. Ours writes its whole trace; Vidur keeps the metrics that its own search keeps; Dynamo's mocker
a summary. Vidur's prediction tables are filled from our cost model, so that steps are as long; Dynamo's mocker has a
formula of its own. Peers that cannot be had here stand below with the figures that others gave, and are no measurement
of this run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from experiments import provenance
from experiments.benchmarks.layout import table
from experiments.peers import contestants
from experiments.peers.contestants import Contestant, Prepared, Timed

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "peers_speed.json"
SHARED = ("workload=normal", "model=llama-3.1-8b", "device=h200", "policy=chunked_prefill")
SEQS, TOKENS = 256, 2048
"""Our defaults, which the peers are told."""
CASES: Mapping[str, Sequence[str]] = {
    "4 requests/s": [*SHARED],
    "40 requests/s, saturated": [*SHARED, "workload.rate=40"],
}
QUOTED: Sequence[Mapping[str, Any]] = (
    {
        "name": "Vidur, GitHub main",
        "requests_per_second": [225, 400],
        "source": "reference/vidur.md 2.1",
        "load": "Azure conversations, 34B, 2 requests/s",
        "why": "its profiles of attention are not in what is stored of its repository",
    },
    {
        "name": "BLIS inference-sim",
        "requests_per_second": [80, 110],
        "source": "issue 4",
        "load": "not told",
        "why": "written in Go; its source is in no package registry",
    },
    {
        "name": "splitwise-sim",
        "requests_per_second": [24, 24],
        "source": "issue 4",
        "load": "not told",
        "why": "its source is in no package registry; unmaintained since 2024",
    },
)

Runs = dict[str, list[Timed]]


def main() -> None:
    """Time everyone, print a table and write the results."""
    wanted = _parser().parse_args()
    everyone = [*contestants.ours(), *contestants.peers(wanted.environments.resolve())]
    cases = [_case(case, given, everyone, wanted.rounds) for case, given in CASES.items()]
    versions = {one.name: one.version for one in everyone}
    method = {"method": __doc__, "rounds": wanted.rounds, "cpus": os.cpu_count(), "load": os.getloadavg()}
    record = provenance.facts() | method | {"peers": versions, "cases": cases, "quoted": QUOTED}
    provenance.write(RESULTS, record)
    print(told(record))


def _case(case: str, given: Sequence[str], everyone: Sequence[Contestant], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        load = contestants.prepare(given, Path(folder) / "load", SEQS, TOKENS)
        runs = _rounds(everyone, load, rounds)
    first = everyone[0].name
    rows = [{"name": one.name} | summary(runs[first], runs[one.name]) for one in everyone]
    return {"case": case, "overrides": list(given), "rows": rows}


def _rounds(everyone: Sequence[Contestant], load: Prepared, rounds: int) -> Runs:
    runs: Runs = {one.name: [] for one in everyone}
    for number in range(rounds):
        for one in everyone:
            runs[one.name].append(contestants.timed(one, load))
            print(f"round {number + 1}, {one.name}: {asdict(runs[one.name][-1])}", flush=True)
    return runs


def summary(ours: Sequence[Timed], theirs: Sequence[Timed]) -> dict[str, Any]:
    """Medians over rounds, each with the least and the most: [median, least, most]."""
    pairs = zip(ours, theirs, strict=True)
    return {
        "requests": theirs[0].requests,
        "steps": theirs[0].steps,
        "finished": theirs[0].finished,
        "requests_per_second": _spread([one.requests / one.serving for one in theirs]),
        "start_up": _spread([one.start_up for one in theirs]),
        "ours_is_times_as_fast": _spread([_speed(mine) / _speed(other) for mine, other in pairs]),
        "runs": [asdict(one) for one in theirs],
    }


def told(record: Mapping[str, Any]) -> str:
    """The table, measured ones first, then those quoted."""
    head = ["", "load", "requests a CPU-s", "over rounds", "start-up, CPU-s", "ours is times as fast"]
    return table(head, [*_measured(record), *_quoted(record)])


def _measured(record: Mapping[str, Any]) -> Iterator[list[str]]:
    for case in record["cases"]:
        for row in case["rows"]:
            speed, least, most = row["requests_per_second"]
            ratio = row["ours_is_times_as_fast"]
            yield [
                f"{row['name']} {record['peers'][row['name']]}".strip(),
                case["case"],
                f"{speed:,.0f}",
                f"{least:,.0f}-{most:,.0f}",
                f"{row['start_up'][0]:.2f}",
                f"{ratio[0]:.2g} ({ratio[1]:.2g}-{ratio[2]:.2g})",
            ]


def _quoted(record: Mapping[str, Any]) -> Iterator[list[str]]:
    for one in record["quoted"]:
        least, most = one["requests_per_second"]
        figure = f"{least}" if least == most else f"{least}-{most}"
        yield [f"{one['name']}: quoted ({one['source']}), not measured here", one["load"], figure, "", "", ""]


def _speed(run: Timed) -> float:
    return run.requests / run.serving


def _spread(values: Sequence[float]) -> list[float]:
    return [median(values), min(values), max(values)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.peers.speed", description="Our simulator's speed beside its peers', in one run."
    )
    parser.add_argument(
        "--environments", type=Path, required=True, metavar="FOLDER", help="the peers' own; made where missing (pip)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each, taking turns (default 3)")
    return parser


if __name__ == "__main__":
    main()
