"""Cards: how claims are judged, on figures made up by hand; and the small version of each card, as CI runs it."""

import json
from math import nan

import pytest

from experiments.__main__ import main
from experiments.cards.card import (
    NOT,
    PARTLY,
    REPRODUCED,
    UNTESTABLE,
    Effect,
    Results,
    changes,
    little,
    untestable,
    verdict,
)
from experiments.cards.command import CARDS
from experiments.composing import composed
from experiments.trials import Trial


def made(**arms):
    """Arms' figures x by seed, under one load."""
    trials = {
        (arm, "load", seed): Trial((), {"x": value, "more": -value}, False)
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    }
    return Results(trials, range(len(next(iter(arms.values())))))


def test_ratios_are_paired_by_seed():
    """Seeds differ tenfold, and the ratio is a half in each: nothing is uncertain."""
    effect = made(a=[5, 50, 20], b=[10, 100, 40]).ratio("a", "b", "load", "x")
    assert (effect.mean, effect.low, effect.high) == (0.5, 0.5, 0.5)
    assert str(effect) == "-50.0% [-50.0%, -50.0%]"


@pytest.mark.parametrize(
    ("low", "high", "less", "said", "expected"),
    [
        (0.7, 0.9, True, (-0.4, -0.2), REPRODUCED),  # -30 % to -10 % meets -40 to -20
        (0.85, 0.95, True, (-0.4, -0.2), PARTLY),  # the right side, too little
        (0.3, 0.5, True, (-0.4, -0.2), PARTLY),  # too much
        (0.9, 1.05, True, (-0.4, -0.2), NOT),  # may be nothing
        (1.1, 1.3, True, (-0.4, -0.2), NOT),  # the other way
        (1.1, 1.3, False, None, REPRODUCED),
        (0.7, 0.9, False, None, NOT),
    ],
)
def test_verdicts(low, high, less, said, expected):
    assert verdict(Effect((low + high) / 2, low, high, ()), less, said) == expected
    assert verdict(Effect(0.7, nan, nan, (0.7,)), True, (-0.4, -0.2)) == REPRODUCED  # one seed: by its own


def test_the_baseline_at_its_best_setting_stands_beside():
    found = made(new=[6, 6], old=[10, 10], tuned=[7, 7], worse=[20, 20])
    finding = changes("new", "old", "load", "x", True, None, ("old", "tuned", "worse"))(found)
    assert finding.verdict == REPRODUCED
    assert finding.robust == "against tuned: -14.3% [-14.3%, -14.3%]"
    more = changes("new", "old", "load", "more", False, None, ("old", "tuned"))(found)
    assert more.robust.startswith("against tuned: ")


@pytest.mark.parametrize(("values", "expected"), [([100, 100.1], REPRODUCED), ([95, 107], PARTLY), ([110, 111], NOT)])
def test_little_difference(values, expected):
    assert little(("a",), "b", "load", "x", 0.02)(made(a=values, b=[100, 100])).verdict == expected


def test_what_is_missing_is_named():
    assert untestable("a network")(made(a=[1])).figure == "a network"
    assert untestable("a network")(made(a=[1])).verdict == UNTESTABLE


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("small", [False, True])
def test_every_run_of_a_card_composes(name, small):
    card = CARDS[name]
    runs = card.runs(small, [0])
    assert len(runs) == len(card.arms) * len({**card.loads, **(card.small_loads if small else {})})
    for (_, load, _), overrides in runs.items():
        if load == next(iter(card.loads)):
            composed(list(overrides))
    assert set(card.knob) <= set(card.arms)


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_the_small_version_runs(name, tmp_path, capsys):
    words = ["run", name, "--small", "--seeds", "1", "-o", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    card, kept = CARDS[name], json.loads((tmp_path / "card.json").read_text())
    assert [one["claim"] for one in kept["claims"]] == [claim.name for claim in card.claims]
    assert {one["verdict"] for one in kept["claims"]} <= {REPRODUCED, PARTLY, NOT, UNTESTABLE}
    for claim in card.claims:
        assert claim.name in out and claim.name in (tmp_path / "card.md").read_text()
    page = (tmp_path / "card.html").read_text()
    assert page.count("data:image/png;base64,") == len(card.loads) and "says nothing of the paper" in page
    assert main(words) == 0  # nothing is run again
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "gllm"], "gllm: no such card; there are: gllm_sc25"),
        (["run", "gllm_sc25", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["run", "gllm_sc25", "fast"], "fast: no KEY=VALUE"),
        (["run", "gllm_sc25", "--small", "--seeds", "1", "modell=tiny"], "modell"),
    ],
)
def test_mistakes_are_told_in_a_line(words, line, tmp_path, capsys):
    assert main([*words, "-o", str(tmp_path)] if words[1] == "gllm_sc25" else words) == 2
    err = capsys.readouterr().err.splitlines()
    assert line in err[-1] and err[-1].startswith("error: ")


def test_cards_are_listed(capsys):
    assert main(["cards"]) == 0
    assert "gllm_sc25" in capsys.readouterr().out
