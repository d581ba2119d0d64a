"""Who is timed, and how each is started: a command that prints one JSON line last. Peers have environments of their
own, never ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.peers import load, vidur_tables

HERE = Path(__file__).parent
KEYS = 4096
"""Longest sequence in Vidur's tables; the load's longest has 2,301 tokens."""
PACKAGES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    # What it imports; of its own requirements some do not install with one another.
    "vidur": (
        ["vidur==0.0.26"],
        [
            *[
                "numpy",
                "pandas",
                "scikit-learn",
                "ddsketch",
                "fasteners",
                "huggingface_hub",
                "kaleido",
                "plotly_express",
            ],
            *["matplotlib", "seaborn", "wandb<0.20", "randomname", "click"],
        ],
    ),
    "dynamo": (["ai-dynamo-runtime==1.6.1"], ["pydantic<=2.13.5", "uvloop"]),
}
"""Of each environment: what is installed without its requirements, and what with."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A load, written down for everyone. `overrides` make it here."""

    overrides: Sequence[str]
    folder: Path
    blocks: int
    seqs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Contestant:
    """`command` makes the command line for a load. No `version`: it is that of this checkout."""

    name: str
    version: str
    command: Callable[[Prepared], list[str]]


@dataclass(frozen=True, slots=True)
class Timed:
    """CPU seconds of one run: `start_up` until its first event, `serving` from there to its written results.

    `finished`: simulated seconds. `steps` None: it does not tell.
    """

    start_up: float
    serving: float
    requests: int
    steps: int | None
    finished: float


def prepare(overrides: Sequence[str], folder: Path, seqs: int, tokens: int) -> Prepared:
    """Write the load into the folder in the peers' formats, and Vidur's tables beside it."""
    made = load.read(overrides)
    folder.mkdir(parents=True)
    load.write_azure(folder / "azure.csv", made.requests)
    load.write_mooncake(folder / "mooncake.jsonl", made.requests)
    vidur_tables.write(folder / "tables", made.cost, made.layers, seqs, tokens, KEYS)
    return Prepared(overrides, folder, made.blocks, seqs, tokens)


def ours() -> list[Contestant]:
    """As any run is, and with every step simulated by itself."""
    return [
        Contestant("ours", "", lambda load: _ours(load)),
        Contestant("ours, every step by itself", "", lambda load: _ours(load, "backend.skip_ahead=false")),
    ]


def peers(environments: Path) -> list[Contestant]:
    """Those whose packages can be had, each in an environment in this folder, which is made where it is missing."""
    vidur, dynamo = (_python(environments, name) for name in PACKAGES)
    return [
        Contestant("Vidur", _asked(vidur, "vidur"), lambda load: _worker(vidur, "vidur_worker.py", _for_vidur(load))),
        Contestant(
            "Dynamo mocker",
            _asked(dynamo, "ai-dynamo-runtime"),
            lambda load: _worker(dynamo, "dynamo_worker.py", _limits(load, "mooncake.jsonl")),
        ),
    ]


def timed(contestant: Contestant, load: Prepared) -> Timed:
    """One run, in a process of its own on one core."""
    alone = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(contestant.command(load), capture_output=True, text=True, env=alone, check=False)
    if done.returncode:
        raise RuntimeError(f"{contestant.name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return Timed(**json.loads(done.stdout.splitlines()[-1]))


def _ours(load: Prepared, *more: str) -> list[str]:
    return [sys.executable, "-m", "experiments.peers.ours_worker", *load.overrides, *more]


def _worker(python: Path, file: str, wanted: Mapping[str, object]) -> list[str]:
    # -P: beside the script lies a vidur.py of ours.
    return [str(python), "-P", str(HERE / file), json.dumps(wanted)]


def _limits(load: Prepared, trace: str) -> dict[str, object]:
    return {"trace": str(load.folder / trace), "blocks": load.blocks, "seqs": load.seqs, "tokens": load.tokens}


def _for_vidur(load: Prepared) -> dict[str, object]:
    more = {"tables": str(load.folder / "tables"), "out": str(load.folder / "vidur")}
    return _limits(load, "azure.csv") | more


def _python(environments: Path, name: str) -> Path:
    """The interpreter of the environment; made, with its packages, if it is not there."""
    python = environments / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environments / name)], check=True)
        bare, whole = PACKAGES[name]
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", *bare], check=True)
        subprocess.run([*pip, *whole], check=True)
    return python


def _asked(python: Path, package: str) -> str:
    """The version that is installed there."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
