"""`python -m analysis fidelity STUDY`: what it prints, the page, the file, and what it says of a wrong folder."""

import json
import re

import pytest

from analysis.__main__ import main
from experiments.fidelity.hardware import serve
from experiments.fidelity.plan import Point
from experiments.fidelity.twin import pair

FEW = ("backend=sim", "backend.skip_ahead=false", "workload.requests=12", "workload.rate=30", "kv.blocks=600")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two policies, one of them twice; twins are of a device that is another by its sheet."""
    folder = tmp_path_factory.mktemp("study")
    points = [
        Point(policy, "short", "near", "full", repeat, (*FEW, f"policy={policy}", f"seed={repeat}"))
        for policy, repeat in (("vllm_v1", 0), ("static", 0), ("static", 1))
    ]
    serve(points, folder)
    for point in points:
        pair(folder / "hardware" / point.name, folder, ["backend/cost=roofline", "device=h200"], "")
    return folder


def test_a_table_a_page_and_a_file(study, tmp_path, capsys):
    assert main(["fidelity", str(study), "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "decisions identical under replayed instants and step times" in out
    assert all(len(line) <= 120 for line in out.splitlines()[:-1])
    found = json.loads((tmp_path / "fidelity.json").read_text())
    assert {len(found[part]) for part in ("pairs", "host_gaps", "decision")} == {3}
    assert found["spread"]["short-near-full-vllm_v1"]["of"] == ["short-near-full-static"]

    page = (tmp_path / "fidelity.html").read_text()
    for title in ("Targets", "Runs", "Steps", "Conclusions", "The hardware's own spread", "Decisions", "Time lines"):
        assert f"<h2>{title}" in page
    assert page.count("data:image/png;base64,") == 3 + 3  # errors, steps, rankings; a run each
    assert not re.search(r"(?:src|href)=.http", page)
    for name in ("short-near-full-static-1", "short-near-full-vllm_v1"):
        mape = next(row["mape"] for row in found["kernel"] if row["name"] == name and row["kind"] == "all")
        assert f"<td>{name}</td><td class='bad'>{mape:.1%}</td>" in page


def test_what_has_no_pairs_is_told_in_a_line(tmp_path, capsys):
    assert main(["fidelity", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: no pairs; make them with: python -m experiments fidelity twin -o {tmp_path}\n"
    )
