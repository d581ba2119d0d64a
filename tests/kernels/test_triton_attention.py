"""Triton's paged attention against the reference, in the interpreter on small shapes."""

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton import attention
from kernels.triton.attention import DecodeConfig, PrefillConfig
from tests.kernels.paged import BOUNDS, Shape, build, error, expected, ints

SMALL = DecodeConfig(tile=16, warps=4, stages=1, programs=2, least=1)
TINY = PrefillConfig(rows=16, tile=16, warps=4, stages=1)


def decode(contexts, shape, *, window=None, config=SMALL, padding=0, workspace=None, seed=0):
    """(output, reference) of decode rows with these contexts, then `padding` rows that are none."""
    q, pool, batch = build([(context - 1, 1) for context in contexts], shape, seed)
    wanted = expected(q, pool, batch, 0.3, window)
    tables = torch.cat((batch.tables.int(), torch.full((padding, batch.tables.shape[1]), 1 << 20, dtype=torch.int32)))
    q = torch.cat((q, torch.full((padding, *q.shape[1:]), float("nan"), dtype=q.dtype)))
    out = torch.full((len(q), shape.heads * shape.head_dim), float("nan"), dtype=shape.dtype)
    attention.decode(
        q, pool, tables, ints(*contexts, *[0] * padding), 0.3, window=window, out=out, config=config,
        workspace=workspace,
    )  # fmt: skip
    assert not out[len(contexts) :].any()
    return out[: len(contexts)], wanted


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("contexts", [(1,), (50, 3, 33), (16, 17, 15, 1, 64)])
def test_decode(contexts, dtype):
    out, wanted = decode(contexts, Shape(dtype=dtype), padding=2)
    assert error(out, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_decode_group(group):
    out, wanted = decode((40, 9), Shape(heads=2 * group, kv_heads=2))
    assert error(out, wanted) < 1e-5


def prefill(slices, shape, *, window=None, config=TINY, lead=0, tail=0):
    """(output, reference) of slices that lie between `lead` and `tail` rows of others."""
    q, pool, batch = build(slices, shape)
    wanted = expected(q, pool, batch, 0.3, window)
    hole = torch.full((1, *q.shape[1:]), float("nan"), dtype=q.dtype)
    q = torch.cat((*[hole] * lead, q, *[hole] * tail))
    out = torch.full((len(q), shape.heads * shape.head_dim), float("nan"), dtype=shape.dtype)
    offsets = torch.tensor([0, *batch.lengths]).cumsum(0).int() + lead
    attention.prefill(
        q, pool, batch.tables.int(), ints(*batch.contexts), offsets, 0.3, window=window, out=out, config=config
    )
    end = len(q) - tail
    assert out[:lead].isnan().all() and out[end:].isnan().all()
    return out[lead:end], wanted


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("slices", [((0, 1),), ((0, 9), (33, 5), (16, 16)), ((40, 3), (0, 33), (7, 1))])
def test_prefill(slices, dtype):
    out, wanted = prefill(slices, Shape(dtype=dtype), lead=2, tail=3)
    assert error(out, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_window(window):
    out, wanted = decode((50, 3, 33), Shape(), window=window)
    assert error(out, wanted) < 1e-5
    out, wanted = prefill(((0, 9), (33, 12)), Shape(), window=window)
    assert error(out, wanted) < 1e-5
