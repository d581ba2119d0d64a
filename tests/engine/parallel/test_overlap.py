"""What is computed beside exchanges is what is computed without: real ranks over Gloo."""

from contextlib import closing
from dataclasses import replace
from functools import cache
from threading import Event

import pytest
import torch

from engine.errors import EngineError
from engine.load import LONE, load_model
from engine.models.decoder import WHOLE
from engine.overlap import Overlap, halved, passes
from engine.parallel.backend import ParallelBackend
from engine.parallel.beside import SideThread
from engine.parallel.config import WorkerConfig
from engine.parallel.exchange import in_line
from engine.parallel.layout import Layout
from engine.tiny import tiny
from playground.core import Slice
from playground.sim.cost import Shape
from playground.sim.overlap import split
from tests.engine.parallel.forked import forked
from tests.engine.parallel.layouts import SIZES, Crew, difference
from tests.engine.parallel.layouts import Case as ServedCase
from tests.engine.parallel.overlapping import Case, alone, computed, together

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


# --- what is begun before what


class Alone:
    """A team and experts of one rank; it notes what begins and ends, with tokens, and whether anything hides it."""

    rank, size, replicas = 0, 1, 1

    def __init__(self):
        self.noted = []

    def add_sum(self, partial, x):
        self.noted.append(("begin", len(x)))
        return lambda: (self.noted.append(("end", len(x))), x.add_(partial))[1]

    def sum(self, x):
        pass

    def gather(self, x):
        return x

    def of(self, tokens, beside):
        self.noted.append((beside, *tokens))
        return self

    def go(self, routed):
        return lambda: routed

    def come(self, sums):
        return lambda: sums


@pytest.mark.parametrize(
    ("overlap", "sums"),
    [
        (Overlap("row_chunks", chunks=2, rows=17), "begin 9, begin 8, end 9, end 8"),
        (Overlap("row_chunks", chunks=2, rows=18), "begin 17, end 17"),
        (Overlap("none"), "begin 17, end 17"),
        (TWO_BATCH, "begin 8, begin 9, end 8, begin 8, end 9, begin 9"),
    ],
    ids=["chunks", "too few", "none", "two_batch"],
)
def test_sums_are_under_way_while_something_else_is_computed(overlap, sums):
    """Of a rank's first products in a step: of chunks the next one's, of two batches the other one's."""
    team = Alone()
    share = replace(LONE, part=replace(WHOLE, team=team, overlap=overlap))
    found = computed(load_model(tiny("llama"), share=share), STEPS[:1], 0, overlap)
    assert ", ".join(f"{what} {tokens}" for what, tokens in team.noted).startswith(sums)
    check([found], alone("llama", STEPS[:1]))


@pytest.mark.parametrize(
    ("overlap", "trips"),
    [
        (Overlap("single_batch", rows=17), [(True, 17)]),
        (Overlap("single_batch", rows=18), [(False, 17)]),
        (Overlap("none"), [(False, 17)]),
        (TWO_BATCH, [(True, 8), (True, 9)]),
    ],
    ids=["single_batch", "too few", "none", "two_batch"],
)
def test_tokens_travel_beside_what_is_computed_if_they_are_enough(overlap, trips):
    exchange = Alone()
    share = replace(LONE, part=replace(WHOLE, exchange=exchange, overlap=overlap))
    found = computed(load_model(tiny("qwen2-moe"), share=share), STEPS[:1], 0, overlap)
    assert exchange.noted == trips
    check([found], alone("qwen2-moe", STEPS[:1]))


def test_an_exchange_goes_on_by_itself_or_is_waited_for_in_line():
    run, gate = SideThread(), Event()
    pending, after = run(gate.wait), run(lambda: "after")
    gate.set()
    assert pending() is True and after() == "after"
    done = []
    waiting = in_line(run)(lambda: done.append(torch.is_inference_mode_enabled()))
    assert done == [True]
    waiting()


def test_what_goes_wrong_in_an_exchange_is_told_to_who_asks_for_its_result():
    def lost():
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        SideThread()(lost)()


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
    assert [len(half) for half in passes([slices(1), slices(1, 1, 1)], Overlap("two_batch", rows=3))[0]] == [0, 1]
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
