"""FlashInfer's wrappers are given what they ask for: a stand-in computes from exactly the arguments they document.

The library itself needs a GPU; where both are there, the last test compares it with the reference.
"""

import sys
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.batch import DeviceBatch
from kernels.triton.attention import on_device
from tests.kernels.paged import Shape, build, error, interpreted

SLICES = [(9, 1), (0, 1), (31, 1), (0, 8), (5, 11), (16, 16), (3, 1), (0, 2)]


class Wrapper:
    """What both wrappers share: a request's keys, and attention of its last queries over them."""

    planned = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer[:4096].any()
        assert kv_layout == "NHD"

    def keep(self, indptr, indices, last_page_len, heads, options):
        assert indptr.device.type == last_page_len.device.type == "cpu", "plan would wait for the device"
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(last_page_len) == len(indptr) - 1 and len(indices) == indptr[-1]
        self.indptr, self.indices, self.last, self.heads, self.options = indptr, indices, last_page_len, heads, options
        assert ((last_page_len >= 1) & (last_page_len <= heads[3])).all()
        Wrapper.planned += 1

    def keys(self, request, paged_kv_cache):
        pages = self.indices[self.indptr[request] : self.indptr[request + 1]].long()
        length = (len(pages) - 1) * self.heads[3] + int(self.last[request])
        return [cache[pages].flatten(0, 1)[:length].float() for cache in paged_kv_cache]

    def attend(self, request, q, paged_kv_cache):
        keys, values = self.keys(request, paged_kv_cache)
        group = self.heads[0] // self.heads[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self.options["sm_scale"]
        place, query = torch.arange(len(keys)), torch.arange(len(keys) - len(q), len(keys))[:, None]
        hidden = place > query
        if (left := self.options["window_left"]) >= 0:
            hidden = hidden | (place < query - left)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    def check(self, q, paged_kv_cache, out):
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        assert keys.shape[1:] == (self.heads[3], self.heads[1], self.heads[2])
        assert q.shape[1:] == (self.heads[0], self.heads[2]) and out.shape == q.shape and out.is_contiguous()
        assert (q.dtype, keys.dtype) == (self.options["q_data_type"], self.options["kv_data_type"])


class Decode(Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
        q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        options = dict(window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale)
        self.keep(indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), options)

    def run(self, q, paged_kv_cache, *, out):
        self.check(q, paged_kv_cache, out)
        assert len(q) == len(self.last)
        for request, row in enumerate(q):
            out[request] = self.attend(request, row[None], paged_kv_cache)[0]


class Prefill(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1, q_data_type="float16",
        kv_data_type=None,
    ):  # fmt: skip
        assert causal and qo_indptr.device.type == "cpu" and qo_indptr.dtype == torch.int32
        self.queries = qo_indptr.tolist()
        options = dict(window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, options)

    def run(self, q, paged_kv_cache, *, out):
        self.check(q, paged_kv_cache, out)
        assert len(q) == self.queries[-1]
        for request in range(len(self.last)):
            rows = slice(*self.queries[request : request + 2])
            out[rows] = self.attend(request, q[rows], paged_kv_cache)


class Event:
    """Of the stand-in for the device: tells when a plan was known to be uploaded."""

    def __init__(self):
        self.story = []

    def record(self):
        self.story.append("planned")

    def synchronize(self):
        self.story.append("waited")


