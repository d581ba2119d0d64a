"""Tokens of many ranks are those of one, whatever the layout, the policy, and what runs short."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.parallel.covering import covering
from tests.engine.parallel.layouts import (
    AHEAD,
    LAYOUTS,
    POLICIES,
    RESERVING,
    Case,
    Crew,
    alone,
    cases,
    crew,
    difference,
    models,
    row,
)

CREWS = [(layout, model) for layout in LAYOUTS for model in models(layout)]
ALL = [(*chosen, case) for chosen in CREWS for name in POLICIES for case in cases(name)]
ROWS = [row(*chosen) for chosen in ALL]
APART = {frozenset({"layout", column}) for column in ROWS[0]} | {frozenset({"model", "policy"})}
"""A layout need only occur. Models and policies know nothing of each other: 56 pairs, and 24 without them."""
PAIRWISE = sorted(ALL[place] for place in covering(ROWS, APART))

Get = Callable[[str, str], Crew]


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """The workers of a layout and a model; those of the test before, if they are the same."""
    held: dict[tuple[str, str], Crew] = {}

    def given(layout: str, model: str) -> Crew:
        if (layout, model) not in held:
            dismiss()
            held[layout, model] = crew(layout, model, tmp_path_factory.mktemp("crew"))
        return held[layout, model]

    def dismiss() -> None:
        while held:
            held.popitem()[1].close()

    torch.set_num_threads(1)
    yield given
    dismiss()


@pytest.mark.parametrize(("layout", "model", "case"), PAIRWISE, ids=str)
def test_every_two_choices(layout: str, model: str, case: Case, get: Get) -> None:
    assert not difference(model, case, get(layout, model).serve(case))


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("kv", ["tight", "swap"])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in RESERVING])
def test_one_rank_that_runs_short(policy: str, kv: str, ahead: int) -> None:
    """Or the pools would not be tight, and no case would preempt."""
    case = Case(policy, kv, ahead=ahead)
    served = alone("llama").serve(case)
    assert served.preempted
    assert not difference("llama", case, served)


@pytest.mark.product
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("layout", "model"), CREWS)
def test_everything(layout: str, model: str, policy: str, get: Get) -> None:
    wrong = [told for case in cases(policy) if (told := difference(model, case, get(layout, model).serve(case)))]
    assert not wrong
