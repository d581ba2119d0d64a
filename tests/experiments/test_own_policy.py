"""A policy, or one choice of it, from a user's own package, with no change to this repository."""

import sys

import pytest

SMALL = ("workload.requests=12", "workload.rate=20", "kv.blocks=600")

PACKAGE = '''
from dataclasses import dataclass

from policies.composed import Admissions, Decodes


@dataclass(frozen=True)
class OneAtATime:
    """Serve the oldest request alone."""

    patience: int = 1

    def fill(self, draft):
        for sequence in [*draft.running, *draft.waiting][: self.patience]:
            draft.take(sequence, draft.spec.max_tokens)

    def place(self, request, view):
        return 0

    def run_ahead(self, spec):
        return 1

    def steady(self, draft):
        return 0


@dataclass(frozen=True)
class MyBudget:
    rows: int = 2

    def phases(self, draft):
        yield Decodes()
        yield Admissions(tokens=256, rows=self.rows)
'''


@pytest.fixture
def mypkg(tmp_path, monkeypatch):
    package = tmp_path / "site" / "mypkg"
    (package / "conf" / "policy").mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "conf" / "__init__.py").touch()
    (package / "conf" / "policy" / "mine.yaml").write_text("_target_: mypkg.OneAtATime\npatience: 2\n")
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "mypkg"]:
        del sys.modules[name]


def config(outcome):
    return (outcome.run_dir / "config.yaml").read_text()


def test_a_whole_policy_by_its_name(playground, mypkg):
    outcome = playground(*SMALL, "policy._target_=mypkg.OneAtATime")
    assert outcome.code == 0, outcome.err
    assert outcome.last["completed"] == 12
    # The choices of the policy that it replaces are gone.
    assert "policies." not in config(outcome)


def test_with_options_of_its_own(playground, mypkg):
    outcome = playground(*SMALL, "policy._target_=mypkg.OneAtATime", "policy.patience=3")
    assert outcome.code == 0, outcome.err
    assert "patience: 3" in config(outcome)


def test_its_options_are_checked(playground, mypkg):
    outcome = playground(*SMALL, "policy._target_=mypkg.OneAtATime", "+policy.patients=3")
    assert outcome.code == 2
    assert outcome.err == "error: policy.patients: OneAtATime has no such option; did you mean patience?\n"


def test_its_values_are_checked_where_its_annotations_say_what_they_are(playground, mypkg):
    mypkg.joinpath("__init__.py").write_text(
        PACKAGE.replace(
            "patience: int = 1", "patience: int = 1\n    until: float = float('inf')\n    what: Any = None"
        ).replace("from dataclasses", "from typing import Any\nfrom dataclasses")
    )
    mine = (*SMALL, "policy._target_=mypkg.OneAtATime")
    wrong = playground(*mine, "policy.patience=soon")
    assert (wrong.code, wrong.err) == (2, "error: policy.patience=soon must be a whole number\n")
    right = playground(*mine, "policy.until=inf", "+policy.what._target_=builtins.dict")
    assert right.code == 0, right.err


def test_one_choice_of_a_policy(playground, mypkg):
    outcome = playground(*SMALL, "policy=token_throttling", "policy.budget._target_=mypkg.MyBudget")
    assert outcome.code == 0, outcome.err
    assert outcome.last["completed"] == 12


@pytest.mark.parametrize(
    "arguments, name, folder",
    [
        (["policy._target_=mypkg.OneAtATime"], "OneAtATime (sim)", "_sim_OneAtATime"),
        (
            ["policy=token_throttling", "policy.budget._target_=mypkg.MyBudget", "policy/victims=largest"],
            "token_throttling(budget=MyBudget, victims=largest) (sim)",
            "_sim_token_throttling-budget-MyBudget-victims-largest",
        ),
    ],
)
def test_it_runs_under_its_own_name(playground, mypkg, arguments, name, folder):
    outcome = playground(*SMALL, *arguments)
    assert name in outcome.out
    assert outcome.run_dir.name.endswith(folder)


def test_from_a_folder_of_yaml(playground, mypkg):
    outcome = playground("--config-dir", str(mypkg / "conf"), *SMALL, "policy=mine")
    assert outcome.code == 0, outcome.err
    assert "patience: 2" in config(outcome)


def test_from_an_installed_package(playground, mypkg):
    """Its entry point alone makes `policy=mine` an option, beside ours."""
    metadata = mypkg.parent / "mypkg-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mypkg\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[playground.configs]\nmypkg = mypkg.conf\n")
    outcome = playground(*SMALL, "policy=mine")
    assert outcome.code == 0, outcome.err
    assert "mypkg.OneAtATime" in config(outcome)
    assert "mine" in playground("--help").out


def test_a_policy_that_does_nothing_is_an_error_and_not_a_hang(playground, mypkg):
    (mypkg / "__init__.py").write_text(PACKAGE.replace("draft.take(sequence, draft.spec.max_tokens)", "pass"))
    outcome = playground(*SMALL, "policy._target_=mypkg.OneAtATime")
    assert outcome.code == 2
    assert "OneAtATime placed nothing" in outcome.err


@pytest.mark.parametrize(
    "line, instead, where, said",
    [
        ("draft.take(sequence", "raise KeyError(7", "in fill", "KeyError: (7,"),
        ("for sequence in [*draft.running, *draft.waiting]", "None.x\n        for sequence in []", "in fill", "'x'"),
    ],
)
def test_an_error_in_it_shows_its_own_frames_only(playground, mypkg, line, instead, where, said):
    (mypkg / "__init__.py").write_text(PACKAGE.replace(line, instead))
    outcome = playground(*SMALL, "policy._target_=mypkg.OneAtATime")
    assert outcome.code == 1
    first, *frames = outcome.err.splitlines()
    assert first.startswith("error: mypkg/__init__.py:")
    assert f" {where}: " in first
    assert said in first
    assert len(frames) <= 4


@pytest.mark.parametrize(
    "line, instead, parallel, said",
    [
        ("return 0\n\n    def run_ahead", "return 7\n\n    def run_ahead", "dp2", "place answered rank 7"),
        ("return 0\n\n\n", "return 'x'\n\n\n", "single", "TypeError"),
        ("draft.spec.max_tokens)", "draft.spec.max_tokens, lane=3)", "single", "Error"),
    ],
)
def test_a_wrong_answer_of_it_is_told_in_a_few_lines(playground, mypkg, line, instead, parallel, said):
    (mypkg / "__init__.py").write_text(PACKAGE.replace(line, instead, 1))
    outcome = playground(*SMALL, "policy._target_=mypkg.OneAtATime", f"parallel={parallel}")
    assert outcome.code == 1
    assert said in outcome.err.splitlines()[0]
    assert "with a policy of your own, mypkg.OneAtATime" in outcome.err.splitlines()[0]
    assert len(outcome.err.splitlines()) <= 5


def test_a_module_in_the_current_folder_is_found(playground, tmp_path):
    (tmp_path / "here_policy.py").write_text(PACKAGE)
    outcome = playground(*SMALL, "policy._target_=here_policy.OneAtATime")
    assert outcome.code == 0, outcome.err
