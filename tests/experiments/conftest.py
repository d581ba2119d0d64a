"""The front door, called inside this process: a subprocess for each case would cost a second or two."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.run import main


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def last(self) -> dict:
        """The last line of stdout, which is JSON."""
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def run_dir(self) -> Path:
        return Path(self.last["run_dir"])


@pytest.fixture
def playground(monkeypatch, tmp_path, capfd):
    """Call as `playground("policy=...", ...)`; works in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["playground", *arguments])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err, tmp_path)

    return call


SMALL = ("workload.requests=12", "workload.rate=20", "kv.blocks=600")
"""A run of a fraction of a second."""
