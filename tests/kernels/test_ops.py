"""The small operations: the reference against its definition, every other one against the reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference import rope_table, sample
from kernels.registry import IMPLEMENTATIONS, available, select

REFERENCE = select(choices=dict.fromkeys(IMPLEMENTATIONS, "reference"))


def others(op):
    return [name for name in available(op, "cpu") if name != "reference"]


@pytest.mark.parametrize("name", others("rms_norm"))
@pytest.mark.parametrize("shape", [(1, 64), (7, 128), (5, 6, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(name, shape, dtype):
    x = torch.randn(shape).mul(3).to(dtype)
    weight = torch.randn(shape[1:]).to(dtype)
    out = select(choices={"rms_norm": name}).rms_norm(x.clone(), weight, 1e-5)
    torch.testing.assert_close(
        out, REFERENCE.rms_norm(x, weight, 1e-5), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", others("add_rms_norm"))
def test_add_rms_norm(name):
    x, residual, weight = torch.randn(9, 64), torch.randn(9, 64), torch.randn(64)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    kept = residual.clone()
    out = select(choices={"add_rms_norm": name}).add_rms_norm(x.clone(), residual, weight, 1e-6)
    torch.testing.assert_close(out, expected)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("name", others("silu_mul"))
def test_silu_mul(name):
    x = torch.randn(5, 64)
    torch.testing.assert_close(select(choices={"silu_mul": name}).silu_mul(x), REFERENCE.silu_mul(x))


@pytest.mark.parametrize("name", others("linear"))
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
@pytest.mark.parametrize("size", [(24, 16), (300, 256)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(name, rows, size, biased, dtype):
    """Small weights and large ones, which are stored in another layout."""
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype) if biased else None
    x = torch.randn(rows, size[1]).to(dtype)
    out = select(choices={"linear": name}).linear(weight, bias)(x)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, REFERENCE.linear(weight, bias)(x), rtol=tolerance, atol=tolerance)


def test_rms_norm_is_its_formula():
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(REFERENCE.rms_norm(x, weight, 1e-6), expected)


def test_rotate_turns_each_pair_by_its_angle():
    x, frequencies = torch.randn(4, 3, 6), torch.tensor([1.0, 0.3, 0.05])
    cos, sin = rope_table(frequencies, 50, 1.0, torch.float32)
    positions = torch.tensor([0, 7, 7, 49])
    out = x.clone()
    REFERENCE.rotate(out, cos[positions], sin[positions])
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * positions[:, None, None] * frequencies)
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag), -1))


def test_write_kv():
    pool = torch.zeros(3, 4, 2, 1, 2)
    kv = torch.arange(8.0).view(2, 4)
    REFERENCE.write_kv(kv, torch.tensor([9, 2]), pool)
    assert torch.equal(pool[2, 1].flatten(), kv[0]) and torch.equal(pool[0, 2].flatten(), kv[1])
    assert pool.count_nonzero() == 7


# --- sampling


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def draws(logits, temperature=1.0, top_k=None, top_p=1.0, count=4000):
    """How often each token comes, over evenly spread uniforms."""
    vocabulary = len(logits)
    rows = torch.tensor(logits).expand(count, -1)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    full = [torch.full((count,), value, dtype=torch.float64) for value in (temperature, top_k or vocabulary, top_p)]
    return torch.bincount(sample(rows, *full, uniform), minlength=vocabulary) / count


LOGITS = [1.0, 3.0, 0.0, 2.0, -1.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    expected = (torch.tensor(LOGITS) / temperature).softmax(-1)
    torch.testing.assert_close(draws(LOGITS, temperature), expected, rtol=0, atol=1e-3)


def test_top_k_keeps_the_likeliest():
    shares = draws(LOGITS, top_k=2)
    expected = torch.tensor([3.0, 2.0]).softmax(-1)
    torch.testing.assert_close(shares[[1, 3]], expected, rtol=0, atol=1e-3)
    assert shares[[0, 2, 4]].sum() == 0


def test_top_p_keeps_the_fewest_that_reach_the_share():
    shares = torch.tensor(LOGITS).softmax(-1)  # 0.636, 0.234, 0.086, 0.032, 0.012 in order
    assert (draws(LOGITS, top_p=0.6) > 0).nonzero().flatten().tolist() == [1]
    assert (draws(LOGITS, top_p=0.64) > 0).nonzero().flatten().tolist() == [1, 3]
    assert (draws(LOGITS, top_p=0.9) > 0).nonzero().flatten().tolist() == [0, 1, 3]
    kept = shares[[0, 1, 3]] / shares[[0, 1, 3]].sum()
    torch.testing.assert_close(draws(LOGITS, top_p=0.9)[[0, 1, 3]], kept, rtol=0, atol=1e-3)


def test_top_p_counts_shares_of_what_top_k_left():
    assert (draws(LOGITS, top_k=2, top_p=0.7) > 0).nonzero().flatten().tolist() == [1]
    assert (draws(LOGITS, top_k=2, top_p=0.74) > 0).nonzero().flatten().tolist() == [1, 3]


def test_equal_logits_rank_by_id():
    assert (draws([1.0, 1.0, 1.0, 1.0], top_k=2) > 0).nonzero().flatten().tolist() == [0, 1]


@given(
    st.lists(st.integers(-800, 800).map(lambda sixteenths: sixteenths / 16), min_size=2, max_size=40),
    st.floats(1e-6, 10),
    st.integers(1, 40),
    st.floats(1e-6, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_a_sample_is_always_among_the_kept(logits, temperature, top_k, top_p, uniform):
    row = torch.tensor([logits], dtype=torch.float64)
    top_k = min(top_k, len(logits))
    token = sample(row, column(temperature), column(top_k), column(top_p), column(uniform)).item()
    better = sum(value > logits[token] for value in logits)
    assert better < top_k
    shares = ((row - row.max()) / temperature).softmax(-1)[0]
    assert shares[token] > 0
    kept = shares.sort(descending=True).values[:top_k]
    ahead = shares[row[0] > logits[token]].sum() / kept.sum()
    assert ahead < top_p or math.isclose(ahead, top_p, rel_tol=1e-9)


# --- registry


def test_the_fastest_is_the_default():
    assert select("cpu").attention is IMPLEMENTATIONS["attention"]["cpu"].kernel
    assert select("cuda").attention is IMPLEMENTATIONS["attention"]["reference"].kernel


def test_unavailable_choices_name_the_available_ones():
    with pytest.raises(
        ValueError,
        match=r"attention=triton is not available on cpu \(runs on cuda only\); choose one of auto, reference, cpu$",
    ):
        select("cpu", {"attention": "triton"})
    with pytest.raises(
        ValueError, match=r"=cpu is not available on cuda \(runs on cpu only\); choose one of auto, ref"
    ):
        select("cuda", {"attention": "cpu"})
    with pytest.raises(ValueError, match=r"kernels.attn=cpu: no such operation; there are rms_norm, "):
        select("cpu", {"attn": "cpu"})


# --- projections with what is around them


@pytest.mark.parametrize("name", others("norm_linear"))
@pytest.mark.parametrize("biased", [False, True])
def test_projections_with_norm_gate_and_residual(name, biased):
    norm, weight, x, residual = torch.randn(64), torch.randn(48, 64), torch.randn(5, 64), torch.randn(5, 48)
    bias = torch.randn(48) if biased else None
    ops = select(choices=dict.fromkeys(("norm_linear", "norm_gated", "add_linear"), name))
    near = {"rtol": 1e-4, "atol": 1e-4}
    plain = REFERENCE.linear(weight, bias)
    normed = plain(REFERENCE.rms_norm(x, norm, 1e-6))
    torch.testing.assert_close(ops.norm_linear(norm, 1e-6, weight, bias)(x), normed, **near)
    torch.testing.assert_close(ops.norm_gated(norm, 1e-6, weight, bias)(x), REFERENCE.silu_mul(normed), **near)
    total = residual + plain(x)
    out = ops.add_linear(weight, bias)(x, residual)
    torch.testing.assert_close(out, total, **near)
    assert out is residual
