"""Triton's paged attention against the reference, in the interpreter on small shapes."""

from random import Random

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.batch import DeviceBatch
from kernels.triton import decode as decoding
from kernels.triton import prefill as prefilling
from kernels.triton.attention import Attention
from kernels.triton.decode import DecodeConfig, Workspace
from kernels.triton.prefill import PrefillConfig
from tests.kernels.paged import BOUNDS, Shape, build, error, expected, interpreted, ints

pytestmark = interpreted()

SMALL = DecodeConfig(tile=16, warps=4, stages=1, programs=2, least=1)
TINY = PrefillConfig(rows=16, tile=16, warps=4, stages=1)


def decode(contexts, shape, *, window=None, config=SMALL, padding=0, workspace=None, seed=0):
    """(output, reference) of decode rows with these contexts, then `padding` rows that are none."""
    q, pool, batch = build([(context - 1, 1) for context in contexts], shape, seed)
    wanted = expected(q, pool, batch, 0.3, window)
    tables = torch.cat((batch.tables.int(), torch.full((padding, batch.tables.shape[1]), 1 << 20, dtype=torch.int32)))
    q = torch.cat((q, torch.full((padding, *q.shape[1:]), float("nan"), dtype=q.dtype)))
    out = torch.full((len(q), shape.heads * shape.head_dim), float("nan"), dtype=shape.dtype)
    decoding.decode(
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


@pytest.mark.parametrize("tile", [16, 32, 128])
@pytest.mark.parametrize("seed", range(5))
def test_decode_uneven(seed, tile):
    """More items than programs, most of them short: an item's own units fall on programs that compute nothing of it."""
    random = Random(seed)
    rows = random.choice((3, 9, 20))
    contexts = [random.choice((1, 2, random.randint(1, 40), random.randint(40, 300))) for _ in range(rows)]
    config = DecodeConfig(tile=tile, warps=4, stages=1, programs=random.choice((1, 2)), least=random.choice((1, 4)))
    window = random.choice((None, None, 33))
    shape = Shape(heads=4, kv_heads=2)
    workspace = Workspace.create(torch.device("cpu"), rows + 1, shape.heads, shape.kv_heads, shape.head_dim)
    out, wanted = decode(contexts, shape, config=config, window=window, padding=1, seed=seed, workspace=workspace)
    assert error(out, wanted) < 1e-5
    assert not workspace.counters.any(), "who merges leaves nothing behind"


def test_decode_piece_without_tiles():
    """Of 66 units in six shares the second ends among the long row's own: that program must not count as one of its."""
    shape, contexts = Shape(heads=2, kv_heads=1), (1, 1, 1, 1, 42 * SMALL.tile)
    workspace = Workspace.create(torch.device("cpu"), len(contexts), shape.heads, shape.kv_heads, shape.head_dim)
    for _ in range(2):
        out, wanted = decode(contexts, shape, workspace=workspace)
        assert error(out, wanted) < 1e-5
    assert not workspace.counters.any(), "who merges leaves nothing behind"


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
    prefilling.prefill(
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


@pytest.mark.parametrize("dim", [20, 80, 96])
def test_head_sizes_between_powers_of_two(dim):
    shape = Shape(heads=3, kv_heads=1, head_dim=dim)
    for out, wanted in (decode((20, 3), shape), prefill(((5, 9),), shape)):
        assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_heads(dim):
    shape = Shape(heads=4, kv_heads=1, head_dim=dim, block_size=16)
    for out, wanted in (decode((40,), shape), prefill(((20, 3),), shape)):
        assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_block_sizes(block_size):
    shape = Shape(block_size=block_size)
    for out, wanted in (decode((50, 7), shape), prefill(((30, 9), (0, 3)), shape)):
        assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("memory", [(0, 2, 3, 1, 4), (2, 0, 1, 3, 4)])
def test_other_layouts_of_the_pool(memory):
    """Heads before tokens, and all keys before all values."""
    shape = Shape(memory=memory)
    for out, wanted in (decode((50, 7), shape), prefill(((30, 9),), shape)):
        assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("group", [3, 7, 16, 32])
def test_prefill_group(group):
    out, wanted = prefill(((9, 12), (0, 2)), Shape(heads=group, kv_heads=1))
    assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("least", [1, 3])
def test_any_cut_of_the_line_is_right(programs, least):
    """Items in one program, over two, and over many; a workspace serves call after call."""
    shape = Shape(heads=4, kv_heads=2)
    workspace = Workspace.create(torch.device("cpu"), 8, 4, 2, 16)
    config = DecodeConfig(tile=16, warps=4, stages=1, programs=programs, least=least)
    for seed, contexts in enumerate([(150, 1), (5,), (33, 17, 80)]):
        workspace.partials.fill_(float("nan"))
        out, wanted = decode(contexts, shape, config=config, workspace=workspace, seed=seed, padding=1)
        assert error(out, wanted) < 1e-5
        assert not workspace.counters.any()


def test_padding_alone():
    out, _ = decode((1,), Shape(), padding=7)
    assert out.isfinite().all()


def mixed(slices, shape=None):
    q, pool, batch = build(slices, shape or Shape())
    return q, pool, batch, reference.Attention(batch)(q, pool, 0.3)


@pytest.mark.parametrize("slices", [[(3, 1), (20, 1)], [(5, 4)], [(30, 1), (8, 1), (0, 7), (12, 1), (3, 2)]])
def test_mixed_batches(slices):
    q, pool, batch, wanted = mixed(slices)
    attend = Attention(batch)
    for _ in range(2):  # layers
        assert error(attend(q, pool, 0.3), wanted) < 1e-5
    assert error(attend(q, pool, 0.3, 6), reference.Attention(batch)(q, pool, 0.3, 6)) < 1e-5


def test_a_padded_batch_of_the_device():
    """Padding among decodes, an empty slice among prefills, rows of no slice at the end: as in a graph's bucket."""
    q, pool, batch, wanted = mixed([(30, 1), (8, 1), (0, 7), (3, 2)])
    table = batch.tables.int()
    hole = torch.full_like(table[:1], 1 << 20)
    padded = DeviceBatch(
        decodes=3,
        contexts=ints(31, 9, 0, 7, 5, 0),
        tables=torch.cat((table[:2], hole, table[2:], hole)),
        offsets=ints(3, 10, 12, 12),
        tokens=16,
        workspace=Workspace.create(torch.device("cpu"), 3, 4, 2, 16),
    )
    nothing = torch.full((1, *q.shape[1:]), float("nan"))
    out = Attention(padded)(torch.cat((q[:2], nothing, q[2:], nothing, nothing)), pool, 0.3)
    assert error(torch.cat((out[:2], out[3:12])), wanted) < 1e-5
    assert not out[2].any()


def test_a_batch_of_the_device_says_how_many_tokens_its_prefills_may_have():
    with pytest.raises(ValueError, match="tokens=0 bounds the grid of 2 prefills"):
        DeviceBatch(1, ints(3, 4, 5), torch.zeros(3, 2, dtype=torch.int32), ints(1, 5, 9))


def test_bf16_as_it_is_would_be_wrong(monkeypatch):
    """The interpreter computes with bf16's bits as integers: the upcast is what makes these tests mean something."""
    monkeypatch.setattr(decoding, "upcasts", lambda dtype: False)
    out, wanted = decode((9,), Shape(dtype=torch.bfloat16))
    assert not error(out, wanted) < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": torch.zeros(1, 3, dtype=torch.int64)}, "tables and contexts must be int32"),
        ({"q": torch.randn(1, 4, 8)}, "head size 8 of q, 16 of the pool"),
        ({"q": torch.randn(1, 3, 16)}, "3 query heads over 2 KV heads"),
        ({"q": torch.randn(1, 4, 16).half()}, "q is torch.float16, the pool torch.float32"),
        ({"pool": torch.randn(3, 4, 2, 16, 2).transpose(3, 4)}, "last axis must be contiguous"),
        ({"scale": -1.0}, "scale -1.0 must be above 0"),
        ({"workspace": Workspace.create(torch.device("cpu"), 0, 4, 2, 16)}, "workspace was made for fewer rows"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"q": torch.randn(1, 4, 16), "pool": torch.randn(3, 4, 2, 2, 16),
             "tables": torch.zeros(1, 3, dtype=torch.int32), "contexts": ints(5), "scale": 0.3}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        decoding.decode(**(given | change))
