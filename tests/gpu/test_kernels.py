"""Compiled kernels against the reference on the CPU, on buffers that hold NaN wherever nothing was given."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.batch import DeviceBatch, PagedBatch
from kernels.triton import activation, latent, norm, qkv, routing, sampling
from kernels.triton.attention import Attention
from kernels.triton.experts import Experts
from kernels.triton.linear import tuned
from tests.gpu.serving import DEVICE
from tests.kernels.paged import Shape, build, error, expected

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the relative error, against float32 with the same inputs."""

SHAPES = {
    "64": Shape(8, 2, 64, 16, torch.bfloat16),
    "80": Shape(4, 4, 80, 16, torch.bfloat16),
    "96": Shape(6, 2, 96, 16, torch.bfloat16),
    "128, one of keys": Shape(8, 1, 128, 16, torch.bfloat16),
    "128, as many of keys": Shape(4, 4, 128, 16, torch.bfloat16),
    "128, float32": Shape(8, 2, 128, 16, torch.float32),
    "256": Shape(8, 2, 256, 16, torch.bfloat16),
}
SLICES = [(300, 1), (0, 1), (64, 1), (0, 70), (200, 33), (15, 17), (0, 2)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention(heads, dtype, random):
    """DeepSeek's sizes: a mixed batch with a row of padding, its contexts split over the machine."""
    rank, singles = 512, 3
    blocks = [-(-(start + length) // 16) for start, length in SLICES]
    pool = torch.randn(sum(blocks) + 1, 16, 576, generator=random).to(dtype)
    tables = torch.zeros(len(SLICES), max(blocks), dtype=torch.int64)
    order = torch.randperm(sum(blocks), generator=random)
    for row, part in enumerate(order.split(blocks)):
        tables[row, : len(part)] = part
    starts, lengths = ([part[i] for part in SLICES] for i in (0, 1))
    q = torch.randn(sum(lengths), heads, 576, generator=random).to(dtype)
    batch = PagedBatch(starts, lengths, tables, 16)
    wanted = reference.MlaAttention(batch)(q.float(), pool.float(), rank, 0.07)
    hole, ends = torch.full_like(q[:1], math.nan), torch.tensor([0, *lengths[singles:]]).cumsum(0) + singles + 1
    on_device = DeviceBatch(
        decodes=singles + 1,
        contexts=ints(*batch.contexts[:singles], 0, *batch.contexts[singles:]),
        tables=torch.cat((tables[:singles], tables[:1], tables[singles:])).to(DEVICE, torch.int32),
        offsets=ends.to(DEVICE, torch.int32),
        tokens=200,
    )
    padded = torch.cat((q[:singles], hole, q[singles:])).to(DEVICE)
    out = latent.MlaAttention(on_device)(padded, pool.to(DEVICE), rank, 0.07).cpu()
    assert error(torch.cat((out[:singles], out[singles + 1 :])), wanted) < BOUNDS[dtype]
    assert not out[singles].any()


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name, window, random):
    """A mixed batch, with rows of padding among the decodes and behind everything."""
    shape = SHAPES[name]
    q, pool, batch = build(SLICES, shape, seed=random.initial_seed() % 2**31)
    scale = shape.head_dim**-0.5
    wanted = expected(q.float(), pool.float(), batch, scale, window)
    singles, tail = 3, 5
    hole = torch.full((1, *q.shape[1:]), math.nan, dtype=shape.dtype)
    padded = torch.cat((q[:singles], hole, q[singles:], *[hole] * tail)).to(DEVICE)
    contexts, tables = batch.contexts, batch.tables
    ends = torch.tensor([0, *batch.lengths[singles:]]).cumsum(0) + singles + 1
    on_device = DeviceBatch(
        decodes=singles + 1,
        contexts=ints(*contexts[:singles], 0, *contexts[singles:]),
        tables=torch.cat((tables[:singles], tables[:1], tables[singles:])).to(DEVICE, torch.int32),
        offsets=ends.to(DEVICE, torch.int32),
        tokens=200,
    )
    attend = Attention(on_device)
    for _ in range(2):  # layers share a workspace
        out = torch.full((len(padded), wanted.shape[1]), math.nan, dtype=shape.dtype, device=DEVICE)
        attend(padded, pool.to(DEVICE), scale, window, out)
        out = out.cpu()
        found = torch.cat((out[:singles], out[singles + 1 : len(out) - tail]))
        assert error(found, wanted) < BOUNDS[shape.dtype]
        assert not out[singles].any() and out[-tail:].isnan().all()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "normed"),
    [(8, 2, 64, 64, False), (6, 1, 96, 48, True), (8, 8, 128, 128, True), (4, 2, 256, 64, False)],
)
def test_place_qkv(heads, kv_heads, dim, rotary, normed, dtype, random):
    x = torch.randn(5, (heads + 2 * kv_heads) * dim, generator=random).to(dtype)
    angles = torch.arange(60)[:, None] * torch.rand(rotary // 2, generator=random)
    weights = torch.randn(heads + kv_heads, dim, generator=random).to(dtype) if normed else None
    positions, slots = torch.tensor([3, 59, 0, 7, 1]), torch.tensor([9, 2, -1, 19, 0])

    def run(place, device, kind):
        pool = torch.full((5, 4, 2, kv_heads, dim), math.nan, dtype=kind, device=device)
        cos, sin, given = angles.cos().to(device), angles.sin().to(device), x.to(device, kind, copy=True)
        scales = None if weights is None else weights.to(device, kind)
        out = place(given, positions.to(device), slots.to(device), cos, sin, pool, heads, scales, 1e-6)
        return out.cpu(), pool.cpu()

    wanted, kept = run(reference.place_qkv, "cpu", torch.float32)
    found, pool = run(qkv.place_qkv, DEVICE, dtype)
    assert error(found, wanted) < BOUNDS[dtype]
    assert torch.equal(pool.isnan(), kept.isnan())
    assert error(pool.nan_to_num(), kept.nan_to_num()) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tokens", [1, 3, 17, 200])
def test_projections(tokens, dtype, random):
    """Norm before, gate or residual after, with and without bias, by whatever way that many tokens go."""

    def drawn(*size):
        return torch.randn(size, generator=random).to(dtype)

    x, weight, scale, bias, residual = drawn(tokens, 320), drawn(256, 320), drawn(320), drawn(256), drawn(tokens, 256)
    wide = [tensor.float() for tensor in (x, weight, scale, bias, residual)]
    normed = reference.rms_norm(wide[0], wide[2], 1e-6)
    plain = normed @ wide[1].T
    made = tuned()
    x, weight, scale, bias, residual = (tensor.to(DEVICE) for tensor in (x, weight, scale, bias, residual))
    assert error(made.norm_linear(scale, 1e-6, weight, bias)(x).cpu(), plain + wide[3]) < BOUNDS[dtype]
    assert error(made.norm_gated(scale, 1e-6, weight, None)(x).cpu(), reference.silu_mul(plain)) < BOUNDS[dtype]
    summed = wide[4] + wide[0] @ wide[1].T
    assert error(made.add_linear(weight, None)(x, residual).cpu(), summed) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_small_operations(dtype, random):
    x, weight = (torch.randn(size, generator=random).to(dtype) for size in ((33, 320), (320,)))
    normed = norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6)
    assert error(normed.cpu(), reference.rms_norm(x.float(), weight.float(), 1e-6)) < BOUNDS[dtype]
    assert error(activation.silu_mul(x.to(DEVICE)).cpu(), reference.silu_mul(x.float())) < BOUNDS[dtype]
    ids = torch.tensor([6, 0, -1, 32, 33])
    assert torch.equal(activation.embedding(ids.to(DEVICE), x.to(DEVICE)).cpu(), reference.embedding(ids, x))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_likeliest_token(dtype, random):
    logits = torch.randn(7, 5003, generator=random).to(dtype)
    assert torch.equal(sampling.pick(logits.to(DEVICE)).cpu(), logits.argmax(-1))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("tokens", "active"), [(1, 1), (33, 4), (700, 8)])
