"""The regime map: verdicts of figures that are known, a small map end to end, and the page in a browser."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.__main__ import main
from experiments.regimes.grid import HOLDS, MIXES, Cell, Grid, Place
from experiments.regimes.page import page, summary, tables
from experiments.regimes.verdicts import verdict
from experiments.settings import SettingError


def test_a_clear_winner():
    found = verdict({"a": [10, 11, 12], "b": [20, 22, 24], "c": [11, 12.1, 13.2]})
    assert found.best == "a" and found.winners == ("a",) and found.differs
    assert found.lead == pytest.approx(0.1) and found.spread == pytest.approx(1.0)


def test_what_chance_may_explain_is_no_difference():
    found = verdict({"a": [10, 20, 30], "b": [12, 17, 33], "c": [9, 24, 31]})
    assert not found.differs and set(found.winners) == {"a", "b", "c"} and found.lead == found.spread == 0


def test_what_does_not_matter_is_no_difference():
    """One per cent, in every seed alike: certain, and of no use."""
    found = verdict({"a": [100, 200, 300], "b": [101, 202, 303]})
    assert found.others["b"].low > 1 and not found.differs


def test_pairs_and_not_means_are_compared():
    """Seeds differ tenfold, policies by a tenth in each."""
    found = verdict({"a": [1, 10, 100], "b": [1.1, 11, 110]})
    assert found.winners == ("a",)


def test_more_policies_need_more_evidence():
    few = verdict({"a": [10, 10, 10], "b": [10.4, 11, 10.5]})
    many = verdict({"a": [10, 10, 10], "b": [10.4, 11, 10.5]} | {f"c{n}": [20, 20, 20] for n in range(8)})
    assert many.others["b"].low < few.others["b"].low


@given(st.lists(st.lists(st.floats(1, 100), min_size=3, max_size=3), min_size=2, max_size=5))
def test_the_best_is_among_the_winners_and_nobody_beats_it(rows):
    found = verdict({f"p{number}": row for number, row in enumerate(rows)})
    assert found.winners[0] == found.best
    assert all(one.ratio >= 1 - 1e-9 for one in found.others.values())
    assert found.lead <= found.spread


def test_places_are_what_they_say():
    place = Place("tight", 4, "both")
    assert "kv.blocks=1875" in place.overrides and "parallel.stages=4" in place.overrides
    assert not any(word.startswith("kv.") for word in Place("plenty", 1, "both").overrides)
    assert len(list(Grid().cells())) == 81
    for mix in MIXES.values():  # the longest request fits the smallest pool
        assert 4 * (mix.prompt + mix.output) <= min(held for held in HOLDS.values() if held) * (mix.prompt + mix.output)


@pytest.mark.parametrize("wrong", [{"loads": (0,)}, {"holds": ("much",)}, {"mixes": ("none",)}, {"depths": (0,)}])
def test_wrong_axes_are_named(wrong):
    with pytest.raises(SettingError, match=f"--{next(iter(wrong))}"):
        Grid(**wrong)


# --- a map

TINY = [
    "regimes", "--all", "model=llama-3.2-1b", "device=l20", "--loads", "0.5", "1.2", "--holds", "tight",
    "--depths", "1", "--mixes", "prompts", "--requests", "30", "--seeds", "2",
    "--each", "policy=static", "policy=chunked_prefill",
]  # fmt: skip


def test_a_map(tmp_path, capsys):
    assert main([*TINY, "-o", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "8 runs of 2 cells" in err and "mean latency: 2 cells" in out
    content = json.loads((tmp_path / "regimes.json").read_text())
    assert [cell["load"] for cell in content["cells"]] == [0.5, 1.2]
    assert content["cells"][1]["rate"] == pytest.approx(content["cells"][0]["rate"] * 2.4, rel=1e-3)
    assert all(len(values) == 2 for cell in content["cells"] for values in cell["figures"]["mean_e2el_ms"].values())
    assert (tmp_path / "regimes.html").read_text() == page(content)
    assert main([*TINY, "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out == out, "all of it is known"


def made_up():
    """A map in which a is best under load, and nothing differs without."""
    cells = []
    for load in (0.5, 1.1):
        figures = {"a": [100, 110, 120], "b": [150, 165, 180] if load > 1 else [100, 111, 119]}
        cell = {"holds": "tight", "depth": 2, "mix": "both", "load": load, "rate": 2 * load}
        cells.append(cell | {"figures": dict.fromkeys(("mean_e2el_ms", "p90_ttft_ms", "p90_tpot_ms"), figures)})
    policies = {"a": ["policy=a"], "b": ["policy=b<"]}
    return {"base": [], "requests": 10, "seeds": 3, "policies": policies, "cells": cells}


def test_what_a_page_says():
    content = made_up()
    assert summary(content, "mean_e2el_ms") == [
        "2 cells: in 1 nothing differs, in 1 some policy is worse than the best.",
        "Among the best where something differs: a 1 (1 alone), b 0 (0 alone).",
        "The most that a choice costs: b has 1.50 times the mean latency of a at load 1.1, tight, depth 2, both.",
    ]
    assert "| tight | 2 | – | a (50%) |" in tables(content, "mean_e2el_ms")
    whole = page(content)
    assert "nothing differs</td>" in whole and "policy=b&lt;" in whole and "http" not in whole


def test_a_cells_name():
    assert Cell(Place("tight", 2, "both"), 0.5).name == "load 0.5, tight, depth 2, both"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--seeds", "1"], "--seeds 1 must be at least 2"),
        (["--each", "policy=orca"], "--each: name two policies at least"),
        (["--holds", "much"], "--holds much: choose of"),
        (["--all", "kv.block=3"], "kv.block"),
        (["more"], "more: not known here"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, capsys, words, line):
    assert main(["regimes", "-o", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert line in err[-1] and err[-1].startswith("error: ")
