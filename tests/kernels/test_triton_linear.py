"""Projections with what is around them against the reference, in the interpreter on small shapes."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.triton import linear
from kernels.triton.linear import CUBLAS, MATVEC, SKINNY, LinearConfig, Linears, Projection, Scratches, project
from tests.kernels.paged import BOUNDS, error, interpreted

pytestmark = interpreted()

CONFIGS = {
    MATVEC: LinearConfig(MATVEC, outputs=4, inputs=32, warps=1),
    SKINNY: LinearConfig(SKINNY, outputs=16, inputs=16, warps=4, stages=1, programs=2),
    CUBLAS: LinearConfig(CUBLAS),
}


def random(*size, dtype=torch.float32, scale=1.0):
    return (torch.randn(size) * scale).to(dtype)


def wanted(how, x, residual):
    """In float32, with none of the operations under test."""
    wide = x.float()
    if how.norm is not None:
        wide = reference.rms_norm(wide, how.norm.float(), how.eps)
    out = torch.nn.functional.linear(wide, how.weight.float(), None if how.bias is None else how.bias.float())
    if how.gated:
        out = reference.silu_mul(out)
    return out if residual is None else residual.float() + out


def check(method, tokens, outputs, inputs, dtype=torch.float32, *, normed=False, gated=False, added=False, biased=False,
          config=None, scratches=None):  # fmt: skip
    rows = outputs * 2 if gated else outputs
    how = Projection(
        scratches or Scratches(),
        random(rows, inputs, dtype=dtype, scale=0.3),
        random(rows, dtype=dtype) if biased else None,
        random(inputs, dtype=dtype) if normed else None,
        1e-5,
        gated,
    )
    x, residual = random(tokens, inputs, dtype=dtype), random(tokens, outputs, dtype=dtype) if added else None
    expected = wanted(how, x, residual)
    out = project(how, x, residual, config or CONFIGS[method])
    assert out.shape == (tokens, outputs) and error(out, expected) < BOUNDS[dtype]
    if added:
        assert out.data_ptr() == residual.data_ptr()
    return how


@pytest.mark.parametrize(("method", "tokens"), [(MATVEC, 1), (SKINNY, 1), (SKINNY, 3), (CUBLAS, 3)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_plain(method, tokens, dtype):
    check(method, tokens, 24, 64, dtype)


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("gated", "added"), [(True, False), (False, True)])
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_around(method, normed, gated, added, biased):
    check(method, 1 if method == MATVEC else 2, 20, 64, normed=normed, gated=gated, added=added, biased=biased)


@pytest.mark.parametrize("method", [MATVEC, SKINNY])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (5, 40), (33, 72)])
def test_sizes_that_no_tile_divides(method, outputs, inputs):
    check(method, 1 if method == MATVEC else 4, outputs, inputs, normed=True)
    check(method, 1, outputs, inputs, torch.float16, gated=True)


@pytest.mark.parametrize("tokens", [5, 16, 17, 40])
def test_skinny_takes_tens_of_tokens(tokens):
    check(SKINNY, tokens, 24, 48, normed=True, added=True)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_any_cut_of_the_line_is_right(programs):
    """Tiles in one program, over two, and over many; a scratch serves call after call."""
    scratches = Scratches()
    config = LinearConfig(SKINNY, outputs=16, inputs=16, warps=4, stages=1, programs=programs)
    for outputs, inputs in ((16, 160), (80, 32), (40, 80)):
        how = check(SKINNY, 3, outputs, inputs, normed=True, gated=True, config=config, scratches=scratches)
        assert not how.scratches.of(torch.device("cpu")).counters.any()


def test_more_tokens_than_matvec_takes_are_not_its_even_if_nothing_else_was_tuned(monkeypatch):
    class Known:
        def best(self, *_):
            return CONFIGS[MATVEC]

    monkeypatch.setattr(linear, "store", lambda device: Known())
    linear.forget()
    how = Projection(Scratches(), random(24, 64))
    assert linear.configured(how, random(1, 64)).method == MATVEC
    assert linear.configured(how, random(2, 64)).method != MATVEC
    linear.forget()
    with pytest.raises(ValueError, match="2 tokens, matvec takes 1"):
        project(how, random(2, 64), None, CONFIGS[MATVEC])


def test_operations():
    linears, eps, near = Linears(), 1e-6, {"rtol": 1e-4, "atol": 1e-4}
    weight, norm, x, residual = random(32, 16), random(16), random(3, 16), random(3, 32)
    torch.testing.assert_close(linears.linear(weight, None)(x), x @ weight.T, **near)
    normed = reference.rms_norm(x, norm, eps)
    torch.testing.assert_close(linears.norm_linear(norm, eps, weight, None)(x), normed @ weight.T, **near)
    gated = reference.silu_mul(normed @ weight.T)
    torch.testing.assert_close(linears.norm_gated(norm, eps, weight, None)(x), gated, **near)
    total = residual + x @ weight.T
    torch.testing.assert_close(linears.add_linear(weight, None)(x, residual), total, **near)


def test_no_tokens():
    assert Linears().norm_gated(random(16), 1e-6, random(32, 16), None)(torch.empty(0, 16)).shape == (0, 16)


def test_scratch_is_not_made_inside_a_capture(monkeypatch):
    monkeypatch.setattr(linear.autotune, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run once on this stream before a graph is captured on it"):
        Scratches().of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Linears().linear(random(8, 16), None)(random(2, 12)), r"x \[2, 12\] by 8x16"),
        (lambda: Linears().linear(random(8, 16), None)(random(2, 16).half()), "x is torch.float16, the weight torch.f"),
        (lambda: Linears().norm_gated(random(16), 1e-6, random(7, 16), None), "gates and ups must be equally many"),
        (lambda: LinearConfig("fast"), "method=fast"),
        (lambda: LinearConfig(SKINNY, outputs=48), "not powers of two"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