def test_experts(tokens, active, dtype, random):
    """Some of them elsewhere; sizes that no tile divides."""
    count, width, hidden = 40, 200, 328
    gate_up = (torch.randn(count, 2 * width, hidden, generator=random) * hidden**-0.5).to(dtype)
    down = (torch.randn(count, hidden, width, generator=random) * width**-0.5).to(dtype)
    x, residual = (torch.randn(tokens, hidden, generator=random).to(dtype) for _ in range(2))
    logits = torch.randn(tokens, 2 * count, generator=random)
    held = torch.full((2 * count,), -1, dtype=torch.int32)
    held[torch.randperm(2 * count, generator=random)[:count]] = torch.arange(count, dtype=torch.int32)
    routed = reference.route(logits, active, True)
    wanted = reference.Experts(gate_up.float(), down.float(), held)(x.float(), *routed, residual.float().clone())
    found = routing.route(logits.to(DEVICE), active, True)
    assert torch.equal(found[1].cpu(), routed[1]) and error(found[0].cpu(), routed[0]) < BOUNDS[torch.float32]
    mix = Experts(gate_up.to(DEVICE), down.to(DEVICE), held.to(DEVICE))
    assert error(mix(x.to(DEVICE), *found, residual.to(DEVICE)).cpu(), wanted) < BOUNDS[dtype]


def test_a_graph_of_experts_follows_every_routing(random):
    """No host is asked, so what was captured for one routing is right for another."""
    gate_up, down = (torch.randn(size, generator=random) * 0.1 for size in ((16, 128, 64), (16, 64, 64)))
    mix, wanted = Experts(gate_up.to(DEVICE), down.to(DEVICE)), reference.Experts(gate_up, down)
    x, logits = torch.randn(20, 64, generator=random), torch.randn(3, 20, 16, generator=random)
    logits[2] = torch.arange(16.0)  # all tokens to the same
    given, out = logits[0].to(DEVICE), torch.zeros(20, 64, device=DEVICE)
    on_device = x.to(DEVICE)

    def run():
        out.zero_()
        mix(on_device, *routing.route(given, 4, True), out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for one in logits:
        given.copy_(one)
        graph.replay()
        expected = wanted(x, *reference.route(one, 4, True), torch.zeros(20, 64))
        assert error(out.cpu(), expected) < BOUNDS[torch.float32]
