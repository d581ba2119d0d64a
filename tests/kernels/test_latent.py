"""Latent attention over a compressed cache: the reference against expanded keys and values, others against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu, reference
from kernels.batch import DeviceBatch, PagedBatch
from kernels.registry import Need, available, select
from tests.kernels.paged import BOUNDS, error, interpreted, ints

RANK, ROPE = 24, 8


def build(slices, heads=4, size=4, rank=RANK, dtype=torch.float32, seed=0):
    """(queries, pool that is NaN beyond the sequences, batch, each slice's sequence [context, C + R])."""
    random = torch.Generator().manual_seed(seed)
    widths = [-(-(start + length) // size) for start, length in slices]
    pool = torch.full((sum(widths) + 2, size, rank + ROPE), float("nan"), dtype=dtype)
    order = torch.randperm(len(pool), generator=random)
    tables = torch.full((len(slices), max(widths) + 1), int(order[-1]))  # a block of NaN
    sequences, used = [], 0
    for row, ((start, length), width) in enumerate(zip(slices, widths, strict=True)):
        tables[row, :width] = order[used : used + width]
        used += width
        places = torch.arange(start + length)
        sequences.append(torch.randn(start + length, rank + ROPE, generator=random).to(dtype))
        pool[tables[row][places // size], places % size] = sequences[-1]
    q = torch.randn(sum(length for _, length in slices), heads, rank + ROPE, generator=random).to(dtype)
    return q, pool, PagedBatch([s for s, _ in slices], [n for _, n in slices], tables, size), sequences


def test_absorbed_equals_expanded():
    """With keys and values of every head made from the compressed vectors, as the paper has it."""
    heads, nope, value = 3, 6, 5
    _, pool, batch, sequences = build([(7, 4), (0, 6), (9, 1)])
    random = torch.Generator().manual_seed(1)
    tokens = sum(batch.lengths)
    plain, turned = (
        torch.randn(tokens, heads, nope, generator=random),
        torch.randn(tokens, heads, ROPE, generator=random),
    )
    keys, values = (torch.randn(heads, width, RANK, generator=random) for width in (nope, value))
    absorbed = torch.cat((torch.einsum("thn,hnc->thc", plain, keys), turned), -1)
    out = torch.einsum("thc,hvc->thv", reference.MlaAttention(batch)(absorbed, pool, RANK, 0.3), values)
    row = 0
    for start, length, sequence in zip(batch.starts, batch.lengths, sequences, strict=True):
        for position in range(start, start + length):
            seen = sequence[: position + 1]
            each_key = torch.einsum("sc,hnc->shn", seen[:, :RANK], keys)
            scores = torch.einsum("hn,shn->hs", plain[row], each_key) + turned[row] @ seen[:, RANK:].T
            each_value = torch.einsum("sc,hvc->shv", seen[:, :RANK], values)
            wanted = torch.einsum("hs,shv->hv", (scores * 0.3).softmax(-1), each_value)
            torch.testing.assert_close(out[row], wanted, rtol=1e-4, atol=1e-4)
            row += 1


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 4, 16]),
)
def test_on_a_cpu(slices, heads, size):
    q, pool, batch, _ = build(slices, heads, size)
    wanted = reference.MlaAttention(batch)(q, pool, RANK, 0.2)
    torch.testing.assert_close(cpu.MlaAttention(batch)(q, pool, RANK, 0.2), wanted, rtol=1e-4, atol=1e-5)


def test_the_registry_knows_them():
    assert available("mla_attention", "cpu") == ("reference", "cpu")
    assert select("cpu").mla_attention is cpu.MlaAttention
    with pytest.raises(ValueError, match="mla_attention=triton is not available on cpu"):
        select("cpu", {"mla_attention": "triton"}, Need(kv_rank=512))


latent = pytest.importorskip("kernels.triton.latent")
interpreter = interpreted()


@interpreter
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("heads", [5, 20])
def test_decode_in_triton(dtype, splits, heads):
    """Two rows of padding among others; more splits than tiles leave some with nothing."""
    q, pool, batch, _ = build([(40, 1), (0, 1), (17, 1), (99, 1)], heads, dtype=dtype)
    wanted = reference.MlaAttention(batch)(q, pool, RANK, 0.2)
    padding = torch.full((2, batch.tables.shape[1]), 1 << 20, dtype=torch.int32)
    tables = torch.cat((batch.tables.int()[:1], padding, batch.tables.int()[1:]))
    hole = torch.full((2, *q.shape[1:]), float("nan"), dtype=dtype)
    out = latent.latent_decode(
        torch.cat((q[:1], hole, q[1:])), pool, tables, ints(41, 0, 0, 1, 18, 100), RANK, 0.2, splits=splits
    )
    assert error(torch.cat((out[:1], out[3:])), wanted) < BOUNDS[dtype]
    assert not out[1:3].any()


@interpreter
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [3, 18])
def test_prefill_in_triton(dtype, heads):
    """First chunks and chunks with a history, an empty slice, and rows of nobody around them."""
    q, pool, batch, _ = build([(0, 9), (33, 5), (16, 16), (30, 2)], heads, dtype=dtype)
    wanted = reference.MlaAttention(batch)(q, pool, RANK, 0.2)
    hole = torch.full((3, *q.shape[1:]), float("nan"), dtype=dtype)
    out = torch.full((len(q) + 6, heads, RANK), float("nan"), dtype=dtype)
    tables = torch.cat((batch.tables.int(), torch.full((1, batch.tables.shape[1]), 1 << 20, dtype=torch.int32)))
    latent.latent_prefill(
        torch.cat((hole, q, hole)), pool, tables, ints(9, 38, 32, 32, 0), ints(3, 12, 17, 33, 35, 35), RANK, 0.2,
        tokens=40, out=out,
    )  # fmt: skip
    assert error(out[3:-3], wanted) < BOUNDS[dtype]
    assert out[:3].isnan().all() and out[-3:].isnan().all()


@interpreter
@pytest.mark.parametrize(("rank", "size"), [(64, 16), (40, 24), (16, 1)])
def test_other_sizes_in_triton(rank, size):
    q, pool, batch, _ = build([(20, 1), (3, 1), (5, 11)], 2, size, rank)
    wanted = reference.MlaAttention(batch)(q, pool, rank, 0.2)
    assert error(latent.MlaAttention(batch)(q, pool, rank, 0.2), wanted) < 1e-5


@interpreter
def test_a_batch_of_the_device_in_triton():
    q, pool, batch, _ = build([(20, 1), (3, 1), (5, 11), (0, 4)])
    wanted = reference.MlaAttention(batch)(q, pool, RANK, 0.2)
    on_device = DeviceBatch(2, ints(*batch.contexts), batch.tables.int(), ints(2, 13, 17), 16)
    assert error(latent.MlaAttention(on_device)(q, pool, RANK, 0.2), wanted) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": torch.zeros(1, 3, dtype=torch.int64)}, "tables and contexts must be int32"),
        ({"q": torch.randn(1, 4, 8)}, "rows of 8 in q, 32 in the pool"),
        ({"rank": 32}, "rank 32 of 32"),
        ({"q": torch.randn(1, 4, 32).half()}, "q is torch.float16, the pool torch.float32"),
        ({"scale": 0.0}, "scale 0.0 must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"q": torch.randn(1, 4, 32), "pool": torch.randn(3, 4, 32), "tables": torch.zeros(1, 3, dtype=torch.int32),
             "contexts": ints(5), "rank": RANK, "scale": 0.3}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        latent.latent_decode(**(given | change))


@interpreter
@pytest.mark.parametrize("dtype", BOUNDS)
def test_placing_in_triton(dtype):
    """Queries turned in place, compressed vectors stored, padding nowhere."""
    tokens, heads, nope, eps = 5, 3, 6, 1e-6
    random = torch.Generator().manual_seed(2)
    q = torch.randn(tokens, heads, nope + ROPE, generator=random).to(dtype)
    made = torch.randn(tokens, 7 + RANK + ROPE, generator=random).to(dtype)
    norm = torch.rand(RANK, generator=random).to(dtype) + 0.5
    positions, slots = torch.tensor([3, 9, -1, 0, 5]), torch.tensor([6, 1, -1, 11, 4])
    angles = torch.rand(10, ROPE // 2, generator=random)
    results = []
    for place in (reference.place_latent, latent.place_latent):
        queries, pool = q.clone(), torch.zeros(3, 4, RANK + ROPE, dtype=dtype)
        place(queries, made[:, 7:], positions, slots, angles.cos(), angles.sin(), pool, norm, eps)
        results.append((queries[[0, 1, 3, 4]], pool))
    (wanted, wanted_pool), (turned, filled) = results
    assert error(turned, wanted) < BOUNDS[dtype] and error(filled, wanted_pool) < BOUNDS[dtype]
    assert torch.equal(turned[..., :nope], q[[0, 1, 3, 4]][..., :nope])
    assert not torch.equal(turned[..., nope:], q[[0, 1, 3, 4]][..., nope:])
    assert int(filled.flatten(0, 1).any(-1).sum()) == 4
