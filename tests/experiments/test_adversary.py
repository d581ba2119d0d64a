"""Adversarial search: points stay within their ranges, the search finds a loss that is there, and its file replays."""

import json
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.__main__ import main
from experiments.adversary.search import Duel, Judged, Search, judge
from experiments.adversary.space import SPACE, overrides, ranged, values
from experiments.settings import SettingError
from experiments.trials import Trial
from playground.workload import saved

points = st.tuples(*[st.floats(0, 1)] * len(SPACE))


@given(points)
def test_every_point_is_within_the_ranges(point):
    for dimension, value in zip(SPACE, values(SPACE, point).values(), strict=True):
        assert dimension.low <= value <= dimension.high
    assert len(overrides(SPACE, point, 10)) == len(set(overrides(SPACE, point, 10)))


def test_ranges_are_as_given():
    space = ranged(["rate=2", "prompt.mean=100:200"])
    found = values(space, (0.3,) * len(space))
    assert found["rate"] == 2 and 100 <= found["prompt.mean"] <= 200
    assert found["output.mean"] == values(SPACE, (0.3,) * len(SPACE))["output.mean"]


@pytest.mark.parametrize("word", ["speed=1", "rate", "rate=x", "rate=4:1", "rate=0:1", "rate=1:inf"])
def test_wrong_ranges_are_named(word):
    with pytest.raises(SettingError, match=f"--range {word}: "):
        ranged([word])


class Known:
    """Trials whose figures are a formula: A loses most at one point, and B drowns above a rate."""

    def __init__(self, best, drowns=1e9):
        self.best, self.drowns, self.runs = best, drowns, 0

    def __len__(self):
        return self.runs

    def run(self, wanted):
        self.runs += len(wanted)
        return [self.trial(one) for one in wanted]

    def trial(self, words):
        given = dict(word.split("=") for word in words)
        logs = [log(float(given[one.option])) for one in SPACE]
        ends = [(log(one.low), log(one.high)) for one in SPACE]
        at = [(value - low) / (high - low) for value, (low, high) in zip(logs, ends, strict=True)]
        far = sum((one - two) ** 2 for one, two in zip(at, self.best, strict=True))
        grows = float(given["workload.rate"]) > self.drowns
        value = 100 * exp(-3 * far) + 1 if given["policy"] == "a" else 1.0
        return Trial(tuple(words), {"mean_e2el_ms": value, "rejected": 0}, grows)


DUEL = Duel(("policy=a",), ("policy=b",), (), "mean_e2el_ms", 10)


@pytest.mark.parametrize("best", [(0.2, 0.8, 0.5, 0.1, 0.9, 0.4), (0.9, 0.1, 0.1, 0.7, 0.3, 0.6)])
def test_the_search_comes_near_a_loss_that_is_there(best):
    found = Search(DUEL, SPACE, Known(best), 16, 12, (0,)).run()
    assert found.ratio > 75, "of 101 at the best point; a point drawn by chance has 17 on average"


def test_a_search_is_the_same_again():
    first, again = (Search(DUEL, SPACE, Known((0.5,) * 6), 8, 3, (0,)) for _ in range(2))
    assert first.run() == again.run() and first.judged == again.judged


def test_what_b_cannot_serve_does_not_count():
    found = Search(DUEL, SPACE, Known((1.0, 0.5, 0.5, 0.5, 0.5, 0.5), drowns=5), 16, 8, (0,)).run()
    assert values(SPACE, found.point)["rate"] <= 5
    with pytest.raises(SettingError, match="no workload of the ranges"):
        Search(DUEL, SPACE, Known((0.5,) * 6, drowns=0.1), 8, 2, (0,)).run()


def test_who_cannot_serve_is_out_of_question():
    class Failing(Known):
        def trial(self, words):
            trial = super().trial(words)
            return Trial(trial.overrides, trial.summary | {"rejected": 3}, False)

    (found,) = judge(DUEL, SPACE, [(0.5,) * 6], (0,), Failing((0.5,) * 6))
    assert found.why == "3 requests were turned away"
    assert found.loss == float("-inf")


def test_ratio_and_interval_by_hand():
    found = Judged((), (log(2), log(8)))
    assert found.ratio == pytest.approx(4)
    low, high = found.interval
    assert low < 4 < high


# --- the command

SMALL = [
    "--all", "model=tiny", "kv.blocks=400", "limits.max_tokens=256", "--range", "rate=200:2000", "prompt.mean=64:512",
    "output.mean=8:32", "--size", "4", "--generations", "2", "--requests", "20", "--seeds", "1", "--fresh", "2",
]  # fmt: skip


def test_the_command(tmp_path, capsys):
    words = ["adversary", "--a", "policy=static", "--b", "policy=chunked_prefill", *SMALL, "-o", str(tmp_path)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "generation 2 of 2" in err and "fresh ones" in out and "back in the middle" in out
    kept = json.loads((tmp_path / "adversary.json").read_text())
    assert len(kept["workloads"]) == 8
    assert len(list(saved.read(tmp_path / "workload.jsonl"))) == 20
    (first_fresh, *_) = kept["confirmed"]["logs"]
    assert kept["replayed"] == pytest.approx(exp(first_fresh)), "the file is the workload of the first fresh seed"
    assert main(words) == 0
    assert capsys.readouterr().out == out, "all of it is known"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--size", "2"], "--size 2 must be at least 4"),
        (["--metric", "speed"], "--metric speed must be one of"),
        (["--range", "speed=1"], "--range speed=1: no such parameter"),
        (["--all", "workload=poisson"], "--all workload=poisson: the workload is what is searched"),
        (["--all", "kv.block=3"], "kv.block"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, capsys, words, line):
    assert main(["adversary", "--a", "policy=orca", "--b", "policy=static", "-o", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert line in err[-1] and err[-1].startswith("error: ")
