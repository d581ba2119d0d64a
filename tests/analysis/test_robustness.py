"""Whether a conclusion holds: by hand-made scores."""

import pytest

from analysis.robustness import Trial, findings, kendall, ranking, ranking_survives, regret, winner_survives

BASE = {"a": 1.0, "b": 2.0, "c": 3.0}


def test_ranking_is_best_first_with_ties_by_name():
    assert ranking({"b": 1.0, "a": 1.0, "c": 0.5}) == ("c", "a", "b")


def test_kendall_counts_pairs_that_the_baseline_tells_apart():
    assert kendall(BASE, {"a": 1, "b": 2, "c": 9}) == 1
    assert kendall(BASE, {"a": 3, "b": 2, "c": 1}) == -1
    assert kendall(BASE, {"a": 1, "b": 3, "c": 2}) == pytest.approx(1 / 3)
    assert kendall({"a": 1.0, "b": 1.001}, {"a": 2, "b": 1}) == 1  # a tie says nothing
    assert kendall({"a": 1, "b": 2}, {"a": 1, "b": 1}) == 0


def test_a_tie_does_not_dethrone_the_winner():
    assert winner_survives(BASE, {"a": 1.005, "b": 1.0, "c": 3.0})
    assert not winner_survives(BASE, {"a": 1.02, "b": 1.0, "c": 3.0})


def test_the_ranking_may_break_where_the_winner_stands():
    swapped = {"a": 1.0, "b": 3.0, "c": 2.0}
    assert winner_survives(BASE, swapped) and not ranking_survives(BASE, swapped)


def test_regret_is_what_the_old_winner_loses():
    assert regret(BASE, {"a": 1.5, "b": 1.0, "c": 2.0}) == pytest.approx(0.5)
    assert regret(BASE, BASE) == 0


def test_a_conclusion_holds_up_to_the_size_below_the_first_that_breaks_it():
    """Holding again at a larger error, or with the other sign, does not count."""
    wrong = {"a": 2.0, "b": 1.0, "c": 3.0}
    trials = [
        Trial("steps", 0.4, "+40 %", BASE),
        Trial("steps", 0.2, "+20 %", BASE),
        Trial("steps", 0.2, "-20 %", wrong),
        Trial("steps", 0.1, "+10 %", BASE),
        Trial("age", 2.0, "2 s", BASE),
    ]
    steps, age = findings(BASE, trials)
    assert (steps.holds_up_to, steps.broken_by) == (0.1, "-20 %")
    assert steps.regret == 1.0 and steps.tau == pytest.approx(1 / 3)
    assert (age.holds_up_to, age.broken_by) == (2.0, None)
    assert findings(BASE, [Trial("steps", 0.1, "x", wrong)])[0].holds_up_to == 0
