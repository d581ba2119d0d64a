"""Triton's small operations against the reference, in the interpreter on small shapes."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.triton import activation, norm, qkv
from tests.kernels.paged import BOUNDS, error, interpreted

pytestmark = interpreted()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 16), (5, 100), (3, 4, 24)])
def test_rms_norm(shape, dtype):
    x = torch.randn(shape).mul(3).to(dtype)
    weight = torch.randn(shape[1:]).to(dtype)
    assert error(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_add_rms_norm(dtype):
    x, residual, weight = (torch.randn(size).to(dtype) for size in ((5, 100), (5, 100), (100,)))
    wanted = reference.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-6)
    kept = residual.clone()
    out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert error(out, wanted[0]) < BOUNDS[dtype] and error(total, wanted[1]) < BOUNDS[dtype]
    assert torch.equal(residual, kept) and total.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_silu_mul(dtype):
    x = torch.randn(3, 2 * 40).to(dtype)
    assert error(activation.silu_mul(x), reference.silu_mul(x.float())) < BOUNDS[dtype]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_embedding(ids):
    table = torch.randn(7, 40)
    out = activation.embedding(torch.tensor([6, 0, -1, 3, 7], dtype=ids), table)
    assert torch.equal(out[[0, 1, 3]], table[[6, 0, 3]]) and not out[[2, 4]].any()


def tables(rotary, positions, scale=1.0):
    angles = torch.arange(positions)[:, None] * torch.rand(rotary // 2)
    return angles.cos() * scale, angles.sin() * scale


def placed(x, positions, cos, sin, heads, kv_heads, weights, eps=1e-6):
    """Queries, keys and values [T, heads, D] in float32, by complex numbers."""
    x = x.float().unflatten(1, (heads + 2 * kv_heads, -1)).clone()
    if weights is not None:
        x[:, : heads + kv_heads] = reference.rms_norm(x[:, : heads + kv_heads], weights.float(), eps)
    half = cos.shape[1]
    turned = x[:, : heads + kv_heads]
    pairs = torch.complex(turned[..., :half], turned[..., half : 2 * half])
    pairs = pairs * torch.complex(cos[positions].float(), sin[positions].float())[:, None]
    turned[..., : 2 * half] = torch.cat((pairs.real, pairs.imag), -1)
    return x.split((heads, kv_heads, kv_heads), 1)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(4, 2, 16, 16), (3, 1, 24, 24), (4, 4, 20, 12)])
def test_place_qkv(heads, kv_heads, dim, rotary, normed, dtype):
    x = torch.randn(4, (heads + 2 * kv_heads) * dim).to(dtype)
    before = x.clone()
    pool = torch.full((5, 4, 2, kv_heads, dim), float("nan"), dtype=dtype)
    cos, sin = tables(rotary, 50)
    positions, slots = torch.tensor([3, 49, 0, 7]), torch.tensor([9, 2, -1, 19])
    weights = torch.randn(heads + kv_heads, dim).to(dtype) if normed else None
    queries, keys, values = placed(x, positions, cos, sin, heads, kv_heads, weights)
    out = qkv.place_qkv(x, positions, slots, cos, sin, pool, heads, weights)
    assert error(out, queries) < BOUNDS[dtype]
    assert out.data_ptr() == x.data_ptr()
    assert torch.equal(x[:, heads * dim :], before[:, heads * dim :])
    for token, slot in ((0, 9), (1, 2), (3, 19)):
        stored = pool[slot // 4, slot % 4]
        assert error(stored[0], keys[token]) < BOUNDS[dtype]
        assert torch.equal(stored[1], values[token].to(dtype))
    assert pool.isnan().sum() == pool.numel() - 3 * 2 * kv_heads * dim


@pytest.mark.parametrize("normed", [False, True])
def test_the_reference_of_place_qkv_is_its_formula(normed):
    heads, kv_heads, dim = 4, 2, 20
    x = torch.randn(4, (heads + 2 * kv_heads) * dim)
    pool = torch.full((5, 4, 2, kv_heads, dim), float("nan"))
    cos, sin = tables(12, 50)
    positions, slots = torch.tensor([3, 49, 0, 7]), torch.tensor([9, 2, -1, 19])
    weights = torch.randn(heads + kv_heads, dim) if normed else None
    queries, keys, values = placed(x, positions, cos, sin, heads, kv_heads, weights)
    out = reference.place_qkv(x, positions, slots, cos, sin, pool, heads, weights)
    torch.testing.assert_close(out, queries)
    torch.testing.assert_close(pool[2, 1], torch.stack((keys[0], values[0])))
    assert pool.isnan().sum() == pool.numel() - 3 * 2 * kv_heads * dim


def test_strided_rows():
    """Rows of a wider tensor, as slices of a projection are."""
    wide = torch.randn(5, 3, 64)
    x, weight = wide[:, 1], torch.randn(64)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(activation.silu_mul(x), reference.silu_mul(x))


def test_nothing_to_do():
    assert norm.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert norm.add_rms_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), 1e-6)[0].shape == (0, 8)
    assert activation.silu_mul(torch.empty(0, 8)).shape == (0, 4)
    assert activation.embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm.rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6), r"weight \[4\] does not fit x"),
        (lambda: norm.rms_norm(torch.ones(8, 2).T, torch.ones(8), 1e-6), "last axis must be contiguous"),
        (lambda: activation.silu_mul(torch.ones(2, 7)), r"not \[T, 2 \* width\]"),
        (lambda: norm.rms_norm(torch.ones(1, 40000), torch.ones(40000), 1e-6), "rows of 40000, at most 32768"),
    ],
)
def test_wrong_shapes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