@pytest.fixture
def planners(monkeypatch):
    """Of `kernels.flashinfer` over the stand-in."""
    library = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper, library.BatchPrefillWithPagedKVCacheWrapper = Decode, Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, "kernels.flashinfer", raising=False)
    module = import_module("kernels.flashinfer")
    monkeypatch.setattr(module, "Event", Event)
    monkeypatch.setattr(module, "WORKSPACE", 1 << 16)
    monkeypatch.setattr(Wrapper, "planned", 0)
    yield module.Planners()
    del sys.modules["kernels.flashinfer"]


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("memory", [(0, 1, 2, 3, 4), (2, 0, 1, 3, 4)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equals_reference(planners, block_size, memory, window):
    q, pool, batch = build(SLICES, Shape(block_size=block_size, memory=memory))
    attend = planners.attention(batch)
    wanted = reference.Attention(batch)(q, pool, 0.3, window)
    for _ in range(2):  # layers
        assert error(attend(q, pool, 0.3, window), wanted) < 1e-5
    assert Wrapper.planned == 2  # of decodes and of prefills, once for all layers


@pytest.mark.parametrize("slices", [[(3, 1), (20, 1)], [(5, 4)], [(0, 16)], [(0, 4), (7, 1)]])
def test_decodes_or_prefills_alone(planners, slices):
    q, pool, batch = build(slices, Shape(heads=6, kv_heads=2))
    assert error(planners.attention(batch)(q, pool, 0.3), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert Wrapper.planned == 1


def padded(batch, q):
    """As the engine packs it: padding behind the decodes, an empty slice and rows of nobody at the end."""
    device = on_device(batch)
    rows, hole, nobody = (
        device.decodes,
        torch.full_like(device.tables[:1], 1 << 20),
        torch.zeros_like(device.contexts[:1]),
    )
    packed = DeviceBatch(
        decodes=rows + 1,
        contexts=torch.cat((device.contexts[:rows], nobody, device.contexts[rows:], nobody)),
        tables=torch.cat((device.tables[:rows], hole, device.tables[rows:], hole)),
        offsets=torch.cat((device.offsets, device.offsets[-1:])) + 1,
        tokens=device.tokens,
        spans=[*device.spans[:rows], (0, 0), *device.spans[rows:]],
    )
    nothing = torch.full((1, *q.shape[1:]), float("nan"), dtype=q.dtype, device=q.device)
    return packed, torch.cat((q[:rows], nothing, q[rows:], nothing))


def test_a_padded_batch_of_the_device(planners):
    q, pool, batch = build(SLICES, Shape())
    packed, queries = padded(batch, q)
    out = planners.attention(packed)(queries, pool, 0.3)
    assert error(torch.cat((out[:3], out[4:-1])), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert not out[3].any()


@interpreted()
def test_what_the_host_does_not_know_is_tritons(planners):
    q, pool, batch = build(SLICES, Shape())
    packed, queries = padded(batch, q)
    out = planners.attention(replace(packed, spans=()))(queries, pool, 0.3)
    assert error(torch.cat((out[:3], out[4:-1])), reference.Attention(batch)(q, pool, 0.3)) < 1e-5
    assert Wrapper.planned == 0


def test_a_planner_waits_for_its_own_last_plan(planners):
    for seed in range(6):
        q, pool, batch = build([(4 + seed, 1), (0, 5)], Shape(), seed)
        wanted = reference.Attention(batch)(q, pool, 0.3)
        assert error(planners.attention(batch)(q, pool, 0.3), wanted) < 1e-5
    stories = [planner._uploaded.story for planner in planners._planners]
    assert sorted(map(len, stories)) == [2, 2, 4, 4]
    assert all(story == ["waited", "planned"] * (len(story) // 2) for story in stories)


def test_another_scale_or_window_is_another_plan(planners):
    """Layers with and without a window take turns."""
    q, pool, batch = build(SLICES, Shape())
    attend = planners.attention(batch)
    for window in (None, 6, None, 6):
        assert error(attend(q, pool, 0.3, window), reference.Attention(batch)(q, pool, 0.3, window)) < 1e-5
    assert Wrapper.planned == 4


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128), (4, 4, 64)])
def test_the_library_itself(heads, kv_heads, head_dim, window):
    pytest.importorskip("flashinfer")
    from kernels.flashinfer import Planners

    shape = Shape(heads, kv_heads, head_dim, 16, torch.bfloat16)
    q, pool, batch = build([(900, 1), (0, 1), (31, 1), (0, 300), (700, 111), (16, 16)], shape)
    pool.nan_to_num_()
    wanted = reference.Attention(batch)(q, pool, 0.1, window)
    batch = replace(batch, tables=batch.tables.cuda())
    packed, queries = padded(batch, q.cuda())
    planners = Planners()
    for _ in range(6):  # more than there are planners
        out = planners.attention(packed)(queries, pool.cuda(), 0.1, window).cpu()
        assert error(torch.cat((out[:3], out[4:-1])), wanted) < 1.5e-2
