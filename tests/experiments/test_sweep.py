import json

import pandas as pd

SMALL = ("workload.requests=12", "kv.blocks=600")
BUDGET = """class Breaks:
    def phases(self, draft):
        raise RuntimeError("no")
"""


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
