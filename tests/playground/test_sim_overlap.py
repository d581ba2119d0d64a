"""Exchanges behind kernels within a step: closed forms against schedules played through, and where batches are cut."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.sim.cost import Shape
from playground.sim.overlap import Half, in_chunks, in_turns, row_products, split
from tests.playground.test_cost import DEVICE, MODEL
from tests.playground.test_sim_cluster_system import DENSE, SPARSE, decodes, prefill, system

SECONDS = st.floats(0.0, 9.0)
HALVES = st.builds(Half, SECONDS, SECONDS)


@given(HALVES, HALVES, st.integers(1, 6))
def test_in_turns_is_what_stepping_through_the_layers_gives(first, second, layers):
    """One device computes and one link carries A, B, A, B, ...; a half goes on when its exchange is done."""
    device = link = 0.0
    ready = [0.0, 0.0]
    for _ in range(layers):
        for side, half in enumerate((first, second)):
            device = max(device, ready[side]) + half.kernels
            link = ready[side] = max(link, device) + half.exchange
    assert in_turns(first, second, layers) == pytest.approx(max(ready))


@given(st.floats(0.01, 9.0), st.floats(0.01, 9.0), st.integers(1, 6))
def test_in_chunks_is_what_playing_it_through_gives(product, reduce, chunks):
    computed = summed = 0.0
    for _ in range(chunks):
        computed += product
        summed = max(summed, computed) + reduce
    assert in_chunks(product, reduce, chunks) == pytest.approx(summed)


def test_of_chunked_sums_the_last_is_exposed_and_what_is_longer_than_a_product():
    """Products of 3 s: sums of 2 s hide but the last; sums of 5 s show 2 s more for each of the others."""
    assert in_chunks(3.0, 2.0, 4) == 12.0 + 2.0
    assert in_chunks(3.0, 5.0, 4) == 12.0 + 5.0 + 3 * 2.0


# --- where a batch is cut


def chunked(*lengths: int, decoding: int = 0) -> Shape:
    """Prompts from their beginnings, each sampled, and decodes of 10 keys."""
    prompts = sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    rows = len(lengths) + decoding
    chunks = tuple((0, length) for length in lengths)
    return Shape(prompts + decoding, rows, rows, decoding, 10 * decoding, 10 if decoding else 0, pairs, prompts, chunks)


@pytest.mark.parametrize(
    "lengths, threshold, first, second",
    [
        ((6, 6), 0.48, ((0, 6),), ((0, 6),)),
        ((5, 7), 0.4, ((0, 5),), ((0, 7),)),  # 5 of 12 are enough
        ((5, 7), 0.48, ((0, 5), (0, 1)), ((1, 6),)),  # 0.417 is not: the second prompt is cut
        ((12,), 0.48, ((0, 6),), ((6, 6),)),
        ((7, 5), 0.4, ((0, 7),), ((0, 5),)),  # the middle is nearer to the end of the first
        ((12,), 0.0, (), ((0, 12),)),  # nothing may be cut: one side is empty
    ],
)
def test_prompts_stay_whole_where_that_is_even_enough(lengths, threshold, first, second):
    sides = split(chunked(*lengths), threshold)
    assert [side.chunks for side in sides] == [first, second]
    assert [side.tokens for side in sides] == [sum(n for _, n in first), sum(n for _, n in second)]


def test_decodes_fill_up_the_smaller_side():
    """4 of a prompt and 8 decodes: 4 + 2, and 6. Who samples is with its side."""
    first, second = split(chunked(4, decoding=8), 0.48)
    assert first == Shape(6, 3, 3, 2, 20, 10, 10, 4, ((0, 4),))
    assert second == Shape(6, 6, 6, 6, 60, 10, 0, 0)


def test_the_later_part_of_a_prompt_sees_the_earlier_one_and_samples():
    first, second = split(chunked(4), 0.48)
    assert first == Shape(2, 1, 0, 0, 0, 0, 3, 2, ((0, 2),))
    assert second == Shape(2, 1, 1, 0, 0, 0, 2 * 2 + 3, 4, ((2, 2),))


@given(st.lists(st.integers(2, 40), max_size=5), st.integers(0, 30), st.floats(0.0, 0.5))
def test_a_cut_loses_nothing(lengths, decoding, threshold):
    shape = chunked(*lengths, decoding=decoding)
    first, second = split(shape, threshold)
    for field in ("tokens", "sampled", "decodes", "decode_context", "prefill_pairs"):
        assert getattr(first, field) + getattr(second, field) == getattr(shape, field)
    assert min(first.tokens, second.tokens) >= threshold * shape.tokens - 1


# --- in a system


def test_an_uneven_cut_costs_what_its_sides_cost():
    """Prompts of 2 and 6, not to be cut: sides of 2 and 6 s in 4 layers, sums of 2 and 6 rows x 8 x 32 / 64."""
    work = system(tp=2, overlap="two_batch", overlap_threshold=0.0).work([chunked(2, 6)._replace(sampled=0)], 0)
    assert work.alone == in_turns(Half(0.5, 2.0), Half(1.5, 6.0), 4)
    assert (work.kernels, work.wire) == (8.0, 32.0)


def test_what_cannot_be_cut_is_done_as_ever():
    plain, uncut = system(tp=2), system(tp=2, overlap="two_batch", overlap_threshold=0.0)
    assert uncut.work([prefill(4)], 0).alone == plain.work([prefill(4)], 0).alone


def test_a_rank_with_one_token_has_a_dummy_in_the_other_half():
    """Halves of 2 and of 1 with 0 made 1: both sides gather 2 + 1 tokens."""
    work = system(model=SPARSE, replicas=2, lockstep=True, overlap="two_batch", padding="never").work(
        [decodes(4), decodes(1)], 0
    )
    assert work.wire == 2 * (6 * 3 * 32 / 2 / 64)


def products(output: float, last: float):
    """A second for every so many tokens, and one for the weights."""
    return (lambda tokens: 1 + output * tokens, lambda tokens: 1 + last * tokens)


def test_rows_are_summed_while_the_next_are_computed():
    """4 tokens, 4 layers, 2 chunks. A sum of all rows takes 2 s, of two 1 s. Products of 2 rows take 1 + 2 x 0.5 and
    1 + 2 x 1 s instead of 3 and 5 for all. In each layer 2 x 2 + 1 instead of 3 + 2, and 2 x 3 + 1 instead of 5 + 2."""
    plain = system(tp=2).work([prefill(4)], 0)
    chunks = system(tp=2, overlap="row_chunks", products=products(0.5, 1.0)).work([prefill(4)], 0)
    assert plain.alone == 4 + 8 * 2.0
    assert chunks.alone == plain.alone + 4 * (5 - 5) + 4 * (7 - 7)
    assert chunks.kernels == 4 + 4 * (4 - 3) + 4 * (6 - 5)
    assert chunks.wire == 8 * 2.0


def test_chunks_win_where_products_are_long_and_experts_are_not_chunked():
    """Weights that cost nothing: half of each sum is hidden, but for those after the experts of three layers."""

    def free(tokens: int) -> float:
        return float(tokens)

    options = dict(tp=2, overlap="row_chunks", products=(free, free))
    assert system(**options).work([prefill(4)], 0).alone == 4 + 8 * 1.0
    assert system(model=SPARSE, **options).work([prefill(4)], 0).alone == 4 + 5 * 1.0 + 3 * 2.0
    assert system(overlap_rows=5, **options).work([prefill(4)], 0).alone == 4 + 8 * 2.0


def test_products_before_sums_take_what_matrices_take():
    model = replace(MODEL, heads=4, kv_heads=2, head_dim=8, hidden=16, intermediate=64)
    for seconds, weights in zip(row_products(model, DEVICE, 2), (4 * 8 * 16 / 2, 64 * 16 / 2), strict=True):
        compute, memory = 2 * weights * 5 / DEVICE.gemm_flops, weights * model.dtype_bytes / DEVICE.bandwidth
        assert seconds(5) == pytest.approx((compute**2 + memory**2) ** 0.5)


def test_one_device_has_nothing_to_win():
    """The negative control: two batches read the weights twice for nothing, chunks do nothing at all."""
    assert system(overlap="row_chunks", products=products(0.5, 1.0)).work([prefill(4)], 0).alone == 4.0
    assert system(model=DENSE, overlap="two_batch").work([prefill(4)], 0).alone == 4.0
