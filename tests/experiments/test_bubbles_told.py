"""What a user sees of a pipeline's bubbles: after a run, and by the command about runs that are there."""

import json
import re
import sys

import pytest

from experiments import __main__ as commands

CAUSES = ("unready", "host", "upstream", "fill", "drain")


@pytest.fixture
def pipeline(playground):
    return playground("parallel=pp2", "kv.blocks=600", "workload.requests=12", "workload.rate=20", "run_dir=mine")


def test_a_runs_table_says_what_its_bubbles_are_made_of(pipeline):
    assert pipeline.code == 0, pipeline.err
    for label in ("bubbles", "· nothing ready", "· host", "· stage before"):
        assert re.search(rf"{label} +[\d.]+%", pipeline.out), label
    parts = sum(pipeline.last[f"bubble_{cause}"] for cause in CAUSES)
    assert parts == pytest.approx(pipeline.last["bubble_ratio"])


def test_without_a_pipeline_there_is_nothing_to_tell(playground):
    outcome = playground("kv.blocks=600", "workload.requests=12", "workload.rate=20")
    assert "bubble_host" not in outcome.last
    assert "nothing ready" not in outcome.out


def test_the_command(pipeline, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["experiments", "bubbles", "mine"])
    assert commands.main() == 0
    out = capfd.readouterr().out.splitlines()
    rows = [line.split() for line in out if re.match(r" +0 +[01] ", line)]
    assert [row[:2] for row in rows] == [["0", "0"], ["0", "1"]]
    for row in rows:
        assert sum(float(cell.rstrip("%")) for cell in row[2:]) == pytest.approx(100, abs=0.4)
    ratio = pipeline.last["bubble_ratio"]
    assert f"Bubble ratio, while somebody was in the system: {ratio:.1%}" in "\n".join(out)
    told = json.loads(out[-1])
    assert sum(told[cause] for cause in CAUSES) == pytest.approx(ratio)


def test_another_folder(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "argv", ["experiments", "bubbles", str(tmp_path)])
    assert commands.main() == 2
    assert capfd.readouterr().err == f"error: run_dir={tmp_path} is not the folder of a run: it has no run.json\n"
