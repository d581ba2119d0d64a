"""Paged attention: the reference against dense attention on unpaged tensors, every other one against the reference."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.batch import PagedBatch
from kernels.cpu import GATHERED, PADDING, Attention, _partition
from kernels.registry import available, select

NAMES = [name for name in available("attention", "cpu") if name != "reference"]


@dataclass(frozen=True)
class Case:
    slices: tuple[tuple[int, int], ...]  # (start, length)
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int


@st.composite
def cases(draw):
    slices = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=7))
    slices += [(start, 1) for start in draw(st.lists(st.integers(0, 90), max_size=5))]
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        tuple(slices),
        draw(st.sampled_from([1, 4, 16])),
        kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads,
        draw(st.sampled_from([8, 16])),
        draw(st.integers(0, 2**31)),
    )


def build(case):
    """(queries, pool, batch, [keys and values of each slice's sequence])."""
    torch.manual_seed(case.seed)
    widths = [-(-(start + length) // case.block_size) for start, length in case.slices]
    pool = torch.full((sum(widths) + 3, case.block_size, 2, case.kv_heads, case.head_dim), float("nan"))
    order = torch.randperm(len(pool))
    tables = torch.zeros(len(widths), max(widths), dtype=torch.int64)
    sequences, used = [], 0
    for row, ((start, length), width) in enumerate(zip(case.slices, widths, strict=True)):
        blocks = order[used : used + width]
        used += width
        tables[row, :width] = blocks
        kv = torch.randn(start + length, 2, case.kv_heads, case.head_dim)
        places = torch.arange(start + length)
        pool[blocks[places // case.block_size], places % case.block_size] = kv
        sequences.append(kv)
    queries = torch.randn(sum(length for _, length in case.slices), case.heads, case.head_dim)
    starts, lengths = ([part[i] for part in case.slices] for i in (0, 1))
    return queries, pool, PagedBatch(starts, lengths, tables, case.block_size), sequences


def dense(q, kv, start):
    """Causal attention of one sequence with no pages, in double precision."""
    group = q.shape[1] // kv.shape[2]
    keys, values = (kv[:, part].double().repeat_interleave(group, 1) for part in (0, 1))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[-1] ** -0.5
    hidden = torch.arange(len(kv)) > torch.arange(start, start + len(q))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).flatten(1)


@given(cases())
def test_reference_equals_dense_attention(case):
    queries, pool, batch, sequences = build(case)
    out = select(choices={"attention": "reference"}).attention(batch)(queries, pool, case.head_dim**-0.5)
    parts = queries.split(list(batch.lengths))
    expected = [dense(q, kv, start) for q, kv, start in zip(parts, sequences, batch.starts, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
def test_equals_reference(name, case):
    queries, pool, batch, _ = build(case)
    scale = case.head_dim**-0.5
    expected = select(choices={"attention": "reference"}).attention(batch)(queries, pool, scale)
    out = select(choices={"attention": name}).attention(batch)(queries, pool, scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near_the_reference(name):
    case = Case(((0, 9), (17, 5), (30, 1), (31, 1)), 16, 4, 2, 16, 3)
    queries, pool, batch, _ = build(case)
    queries, pool = queries.bfloat16(), pool.bfloat16()
    expected = select(choices={"attention": "reference"}).attention(batch)(queries, pool, 0.25)
    out = select(choices={"attention": name}).attention(batch)(queries, pool, 0.25)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def partition(slices):
    return list(_partition([length for _, length in slices], [start + length for start, length in slices]))


def test_decodes_of_like_contexts_make_one_group():
    assert partition([(100 + i, 1) for i in range(16)]) == [(0, 16)]


def test_contexts_too_far_apart_are_split():
    assert partition([(10, 1), (12, 1), (12 + PADDING, 1)]) == [(0, 2), (2, 3)]


def test_lengths_do_not_mix():
    assert partition([(9, 1), (9, 1), (0, 4), (0, 4), (0, 5)]) == [(0, 2), (2, 4), (4, 5)]


def test_a_group_gathers_no_more_than_its_limit():
    groups = partition([(GATHERED // 4, 1)] * 9)
    assert groups == [(0, 3), (3, 6), (6, 9)]


def test_the_pool_is_not_changed():
    """Stale entries are blanked in the gathered copy only."""
    queries, pool, batch, _ = build(Case(((3, 1), (30, 1)), 16, 2, 1, 8, 0))
    before = pool.clone()
    Attention(batch)(queries, pool, 1.0)
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)
