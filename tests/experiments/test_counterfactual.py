"""`python -m experiments counterfactual`: beside the recorded run, its own policy simulated, and another one."""

import json

import numpy as np
import pandas as pd
import pytest

from analysis.intervals import interval
from experiments import run
from experiments.__main__ import main
from experiments.composing import composed
from experiments.counterfactual import play
from experiments.counterfactual.model import off
from experiments.counterfactual.play import policy_of
from experiments.counterfactual.report import changes, paired
from experiments.settings import SettingError
from playground.trace import read

SMALL = ("model=tiny", "kv.blocks=60", "workload.requests=24", "workload.rate=2500", "workload.max_length=256")


def made(folder, *overrides, backend="sim"):
    stepped = ("backend.skip_ahead=false",) if backend == "sim" else ()
    given = [*SMALL, f"backend={backend}", *stepped, *overrides]
    if "workload=closed_loop" in given:
        given.remove("workload.rate=2500")
    config = composed(given)
    config.run_dir = str(folder)
    run.execute(config)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "run")


def told(capsys, *words):
    capsys.readouterr()
    code = main(["counterfactual", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def requests_of(folder):
    return {row["id"]: row for row in read(folder, "requests").to_pylist()}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel=pp2", "policy=token_throttling"),
        ("parallel=dp2", "policy/route=least_outstanding"),
        ("workload=closed_loop", "workload.concurrency=6"),
        ("policy/overlap=run_ahead",),
        ("parallel=dp_attention", "parallel.replicas=2"),
        ("kv.host_blocks=40", "policy.victims.how=swap"),
    ],
    ids=["one", "pipeline", "replicas", "closed", "ahead", "lockstep", "swap"],
)
def test_the_recorded_policy_goes_on_as_recorded(tmp_path, capsys, overrides):
    """On a simulated device the model has no error, wherever it branches."""
    folder = made(tmp_path / "run", *overrides)
    code, out, _ = told(capsys, folder, "--policy", "policy=static", "--from-step", 17, "-o", tmp_path / "out")
    assert code == 0
    found = json.loads((tmp_path / "out" / "counterfactual.json").read_text())
    assert [row["error"] for row in found["changes"]] == pytest.approx([0.0] * len(found["changes"]), abs=1e-9)
    assert any(abs(row["effect"]) > 0.01 for row in found["changes"])
    assert all(abs(row["mape"]) < 1e-6 for row in found["model"] if row["kind"] != "host")
    assert found["model"][0]["steps"] > 0  # in lockstep, those of one rank
    assert found["approximate"] == ("approximate: " in out) == ("workload=closed_loop" in overrides)
    simulated, real = requests_of(tmp_path / "out" / "simulated"), requests_of(folder)
    assert {id: row["finished"] for id, row in simulated.items()} == pytest.approx(
        {id: row["finished"] for id, row in real.items()}, abs=1e-9
    )


def test_what_it_leaves_are_run_folders_and_tables(recorded, tmp_path, capsys):
    out = tmp_path / "out"
    assert told(capsys, recorded, "--policy", "policy=orca", "--at", 0.01, "-o", out)[0] == 0
    for name in ("simulated", "other"):
        summary = json.loads((out / name / "summary.json").read_text())
        assert summary["completed"] == 24
    assert json.loads((out / "other" / "run.json").read_text())["policy"]["budget"]["_target_"].endswith("Orca")
    assert main(["parity", str(out / "simulated")]) == 0  # a run like any other
    found, rows = json.loads((out / "counterfactual.json").read_text()), pd.read_csv(out / "requests.csv")
    assert len(rows) == found["requests"] <= 24
    e2el = next(row for row in found["paired"] if row["metric"] == "e2el")
    assert e2el["mean"] == pytest.approx((rows["e2el_other"] - rows["e2el_same"]).mean())
    (step,) = (
        read(recorded, "steps", ["step", "planned"]).to_pandas().query(f"step == {found['from_step']}").itertuples()
    )
    assert step.planned >= 0.01


def test_a_request_that_had_ended_is_in_no_figure(recorded, tmp_path, capsys):
    steps = read(recorded, "steps").num_rows
    out = tmp_path / "out"
    assert told(capsys, recorded, "--policy", "policy=orca", "--from-step", steps - 20, "-o", out)[0] == 0
    found = json.loads((out / "counterfactual.json").read_text())
    ended = {id for id, row in requests_of(recorded).items() if row["finished"] <= found["instant"]}
    assert ended and found["requests"] == 24 - len(ended)
    assert not set(pd.read_csv(out / "requests.csv")["id"]) & ended


def frame(**columns):
    return pd.DataFrame(
        {f"{metric}_{side}": values for side, metrics in columns.items() for metric, values in metrics.items()}
    )


def test_effects_are_simulation_against_simulation_and_errors_against_the_recorded():
    """By hand: recorded 10, simulated 11, other 5.5 seconds."""
    sides = {"real": 10.0, "same": 11.0, "other": 5.5}
    rows = frame(**{side: {name: [value] * 3 for name in ("ttft", "tpot", "e2el")} for side, value in sides.items()})
    for change in changes(rows):
        assert (change.effect, change.error) == pytest.approx((-0.5, 0.1))
        assert change.verdict == "better"
    for pair in paired(rows):
        assert (pair.mean, pair.low, pair.high, pair.requests) == (-5.5, -5.5, -5.5, 3)


