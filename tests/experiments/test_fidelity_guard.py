"""Records of runs hold the simulator to what it erred: worse is found out, and where."""

import json

import pytest

from experiments.__main__ import main
from experiments.fidelity import guard
from experiments.fidelity.guard import ERRORS, Figure, compared, record
from experiments.fidelity.hardware import serve
from experiments.fidelity.plan import Point
from experiments.settings import SettingError
from playground.sim.cost import Roofline, profile
from playground.trace import SCHEMAS, read

FEW = ("backend=sim", "backend.skip_ahead=false", "workload.requests=6", "workload.rate=30", "kv.blocks=600")
SHEET = ["backend/cost=roofline"]


def points(*overrides):
    return [
        Point(policy, "short", "near", "full", 0, (*FEW, *overrides, f"policy={policy}"))
        for policy in ("vllm_v1", "static")
    ]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Simulated, so that the simulator errs nowhere on it."""
    folder = tmp_path_factory.mktemp("study")
    serve(points(), folder)
    return folder


@pytest.fixture
def kept(study, tmp_path):
    record(study, [], tmp_path / "kept", SHEET)
    return tmp_path / "kept"


@pytest.fixture
def slower(monkeypatch):
    """A simulator by which kernels take 2 % longer."""
    stage = Roofline.stage

    def longer(self, shape, number):
        cost = stage(self, shape, number)
        return cost._replace(kernels=1.02 * cost.kernels)

    monkeypatch.setattr(Roofline, "stage", longer)


def call(capfd, *words):
    capfd.readouterr()
    code = main(["fidelity", *map(str, words)])
    return code, *capfd.readouterr()


def test_a_record_is_the_runs_and_the_errors(study, kept):
    for run in ("short-near-full-vllm_v1", "short-near-full-static"):
        for table in SCHEMAS:
            assert read(kept / "hardware" / run, table).equals(read(study / "hardware" / run, table))
    errors = json.loads((kept / ERRORS).read_text())["errors"]
    assert set(errors) == {"short-near-full-vllm_v1", "short-near-full-static"}
    assert set(errors["short-near-full-static"]) == {
        "decisions", "steps", "throughput", "ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2el_p50", "e2el_p90",
    }  # fmt: skip
    assert {value for found in errors.values() for value in found.values()} == {0.0}


def test_the_same_simulator_errs_alike(kept, capfd):
    code, out, _ = call(capfd, "guard", kept)
    assert code == 0
    assert out.rstrip().endswith("18 of 18 errors are no more than 0.5% above the recorded")


def test_a_worse_one_is_told_by_run_and_metric(kept, slower, capfd):
    code, out, _ = call(capfd, "guard", kept)
    assert code == 1
    assert "worse: short-near-full-static steps: +2.00%, recorded +0.00%" in out
    assert "worse: short-near-full-vllm_v1 ttft_p90: +" in out


def test_errors_that_were_there_before_are_no_news(study, tmp_path, slower):
    record(study, [], tmp_path, SHEET)
    assert not any(figure.worse for figure in compared(tmp_path))


@pytest.mark.parametrize(
    ("recorded", "today", "worse"),
    [(0.03, 0.034, False), (0.03, 0.036, True), (-0.03, 0.034, False), (0.03, -0.036, True), (0.2, 0.0, False)],
)
def test_worse_is_further_from_the_hardware(recorded, today, worse):
    assert Figure("run", "steps", recorded, today).worse is worse


def test_a_decision_that_differs_is_worse(kept):
    run = kept / "hardware"
    policy = (run / "short-near-full-vllm_v1" / "config.yaml").read_bytes()
    (run / "short-near-full-static" / "config.yaml").write_bytes(policy)
    worse = {(figure.run, figure.metric) for figure in compared(kept) if figure.worse}
    assert ("short-near-full-static", "decisions") in worse


def test_one_of_the_runs_is_kept(study, tmp_path):
    record(study, ["short-near-full-static"], tmp_path, SHEET)
    assert [folder.name for folder in (tmp_path / "hardware").iterdir()] == ["short-near-full-static"]


def test_a_profile_that_ships_is_found_before_a_users_own(tmp_path, monkeypatch):
    (tmp_path / "own" / "h200" / "qwen3-8b").mkdir(parents=True)
    given = ("model=qwen3-8b", "device=h200", "backend/cost=calibrated")
    serve(points(*given)[:1], tmp_path)
    record(tmp_path, [], tmp_path / "kept", ["backend/cost=calibrated"])
    content = json.loads((tmp_path / "kept" / ERRORS).read_text())
    assert content["cost"] == ["backend/cost=calibrated", "backend.cost.path={profiles}/h200/qwen3-8b/single.json"]

    own = json.loads((profile.shipped() / "h200" / "qwen3-8b" / "single.json").read_text())
    own["stages"][0]["decodes"]["seconds"] = [2 * value for value in own["stages"][0]["decodes"]["seconds"]]
    (tmp_path / "own" / "h200" / "qwen3-8b" / "single.json").write_text(json.dumps(own))
    monkeypatch.setattr(profile, "OWN", tmp_path / "own")
    assert not any(figure.worse for figure in compared(tmp_path / "kept"))


def test_mistakes_are_told_in_a_line(study, kept, tmp_path):
    with pytest.raises(SettingError, match=r"no record of runs: it has no errors\.json"):
        compared(study)
    with pytest.raises(SettingError, match=r"nope: .* has no such finished run; there are: short-near-full-static, "):
        record(study, ["nope"], tmp_path / "other", SHEET)
    with pytest.raises(SettingError, match="no finished run"):
        record(tmp_path / "empty", [], tmp_path / "other", SHEET)
    with pytest.raises(SettingError, match=r"holds other runs \(short-near-full-vllm_v1\)"):
        record(study, ["short-near-full-static"], kept, SHEET)
    content = json.loads((kept / ERRORS).read_text())
    (kept / ERRORS).write_text(json.dumps(content | {"errors": {"x": {}}}))
    with pytest.raises(SettingError, match="hold different runs"):
        compared(kept)
    (kept / ERRORS).write_text(json.dumps(content | {"version": 0}))
    with pytest.raises(SettingError, match="version 0, and this reads 1"):
        compared(kept)


def test_records_that_ship_hold():
    for folder in sorted(guard.RECORDED.glob("*/")):
        assert [figure for figure in compared(folder) if figure.worse] == [], folder.name
