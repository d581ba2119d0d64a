import json

import pandas as pd
import pytest

SMALL = ("workload.requests=12", "kv.blocks=600")
BUDGET = """class Breaks:
    def phases(self, draft):
        raise RuntimeError("no")
"""


DYING = """import os, signal
class Dies:
    def phases(self, draft):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch):
    monkeypatch.setattr("experiments.progress.PATIENCE", 1e9)


def test_a_sweep_ends_with_one_table(playground):
    outcome = playground("-m", *SMALL, "policy=chunked_prefill,token_throttling", "workload.rate=10,20,40")
    assert outcome.code == 0, outcome.err
    assert (outcome.last["jobs"], outcome.last["failed"]) == (6, 0)
    folder = outcome.folder / outcome.last["sweep_dir"]
    rows = json.loads((folder / "sweep.json").read_text())
    assert [(row["policy"], row["workload.rate"]) for row in rows] == [
        (policy, rate) for policy in ("chunked_prefill", "token_throttling") for rate in ("10", "20", "40")
    ]
    # What all jobs share distinguishes none.
    assert "kv.blocks" not in rows[0]
    table = pd.read_csv(folder / "sweep.csv")
    assert table["completed"].tolist() == [12] * 6
    assert outcome.out.count("token_throttling  ") == 3


def test_where_memory_is_short_points_wait_for_one_another(playground, monkeypatch):
    monkeypatch.setattr("experiments.memory.available", lambda: 0)
    outcome = playground("-m", *SMALL, "seed=1,2,3", "hydra.launcher.workers=3")
    assert (outcome.code, outcome.last["jobs"]) == (0, 3)
    assert outcome.err.startswith("sweep: memory holds 1 at a time for now") and len(outcome.err.splitlines()) == 1


def test_a_job_that_cannot_run_leaves_the_others_alone(playground):
    outcome = playground("-m", *SMALL, "workload.rate=20,-1")
    assert outcome.code == 2
    assert (outcome.last["jobs"], outcome.last["failed"]) == (1, 1)
    assert outcome.err.strip() == "failed: workload.rate=-1: workload.rate=-1 must be greater than 0"


def test_a_bug_in_one_job_leaves_the_others_alone(playground, tmp_path):
    (tmp_path / "sweep_budget.py").write_text(BUDGET)
    outcome = playground("-m", *SMALL, "policy.budget._target_=sweep_budget.Breaks,policies.budget.Orca")
    assert outcome.code == 1
    assert (outcome.last["jobs"], outcome.last["failed"]) == (1, 1)
    assert "sweep_budget.py:3 in phases: RuntimeError: no (see 0/error.txt)" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_an_option_that_no_yaml_lists_can_be_swept(playground):
    outcome = playground("-m", *SMALL, "workload.rate=20", "policy.budget.tokens=64,128")
    assert outcome.code == 0, outcome.err
    assert outcome.last["jobs"] == 2


def test_few_runs_stand_side_by_side(playground):
    outcome = playground("-m", *SMALL, "workload.rate=20", "policy=orca,vllm_v1")
    header = next(line for line in outcome.out.splitlines() if "vllm_v1" in line and "orca" in line and "#" not in line)
    assert header.split() == ["policy", "orca", "vllm_v1"]


def test_a_point_that_does_not_compose_leaves_the_others_alone(playground):
    """Nor where the policy that is the default has it, or has not, though its YAML does not list it."""
    outcome = playground(
        "-m", *SMALL, "workload.rate=20", "policy=static,orca,chunked_prefill", "policy.budget.tokens=64"
    )
    assert outcome.code == 2
    assert (outcome.last["jobs"], outcome.last["failed"]) == (1, 2)
    assert outcome.err == (
        "failed: policy=static; policy=orca: policy.budget.tokens=64: unknown option; choose one of: batch\n"
    )
    assert playground("-m", *SMALL, "policy=static,orca", "policy.budget.batch=4").last["jobs"] == 2


def test_an_option_that_a_group_lacks(playground):
    outcome = playground("-m", *SMALL, "policy=orca,foo")
    assert (outcome.code, outcome.last["jobs"], outcome.last["failed"]) == (2, 1, 1)
    assert outcome.err.startswith("failed: policy=foo: policy=foo: no such option; choose one of: andes")


def test_what_stops_several_is_told_once(playground):
    outcome = playground("-m", *SMALL, "workload.rate=20", "seed=1,2,3,4,5,6", "workload.requets=3")
    assert (outcome.code, outcome.last["failed"]) == (2, 6)
    assert outcome.err == (
        "failed: seed=1; seed=2; seed=3; seed=4 and 2 more: "
        "workload.requets=3: unknown option; did you mean requests?\n"
    )


def test_a_folder_of_its_own(playground):
    outcome = playground("-m", *SMALL, "workload.rate=20", "seed=1,2", "run_dir=mine")
    assert outcome.last["sweep_dir"] == "mine"
    assert {path.name for path in (outcome.folder / "mine").iterdir()} >= {"0", "1", "sweep.csv", "sweep.json"}
    rows = json.loads((outcome.folder / "mine" / "sweep.json").read_text())
    assert [(row["job"], row["seed"]) for row in rows] == [("0", "1"), ("1", "2")]


def test_what_a_point_says_comes_with_its_name(playground):
    outcome = playground("-m", "workload.requests=3", "seed=1,2", "kv.blocks=100000000", "hydra.launcher.workers=1")
    line = "note: kv.blocks=100000000 is more than fits: the pool has 28275 blocks"
    assert outcome.err == f"seed=1: {line}\nseed=2: {line}\n"


def test_a_point_whose_process_dies_is_told(playground, tmp_path):
    (tmp_path / "dying_budget.py").write_text(DYING)
    outcome = playground("-m", *SMALL, "policy.budget._target_=dying_budget.Dies,policies.budget.Orca")
    assert (outcome.code, outcome.last["jobs"], outcome.last["failed"]) == (2, 1, 1)
    assert "failed: policy.budget._target_=dying_budget.Dies: its process was killed by SIGKILL" in outcome.err


@pytest.mark.parametrize("how", ["hydra.launcher.workers=1", "hydra.launcher.workers=3", "hydra.launcher.start=spawn"])
def test_results_do_not_depend_on_how_points_run(playground, how):
    given = ("-m", *SMALL, "policy=orca,token_throttling", "workload.rate=20")
    one = playground(*given, "run_dir=one", "hydra/launcher=basic")
    other = playground(*given, "run_dir=other", how)
    assert one.code == other.code == 0
    for path in [path for path in (one.folder / "one").rglob("*") if path.suffix in (".parquet", ".csv")]:
        assert path.read_bytes() == (one.folder / "other" / path.relative_to(one.folder / "one")).read_bytes(), path


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("workers=0", "must be at least 1 (null: one a core)"),
        ("start=thread", "must be fork or spawn (null: what is safe here)"),
    ],
)  # fmt: skip
def test_options_of_the_launcher_are_checked(playground, option, error):
    outcome = playground("-m", *SMALL, "seed=1,2", f"hydra.launcher.{option}")
    assert (outcome.code, outcome.err) == (2, f"error: hydra.launcher.{option} {error}\n")