@pytest.mark.parametrize(
    ("same", "other", "verdict"),
    [(12, 13, "within the model's error"), (10.1, 12, "worse"), (0.05, 1.6, "within the model's error")],
)
def test_an_effect_smaller_than_the_error_is_called_so(same, other, verdict):
    rows = frame(real={"ttft": [10.0]}, same={"ttft": [same]}, other={"ttft": [other]})
    rows = rows.assign(
        **{f"{metric}_{side}": [np.nan] for metric in ("tpot", "e2el") for side in ("real", "same", "other")}
    )
    assert {change.verdict for change in changes(rows)} == {verdict}


class Twice:
    """A cost model that takes everything to last twice as long."""

    def __init__(self, cost):
        self._cost = cost

    def host(self, shape):
        return 2 * self._cost.host(shape)

    def stage(self, shape, stage):
        alone = self._cost.stage(shape, stage)
        return type(alone)(*(2 * seconds for seconds in alone))


def test_a_model_is_held_to_the_steps_from_the_branch_on(recorded, tmp_path):
    known = play.recorded(recorded)
    rows = {row["kind"]: row for row in off(recorded, Twice(known.cost), 40, tmp_path / "steps.parquet")}
    assert rows["all"]["steps"] == known.steps - 40 == sum(rows[kind]["steps"] for kind in ("decode", "mixed"))
    assert (rows["all"]["mape"], rows["all"]["total"]) == pytest.approx((1.0, 1.0))
    assert rows["host"]["predicted"] == pytest.approx(2 * rows["host"]["measured"])


def test_a_run_with_real_tensors(tmp_path, capsys):
    """No profile: it says what to do. With the model that was its clock, nothing is off."""
    folder = made(tmp_path / "run", "workload.requests=6", backend="costed")
    words = (folder, "--policy", "policy=static", "--from-step", 9, "-o", tmp_path / "out")
    code, _, err = told(capsys, *words)
    assert code == 2 and "no profile of this model" in err and "--cost roofline" in err
    assert told(capsys, *words, "--cost", "roofline")[0] == 0
    found = json.loads((tmp_path / "out" / "counterfactual.json").read_text())
    assert [row["error"] for row in found["changes"]] == pytest.approx([0.0] * len(found["changes"]), abs=1e-9)


def test_intervals_cover_the_mean_as_often_as_they_say():
    """Of 80 correlated samples with mean 0; blocks of neighbours, or far fewer would."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(80):
        noise = rng.normal(size=410)
        values = np.convolve(noise, np.ones(5) / 5, mode="valid")[:400]
        low, high = interval(values)
        covered += low <= 0 <= high
    assert 67 <= covered <= 80


def test_an_interval_needs_two_values():
    assert np.isnan(interval(np.array([1.0]))).all()
    assert interval(np.array([2.0, 2.0])) == (2.0, 2.0)


def test_which_policy_is_meant():
    config = composed(["policy=vllm_v1", "policy.budget.tokens=512", "policy/victims=largest"])
    changed = policy_of(config, ["policy.budget.tokens=64"])
    assert (changed.budget.tokens, changed.victims._target_) == (64, "policies.victims.Largest")
    part = policy_of(config, ["policy/order=sjf"])
    assert (part.order._target_, part.budget.tokens) == ("policies.order.Sjf", 512)
    assert policy_of(config, ["policy=orca"]).victims._target_ == "policies.victims.LastArrived"
    with pytest.raises(SettingError, match=r"kv\.blocks=3: only the policy changes"):
        policy_of(config, ["kv.blocks=3"])
    with pytest.raises(SettingError, match=r"policy\.nothing\.x=1: the run's policy has no nothing\.x"):
        policy_of(config, ["policy.nothing.x=1"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--policy", "policy=orca", "--from-step", "100000"], "--from-step 100000: the run has steps 0 to "),
        (["--policy", "policy=orca", "--at", "900"], "--at 900: no step was planned then or later"),
        (["--policy", "policy=orcas"], "policy=orcas: no such option"),
        (["--policy", "policy=orca", "--cost", "guessed"], "guessed"),
        (["--policy", "policy=orca", "more"], "more: "),
    ],
)
def test_mistakes_are_told_in_a_line(recorded, tmp_path, capsys, words, line):
    code, _, err = told(capsys, recorded, *words, "-o", tmp_path / "out")
    assert code == 2
    assert err.startswith("error: ") and line in err and err.count("\n") == 1


def test_what_cannot_go_on_says_why(recorded, tmp_path, capsys):
    merged = tmp_path / "merged"
    config = composed([*SMALL, "backend=sim"])
    config.run_dir = str(merged)
    run.execute(config)
    for folder, line in ((merged, "merged steps"), (tmp_path, "is not the folder of a run")):
        code, _, err = told(capsys, folder, "--policy", "policy=orca", "-o", tmp_path / "out")
        assert code == 2 and line in err
    linked = made(tmp_path / "linked", "parallel=pp2", "links=dgx_h200", "workload.requests=4")
    code, _, err = told(capsys, linked, "--policy", "policy=orca", "-o", tmp_path / "out")
    assert code == 2 and "those over links that are modelled" in err
    (tmp_path / "there").mkdir()
    code, _, err = told(capsys, recorded, "--policy", "policy=orca", "-o", tmp_path / "there")
    assert code == 2 and "is there already" in err
