"""Evaluations: a good policy has a score, a bad one has none and says why, and no policy takes anybody with it."""

import json

import pytest

from experiments.__main__ import main
from experiments.evaluate import contract, evaluate, suite
from experiments.evaluate.contract import Evaluation
from experiments.evaluate.suite import COMMON, HELD_OUT, SPLITS, TRAIN
from experiments.settings import SettingError

GOOD = """
from policies.composed import Composed
from policies.budget import ChunkedPrefill

def make(tokens: int = 512):
    return Composed(budget=ChunkedPrefill(tokens=tokens))
"""


def written(tmp_path, text, name="mine.py"):
    file = tmp_path / name
    file.write_text(text)
    return file


def test_splits_share_no_case():
    """By recording and hour, or by seeds: nothing that a search has seen is held out."""
    train, held_out = ({one.name for one in SPLITS[split]} for split in (TRAIN, HELD_OUT))
    assert not train & held_out
    seen = {run for case in SPLITS[TRAIN] for run in case.runs(("policy=orca",), 50).values()}
    unseen = {run for case in SPLITS[HELD_OUT] for run in case.runs(("policy=orca",), 50).values()}
    assert not seen & unseen
    assert not {one.first for one in SPLITS[TRAIN]} & {one.first for one in SPLITS[HELD_OUT]}


def test_policies_are_not_told_the_future():
    """`max_tokens` is the true output unless a workload says otherwise."""
    assert "workload.max_tokens=1024" in COMMON


@pytest.mark.slow
def test_a_policy_of_a_file_has_a_score(tmp_path, capsys):
    file = written(tmp_path, GOOD)
    words = ["evaluate", f"{file}:make", "--seeds", "1", "-o", str(tmp_path / "looks")]
    code = main(words)
    out = capsys.readouterr().out.strip().splitlines()
    last = json.loads(out[-1])
    assert code == 0, last
    assert last["score"] > 0 and len(last["cases"]) == len(SPLITS[TRAIN]) and len(last["digest"]) == 64
    assert {row["case"] for row in last["cases"]} == {case.name for case in SPLITS[TRAIN]}
    assert not (tmp_path / "looks").exists(), "training looks are not counted"


def no_score(tmp_path, text, name="mine.py", call="make", **more):
    found = evaluate(f"{written(tmp_path, text, name)}:{call}", folder=tmp_path / "looks", **more)
    assert isinstance(found, Evaluation) and found.score is None and not found.cases
    return found.why


def test_a_policy_that_hangs_scores_nothing(tmp_path):
    assert no_score(tmp_path, "while True: pass", timeout=8) == "it took more than 8 s"


def test_a_policy_that_exits_scores_nothing(tmp_path):
    why = no_score(tmp_path, "import os\nprint('{\"score\": 9}', flush=True)\nos._exit(3)")
    assert why.startswith("its process ended with code 3")


STUCK = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Stuck:
    def fill(self, draft): pass
    def place(self, request, view): return 0
    def run_ahead(self, spec): return 1
    def steady(self, draft): return 0
"""


def test_a_policy_that_fails_the_kit_scores_nothing(tmp_path):
    why = no_score(tmp_path, STUCK, call="Stuck")
    assert why.startswith("the conformance kit: stall fails: ")


def test_a_policy_that_knows_the_future_scores_nothing(tmp_path):
    """True lengths are what nobody has in service."""
    found = evaluate("policy=mc_sf", "policy.order.predictor._target_=policies.predictors.OracleLength")
    assert found.score is None and "true output lengths" in found.why


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.py:make"], "nowhere.py:make: there is no file nowhere.py"),
        (["mine"], "mine: name a class or function"),
        (["policy=orca", "kv.blocks=3"], "kv.blocks=3: only a policy is evaluated"),
        (["policy=orca", "--metric", "speed"], "--metric speed must be one of"),
        (["policy=orca", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["policy=orca", "--timeout", "0"], "--timeout 0 must be more than 0 seconds"),
        (["policy=orcas"], "policy=orcas: no such option"),
        (["policy=orca", "--excuse", "nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, words, line):
    assert main(["evaluate", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert line in err[-1] and err[-1].startswith("error: ")


def test_a_file_with_a_taken_name_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"json\.py: there is another module of that name"):
        evaluate(f"{written(tmp_path, GOOD, 'json.py')}:make")


def test_looks_at_held_out_cases_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "_ask", lambda asked, timeout: {"score": 1.5, "interval": [1, 2], "cases": ()})
    for number in (1, 2):
        found = evaluate("policy=orca", split=HELD_OUT, folder=tmp_path)
        assert found.score == 1.5 and contract.looks(tmp_path) == number
    evaluate("policy=orca", folder=tmp_path)
    assert contract.looks(tmp_path) == 2
    assert suite.BASELINE == ("policy=vllm_v1",)
