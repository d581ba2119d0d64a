"""A policy in a user's own package, as the README shows it: from the command line, with nothing changed here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE = '''
from dataclasses import dataclass

from playground.draft import How
from policies.composed import Admissions, Decodes
from policies.overlap import Overlap


class MyPolicy:
    """A whole policy: everybody who is there, oldest first, one token or one prompt each."""

    def fill(self, draft):
        for sequence in [*draft.running, *draft.waiting]:
            draft.take(sequence, sequence.remaining)

    def place(self, request, view):
        return 0

    def run_ahead(self, spec):
        return 1

    def steady(self, draft):
        return 0


@dataclass(frozen=True)
class MyBudget:
    """Decodes, and at most so many new requests a step."""

    rows: int = 2

    def phases(self, draft):
        yield Decodes()
        yield Admissions(rows=self.rows)


class ShortestFirst:
    def __call__(self, draft):
        return sorted(draft.waiting, key=lambda sequence: (sequence.remaining, sequence.id))


class Alone:
    def __call__(self, draft, sequence, tokens):
        return not draft.running


class FirstToCome:
    how = How.RECOMPUTE

    def __call__(self, draft, needy):
        return min(draft.running, key=lambda sequence: sequence.id)


class Home:
    def __call__(self, request, view):
        return 0


class Eager(Overlap):
    def outstanding(self, spec):
        return 2
'''


@pytest.fixture
def playground(tmp_path):
    """Run the command in a process of its own, with `mypkg` importable and this repository untouched."""
    (tmp_path / "mypkg.py").write_text(PACKAGE)
    paths = [str(tmp_path), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]

    def call(*arguments):
        small = ["workload.requests=12", "workload.rate=20", "kv.blocks=600"]
        command = [sys.executable, "-m", "playground", *small, *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    return call


def test_a_whole_policy(playground):
    assert playground("policy._target_=mypkg.MyPolicy")["completed"] == 12


def test_each_choice(playground):
    choices = {
        "budget": "MyBudget",
        "order": "ShortestFirst",
        "admission": "Alone",
        "victims": "FirstToCome",
        "route": "Home",
        "overlap": "Eager",
    }
    names = [f"policy.{choice}._target_=mypkg.{name}" for choice, name in choices.items()]
    summary = playground(*names, "policy.budget.rows=3")
    assert summary["completed"] == 12
