"""`sweep=optuna`: who goes on in successive halving, what confirms, and that a stopped search goes on as it began."""

import json
import math

import pytest

from experiments.settings import SettingError
from experiments.trials import Trial, Trials
from experiments.tuning.halving import Candidate, Halving, Judge, Rungs
from experiments.tuning.space import Parameter, parameters
from experiments.tuning.study import Confirmed, Tuning, _over

SPACE = (Parameter("x", 0, 1000),)


class Known(Trials):
    """Figures from a formula, instead of runs."""

    def __init__(self, tmp_path, formula):
        super().__init__(tmp_path, 1)
        self.formula, self.asked = formula, []

    def run(self, wanted, progress=lambda done, total: None):
        self.asked += wanted
        return [self.trial(one) for one in wanted]

    def trial(self, overrides):
        given = dict(word.split("=") for word in overrides)
        return Trial(overrides, *self.formula(float(given["x"]), int(given["workload.requests"])))


def search(tmp_path, formula, more=False, **options):
    judge = Judge((), "mean_e2el_ms", more, (0, 1), Known(tmp_path, formula))
    given = {"count": 12, "batch": 6} | options
    return Halving(SPACE, Rungs(90, 3, 3), judge, **given)


def square(x, requests):
    return {"mean_e2el_ms": 1 + (x - 700) ** 2}, False


def test_rungs_by_hand():
    assert Rungs(270, 3, 3).requests == [30, 90, 270]
    assert [Rungs(270, 3, 3).kept(count) for count in (9, 8, 2, 1)] == [3, 3, 1, 1]


def test_of_each_rung_the_best_third_goes_on(tmp_path):
    found = search(tmp_path, square).run()
    assert len(found) == 12
    assert sorted(one.reached for one in found) == [0] * 8 + [1] * 2 + [2] * 2
    for reached in (1, 2):  # whoever goes on is better than who does not, within a batch of six
        assert min(one.value for one in found if one.reached >= reached) == min(one.value for one in found)
    assert [one.value for one in found[:2]] == sorted(one.value for one in found[:2])
    assert abs(found[0].values["x"] - 700) < 250


def test_runs_are_shorter_at_the_bottom(tmp_path):
    halving = search(tmp_path, square, count=6)
    halving.run()
    sizes = [next(word for word in run if word.startswith("workload.requests=")) for run in halving.judge.trials.asked]
    assert [sizes.count(f"workload.requests={count}") for count in (10, 30, 90)] == [12, 4, 2]


def test_more_may_be_better(tmp_path):
    most = search(tmp_path, lambda x, n: ({"mean_e2el_ms": x}, False), more=True).run()[0]
    least = search(tmp_path, lambda x, n: ({"mean_e2el_ms": x}, False)).run()[0]
    assert most.values["x"] > 700 and least.values["x"] < 300


def test_who_cannot_serve_is_last_and_says_why(tmp_path):
    def half(x, requests):
        return ({}, False, "no room") if x < 500 else ({"mean_e2el_ms": x}, False)

    found = search(tmp_path, half).run()
    dead = [one for one in found if not math.isfinite(one.value)]
    assert dead and all(one.why == "no room" for one in dead) and found[-len(dead) :] == dead
    assert found[0].values["x"] >= 500


def test_the_same_search_asks_the_same(tmp_path):
    one, other = search(tmp_path, square), search(tmp_path, square)
    assert one.run() == other.run() and one.judge.trials.asked == other.judge.trials.asked
    assert search(tmp_path, square, seed=1).run() != one.best()


def test_what_is_set_now_is_the_first_candidate(tmp_path):
    halving = search(tmp_path, square, first={"x": 321})
    halving.run()
    assert halving.candidates[0].values == {"x": 321}


