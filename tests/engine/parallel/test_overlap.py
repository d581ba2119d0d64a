"""What is computed beside exchanges is what is computed without: real ranks over Gloo."""

from contextlib import closing
from functools import cache

import pytest
import torch

from engine.errors import EngineError
from engine.overlap import Overlap, halved, passes
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.layout import Layout
from engine.tiny import tiny
from playground.core import Slice
from playground.sim.cost import Shape
from playground.sim.overlap import split
from tests.engine.parallel.forked import forked
from tests.engine.parallel.layouts import SIZES, Crew, difference
from tests.engine.parallel.layouts import Case as ServedCase
from tests.engine.parallel.overlapping import Case, alone, together

PROMPTS = [(0, 0, 5), (1, 0, 9), (2, 0, 3)]
MIXED = [(0, 5, 1), (1, 9, 1), (2, 3, 7), (3, 0, 4), (4, 0, 1)]
"""Decodes, a chunk of a prompt, and prompts; halved it cuts the prompt."""
DECODES = [(0, 6, 1), (1, 10, 1), (2, 10, 1)]
STEPS = [[PROMPTS], [MIXED], [DECODES]]

LOCKSTEP = [
    [[(0, 0, 7)], [(5, 0, 4), (6, 0, 2)]],
    [[(0, 7, 1)], [(5, 4, 1), (6, 2, 9)]],
    [[], [(5, 5, 1), (6, 11, 1)]],
    [[(1, 0, 2), (0, 8, 1)], [(5, 6, 1)]],
]
"""One replica has nothing to do in the third step, and nothing in one half of others."""

TWO_BATCH = Overlap("two_batch")


def check(found, expected):
    for rank in found:
        for id, row in rank.items():
            torch.testing.assert_close(torch.tensor(row), torch.tensor(expected[id]), rtol=1e-4, atol=1e-4)
            assert torch.tensor(row).argmax() == torch.tensor(expected[id]).argmax()
    assert set().union(*found) == set(expected)


SHARED = {"replicas": 2, "ep": 2, "lockstep": True}

CASES = [
    Case("llama", STEPS, {"tp": 2}, TWO_BATCH),
    Case("llama", STEPS, {"tp": 2}, Overlap("row_chunks", chunks=3)),
    # What travels to the next stage is the first half, then the second.
    Case("llama", STEPS, {"stages": 2}, TWO_BATCH),
    Case("qwen3-moe", STEPS, {"tp": 2, "ep": 2, "exchange": "padded_all_to_all"}, TWO_BATCH),
    Case("qwen2-moe", LOCKSTEP, SHARED | {"exchange": "all_gather"}, TWO_BATCH),
    Case("qwen2-moe", LOCKSTEP, SHARED | {"exchange": "padded_all_gather"}, Overlap("single_batch")),
    Case("deepseek-v3", LOCKSTEP, SHARED | {"exchange": "all_to_all"}, TWO_BATCH),
    Case("deepseek-v3", LOCKSTEP, SHARED | {"exchange": "all_to_all"}, Overlap("single_batch")),
    # Teams whose halves are empty by turns: all ranks exchange in one order all the same.
    Case("deepseek-v3", LOCKSTEP, SHARED | {"tp": 2, "ep": 4, "exchange": "padded_all_to_all"}, TWO_BATCH),
    Case("deepseek-v3", LOCKSTEP, SHARED | {"tp": 2, "exchange": "padded_all_gather"}, TWO_BATCH),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return together(CASES, tmp_path_factory.mktemp("ranks"))


@cache
def expected(family, lockstep):
    return alone(family, LOCKSTEP if lockstep else STEPS)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: f"{CASES[index].family}-{CASES[index].layout}")
def test_ranks_compute_what_one_computes_without_overlap(index, found):
    family, _, layout, _ = CASES[index]
    ranks = found[index][1:] if layout.get("stages") else found[index]
    check(ranks, expected(family, layout.get("lockstep", False)))


@pytest.mark.parametrize("family", ["llama", "deepseek-v2"])
def test_one_rank_computes_halves_too(family):
    check([alone(family, STEPS, TWO_BATCH)], expected(family, False))


@pytest.mark.parametrize(
    ("family", "layout", "overlap"),
    [
        ("llama", Layout(tp=2), TWO_BATCH),
        ("qwen2-moe", Layout(replicas=2, ep=2, lockstep=True), TWO_BATCH),
        ("qwen2-moe", Layout(replicas=2, ep=2, lockstep=True, exchange="all_to_all"), Overlap("single_batch")),
    ],
    ids=["team", "halves in lockstep", "way to the experts"],
)
def test_served_tokens_are_those_of_one_rank(family, layout, overlap, tmp_path):
    """With preemption, prompts in chunks, and replicas that cannot know how others halve."""
    config = WorkerConfig(str(tiny(family)), layout, f"file://{tmp_path / 'meet'}", sizes=SIZES, overlap=overlap)
    case = ServedCase("chunked_prefill", "tight")
    with closing(Crew(ParallelBackend(config, forked(layout.ranks)))) as crew:
        assert not difference(family, case, crew.serve(case))


# --- halves


def slices(*lengths):
    return [Slice(id, 0, 0, 3 * id, length, True, (id,)) for id, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [(1, 9, 3), (4, 1, 1, 1), (1,) * 7, (5, 5), (2, 2, 40, 1), (3,), (1,), (7, 6, 1)])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.48, 0.5])
def test_halves_are_the_simulators(lengths, threshold):
    found = [Shape.of(half) for half in halved(slices(*lengths), threshold)]
    for mine, simulated in zip(found, split(Shape.of(slices(*lengths)), threshold), strict=True):
        assert mine.tokens == simulated.tokens
        # A piece of one token that a prompt was cut to counts as a row here.
        assert [chunk for chunk in simulated.chunks if chunk[1] > 1] == list(mine.chunks)


def test_of_a_cut_prompt_the_later_part_samples_and_the_earlier_brings_the_blocks():
    (first,), (second,) = halved([Slice(7, 2, 0, 4, 9, True, (1, 2))], 0.48)
    assert first == Slice(7, 2, 0, 4, 4, False, (1, 2))
    assert second == Slice(7, 2, 0, 8, 5, True, ())


def test_all_ranks_halve_if_one_has_enough_and_none_without_a_second_half():
    assert [len(half) for half in passes([slices(1, 1, 1), slices(1)], Overlap("two_batch", rows=3))[0]] == [1, 0]
    assert len(passes([slices(1, 1), slices(1)], Overlap("two_batch", rows=3))) == 1
    assert len(passes([slices(1), []], TWO_BATCH)) == 1
    assert len(passes([slices(4)], Overlap("two_batch", threshold=0.0))) == 1
    assert len(passes([slices(4, 4)], Overlap("row_chunks"))) == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (dict(kind="both"), r"parallel\.overlap=both must be one of none, two_batch"),
        (dict(rows=-1), r"parallel\.overlap_rows=-1"),
        (dict(threshold=0.6), r"parallel\.overlap_threshold=0\.6 must lie in \[0, 0\.5\]"),
        (dict(chunks=1), r"parallel\.overlap_chunks=1"),
    ],
)
def test_manners_that_cannot_be_are_told(wrong, told):
    with pytest.raises(EngineError, match=told):
        Overlap(**wrong)
