"""First chunks by cuDNN: torch's plain attention stands in for it, Triton runs in its interpreter."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from torch.nn.attention import SDPBackend

from kernels import cudnn, reference
from kernels.batch import DeviceBatch
from kernels.cudnn import padded
from kernels.triton.attention import on_device
from tests.kernels.paged import Shape, build, error, interpreted, ints

pytestmark = interpreted()

CHUNKS = [(9, 1), (0, 8), (0, 8), (0, 8), (0, 3), (0, 10), (4, 8), (0, 32)]
"""A decode, equal lengths, a short one, one with history, and one that needs no padding."""


@pytest.fixture
def asked(monkeypatch):
    """Shapes of the queries that the library was given."""
    shapes, attention = [], cudnn.F.scaled_dot_product_attention

    def noted(queries, keys, values, **options):
        shapes.append(tuple(queries.shape))
        assert keys.shape[2] == values.shape[2] == queries.shape[2]
        return attention(queries, keys, values, **options)

    monkeypatch.setattr(cudnn.F, "scaled_dot_product_attention", noted)
    return shapes


def attention(batch):
    return cudnn.Attention(batch, [SDPBackend.MATH], worth=8)


@pytest.mark.parametrize("memory", [(0, 1, 2, 3, 4), (0, 2, 3, 1, 4)])
@pytest.mark.parametrize("window", [None, 5])
def test_equals_reference(window, memory, asked):
    q, pool, batch = build(CHUNKS, Shape(memory=memory))
    wanted = reference.Attention(batch)(q, pool, 0.3, window)
    attend = attention(batch)
    for _ in range(2):  # layers
        assert error(attend(q, pool, 0.3, window), wanted) < 1e-5
    once = [(2, 4, 32, 16), (1, 4, 32, 16), (1, 4, 32, 16), (1, 4, 32, 16)]
    assert asked == ([] if window else once * 2)


@pytest.mark.parametrize("block_size", [1, 5, 32, 64])
def test_pages_beyond_a_chunk_are_not_read(block_size, asked):
    """The pool holds NaN behind the last token of a chunk, and in the block that tables are filled up with."""
    q, pool, batch = build([(0, 13), (0, 30)], Shape(block_size=block_size))
    assert error(attention(batch)(q, pool, 0.3), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert len(asked) == 2


def test_one_length_is_answered_without_a_copy(asked):
    q, pool, batch = build([(0, 32), (0, 32)], Shape())
    out = attention(batch)(q, pool, 0.3)
    assert error(out, reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert asked == [(2, 4, 32, 16)]


def as_the_engine_packs(batch, q):
    """Two rows of padding behind the decodes, and two empty slices behind the prefills."""
    device = on_device(batch)
    rows, hole = device.decodes, torch.full_like(device.tables[:1], 1 << 20)
    packed = DeviceBatch(
        decodes=rows + 2,
        contexts=torch.cat((device.contexts[:rows], ints(0, 0), device.contexts[rows:], ints(0, 0))),
        tables=torch.cat((device.tables[:rows], hole, hole, device.tables[rows:], hole, hole)),
        offsets=torch.cat((device.offsets, device.offsets[-1:].expand(2))) + 2,
        tokens=device.tokens,
        spans=[*device.spans[:rows], (0, 0), (0, 0), *device.spans[rows:]],
    )
    nothing = torch.full((2, *q.shape[1:]), float("nan"))
    return packed, torch.cat((q[:rows], nothing, q[rows:]))


def test_a_batch_of_the_device_whose_numbers_the_host_knows(asked):
    q, pool, batch = build(CHUNKS, Shape())
    packed, queries = as_the_engine_packs(batch, q)
    out = attention(packed)(queries, pool, 0.3)
    assert error(torch.cat((out[:1], out[3:])), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert not out[1:3].any()
    assert len(asked) == 4


def test_nothing_but_prefills(asked):
    q, pool, batch = build([(0, 9), (7, 2), (0, 12)], Shape())
    packed = on_device(batch)
    assert error(attention(packed)(q, pool, 0.3), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert len(asked) == 2


def test_what_the_host_does_not_know_is_tritons(asked):
    q, pool, batch = build(CHUNKS, Shape())
    packed, queries = as_the_engine_packs(batch, q)
    out = attention(replace(packed, spans=()))(queries, pool, 0.3)
    assert error(torch.cat((out[:1], out[3:])), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert asked == []


def test_spans_must_be_of_the_batch():
    with pytest.raises(ValueError, match="1 spans for 2 decode rows in 2 slices"):
        DeviceBatch(2, ints(3, 4), torch.zeros(2, 2, dtype=torch.int32), spans=[(2, 1)])
    with pytest.raises(ValueError, match="no prefills to take a part of"):
        DeviceBatch(2, ints(3, 4), torch.zeros(2, 2, dtype=torch.int32)).part(0, 1)


def test_plans_are_few():
    """At most an eighth of padding, and eight lengths between one power of two and the next."""
    lengths = range(256, 8193)
    assert all(length <= padded(length) <= length * 9 / 8 for length in lengths)
    assert len({padded(length) for length in lengths}) == 5 * 8 + 1
    assert padded(2048) == 2048 and padded(257) == 288