def test_ratios_by_hand():
    ratio, low, high = _over([2, 4], [1, 2])
    assert (ratio, low, high) == pytest.approx((2, 2, 2))
    assert math.isnan(_over([0, 1], [1, 1])[0])
    assert Confirmed({}, "", 0.9, 0.8, 0.95).better(False) and not Confirmed({}, "", 0.9, 0.8, 1.1).better(False)
    assert Confirmed({}, "", 1.2, 1.1, 1.3).better(True) and not Confirmed({}, "", 0.9, 0.8, 0.95).better(True)


def test_of_candidates_as_far_the_better_is_first(tmp_path):
    halving = search(tmp_path, square)
    halving.candidates = [Candidate({"x": 1}, 0, 1.0), Candidate({"x": 2}, 2, 9.0), Candidate({"x": 3}, 2, 8.0)]
    assert [one.values["x"] for one in halving.best()] == [3, 2, 1]


@pytest.mark.parametrize(
    ("space", "line"),
    [
        ({}, "study.space={} is empty"),
        ({"a": 3}, "study.space.a: 3 is not known"),
        ({"a": {"lo": 3}}, "study.space.a: lo is not known"),
        ({"a": {"low": 3}}, "needs low < high"),
        ({"a": {"low": 3, "high": 3}}, "needs low < high"),
        ({"a": {"low": 0, "high": 3, "log": True}}, "log needs low=0 above 0"),
        ({"a": {"choices": [1]}}, "must be a list of two or more"),
    ],
)
def test_wrong_spaces_are_told(space, line):
    with pytest.raises(SettingError, match=line.replace("{", r"\{")):
        parameters(space)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metric": "speed"}, "study.metric=speed must be one of"),
        ({"trials": 1}, "study.trials=1 must be at least 2"),
        ({"workers": 0}, "study.workers=0 must be at least 1"),
    ],
)
def test_wrong_options_are_told(options, line):
    with pytest.raises(ValueError, match=line):
        Tuning(**options)


# --- the command

TINY = (
    "sweep=optuna", "model=tiny", "kv.blocks=60", "workload.rate=2000", "workload.max_length=128", "study.trials=4",
    "study.batch=4", "study.requests=40", "study.rungs=2", "study.seeds=1", "study.survivors=1", "study.fresh=2",
)  # fmt: skip


def test_a_search_and_its_confirmation(playground, tmp_path):
    """A budget of some tokens is found for prefills that come at once; the engine has the last word."""
    words = (*TINY, "policy.budget.tokens=16", f"run_dir={tmp_path / 'tuned'}",
             "study.space={policy.budget.tokens: {low: 8, high: 512, log: true}}",
             "study.engine={backend: engine}", "study.engine_requests=3")  # fmt: skip
    done = playground(*words)
    told = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert told["now"] == {"policy.budget.tokens": 16}
    assert told["best"]["policy.budget.tokens"] > 16
    assert [one["where"] for one in told["confirmed"]] == ["simulated", "on the engine"]
    assert told["confirmed"][0]["high"] < 1
    assert "over what is set now (policy.budget.tokens=16)" in done.out
    runs = (tmp_path / "tuned" / "trials.jsonl").read_text()
    playground(*words)
    assert (tmp_path / "tuned" / "trials.jsonl").read_text() == runs, "the same command goes on: nothing is run again"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("workload.requests=9",), "workload.requests=9: a search has its own: study.requests"),
        (("seed=9",), "seed=9: a search has its own: study.seeds"),
        (("study.requests=20", "study.rungs=3"), "study.requests=20 leaves 2 for the lowest of 3 rungs"),
        (("policy=orca",), "the policy has no policy.budget.tokens"),
        (("study.space={policy.budget.tokns: {low: 1, high: 2}}",), "no candidate could serve"),
        (("study.metric=request_goodput",), "request_goodput has no value: it needs slo="),
        (("study.speed=3",), "study.speed"),
    ],
)
def test_mistakes_are_told_in_a_line(playground, words, line):
    done = playground(*TINY, *words)
    assert done.code == 2
    assert line in done.err.splitlines()[-1] and done.err.splitlines()[-1].startswith("error: ")
