"""Routing and experts: the reference against its definition, every other one against the reference."""

import pytest
import torch

from kernels.registry import IMPLEMENTATIONS, Mix, available, select
from tests.kernels.paged import BOUNDS, error, interpreted

REFERENCE = select(choices=dict.fromkeys(IMPLEMENTATIONS, "reference"))
WIDTH, HIDDEN = 40, 48


def on_cpu(op):
    return [name for name in available(op, "cpu") if name != "reference"]


def implementation(op, name):
    return getattr(select(choices={op: name}), op) if name != "triton" else IMPLEMENTATIONS[op]["triton"].loaded()


ROUTES = [*on_cpu("route"), pytest.param("triton", marks=interpreted())]
EXPERTS = [*on_cpu("experts"), pytest.param("triton", marks=interpreted())]


def weights(experts, dtype=torch.float32, width=WIDTH, hidden=HIDDEN):
    gate_up = torch.randn(experts, 2 * width, hidden) * hidden**-0.5
    return gate_up.to(dtype), (torch.randn(experts, hidden, width) * width**-0.5).to(dtype)


def routed(tokens, experts, active):
    return REFERENCE.route(torch.randn(tokens, experts), active, True)


# --- routing


def test_shares_are_of_all_experts_or_of_those_picked():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    shares, picks = REFERENCE.route(logits, 2, False)
    assert picks.tolist() == [[1, 3]] and picks.dtype == torch.int32
    torch.testing.assert_close(shares, logits.softmax(-1)[:, [1, 3]])
    shares, _ = REFERENCE.route(logits, 2, True)
    torch.testing.assert_close(shares, torch.tensor([[3.0, 2.0]]).softmax(-1))


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(("experts", "active"), [(1, 1), (8, 2), (60, 4), (130, 8)])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_route(name, experts, active, normalise, dtype):
    logits = torch.stack([torch.randperm(experts) for _ in range(5)]).sub(experts).mul(0.05).to(dtype)  # no equals
    expected, wanted = REFERENCE.route(logits, active, normalise)
    shares, picks = implementation("route", name)(logits, active, normalise)
    assert torch.equal(picks, wanted) and picks.dtype == torch.int32
    torch.testing.assert_close(shares, expected)


@interpreted()
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_of_equals_the_first_is_picked_and_nan_is_nobody():
    route = implementation("route", "triton")
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [float("nan")] * 5, [float("-inf")] * 5])
    _, picks = route(logits, 3, True)
    assert picks[0].tolist() == [1, 3, 0]
    assert ((picks >= 0) & (picks < 5)).all()


# --- experts


def test_the_sum_is_its_formula():
    gate_up, down = weights(3)
    x, residual = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    shares, picks = torch.tensor([[0.7, 0.2], [0.5, 0.4]]), torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    expected = residual.clone()
    for token in range(2):
        for share, expert in zip(shares[token], picks[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += share * (down[expert] @ (gate * gate.sigmoid() * up))
    out = REFERENCE.experts(gate_up, down, None)(x, shares, picks, residual)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out is residual


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("tokens", "experts", "active"), [(0, 4, 2), (1, 4, 2), (3, 8, 8), (70, 5, 1), (40, 12, 4)])
def test_experts(name, dtype, tokens, experts, active):
    gate_up, down = weights(experts, dtype)
    x, residual = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, HIDDEN).to(dtype)
    routing = routed(tokens, experts, active)
    expected = REFERENCE.experts(gate_up.float(), down.float(), None)(x.float(), *routing, residual.float())
    out = implementation("experts", name)(gate_up, down, None)(x, *routing, residual)
    assert out is residual and out.dtype == dtype
    if tokens:
        assert error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("name", EXPERTS)
def test_large_weights(name):
    """Those of a CPU are kept in another layout."""
    gate_up, down = weights(2, width=160, hidden=256)
    x, residual, routing = torch.randn(3, 256), torch.randn(3, 256), routed(3, 2, 1)
    expected = REFERENCE.experts(gate_up, down, None)(x, *routing, residual.clone())
    assert error(implementation("experts", name)(gate_up, down, None)(x, *routing, residual), expected) < 1e-5


@pytest.fixture
def poison():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["reference", *EXPERTS])
@pytest.mark.usefixtures("poison")
def test_ranks_that_have_some_of_the_experts_add_up_to_all(name):
    """Experts in any order; a token may have none of its own here."""
    gate_up, down = weights(6)
    x, routing = torch.randn(17, HIDDEN), routed(17, 6, 2)
    expected = REFERENCE.experts(gate_up, down, None)(x, *routing, torch.zeros(17, HIDDEN))
    total = torch.zeros(17, HIDDEN)
    for mine in ([4, 1], [3], [0, 5, 2]):
        held = torch.full((6,), -1, dtype=torch.int32)
        held[mine] = torch.arange(len(mine), dtype=torch.int32)
        mix = implementation("experts", name)(gate_up[mine], down[mine], held)
        total = mix(x, *routing, total)
    assert error(total, expected) < 1e-5


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_nobody_picks_are_not_touched(name):
    gate_up, down = weights(4)
    gate_up[[0, 2]] = down[[0, 2]] = float("nan")
    picks = torch.tensor([[3], [1], [3]], dtype=torch.int32)
    out = implementation("experts", name)(gate_up, down, None)(
        torch.randn(3, HIDDEN), torch.ones(3, 1), picks, torch.zeros(3, HIDDEN)
    )
    assert not out.isnan().any()


def mixes(name) -> Mix:
    return implementation("experts", name)(*weights(4), None)


@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_do_not_depend_on_their_company(name):
    mix, x, (shares, picks) = mixes(name), torch.randn(40, HIDDEN), routed(40, 4, 2)
    together = mix(x, shares, picks, torch.zeros(40, HIDDEN))
    alone = torch.cat([mix(*(part[[i]] for part in (x, shares, picks)), torch.zeros(1, HIDDEN)) for i in (0, 17)])
    torch.testing.assert_close(together[[0, 17]], alone, rtol=1e-5, atol=1e-5)


# --- what only the kernels have


@interpreted()
@pytest.mark.parametrize("rows", [16, 32])
def test_any_cut_is_right(rows, monkeypatch):
    """Experts of several tiles and of none, sizes that no tile divides, pairs that are sorted in several rounds."""
    from kernels.triton import pairs
    from kernels.triton.experts import Experts, ExpertsConfig

    monkeypatch.setattr(pairs, "SORTED", 16)
    monkeypatch.setattr(pairs, "BLOCK", 32)
    gate_up, down = weights(5, width=24, hidden=40)
    x = torch.randn(60, 40)
    shares, picks = routed(60, 5, 2)
    picks[:50] = torch.tensor([3, 0], dtype=torch.int32)
    expected = REFERENCE.experts(gate_up, down, None)(x, shares, picks, torch.zeros(60, 40))
    mix = Experts(gate_up, down, None, ExpertsConfig(rows, 16, 32, 4, 1))
    assert error(mix(x, shares, picks, torch.zeros(60, 40)), expected) < 1e-5


@interpreted()
def test_pairs_are_sorted_by_where_their_experts_are():
    from kernels.triton.pairs import arranged

    picks = torch.tensor([[4, 1], [0, 4], [1, 9]], dtype=torch.int32)  # 9: no expert at all
    held = torch.tensor([-1, 1, -1, -1, 0, *[1] * 5], dtype=torch.int32)[:5]  # and what lies behind it
    order, offsets = arranged(picks, held, 2)
    assert offsets.tolist() == [0, 2, 4]
    assert order[:4].tolist() == [0, 3, 1, 4]


@interpreted()
def test_no_routing_has_more_tiles_than_the_grid():
    from kernels.triton.experts import tiles

    for pairs, experts, rows in ((1, 8, 16), (64, 8, 16), (640, 8, 16), (17, 1, 16)):
        for worst in ([1] * min(pairs, experts), [pairs]):
            counts = [*worst[:-1], pairs - sum(worst[:-1])]
            assert sum(-(-count // rows) for count in counts) <= tiles(pairs, experts, rows)


@interpreted()
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mix: mix(torch.randn(2, 9), *routed(2, 4, 2), torch.zeros(2, HIDDEN)), r"x is \[2, 9\], not \[T, 48\]"),
        (lambda mix: mix(torch.randn(2, HIDDEN), *routed(3, 4, 2), torch.zeros(2, HIDDEN)), "must be .T, active."),
        (lambda mix: mix(torch.randn(2, HIDDEN).half(), *routed(2, 4, 2), torch.zeros(2, HIDDEN)), "torch.float16"),
        (lambda mix: type(mix)(*weights(2), torch.zeros(2)), "held must be int32"),
        (lambda mix: type(mix)(weights(2)[1], weights(2)[0]), "experts: gate_up .*, not .E, 2 "),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(mixes("triton"))


@interpreted()
def test_configs_are_checked_and_fit_the_shared_memory():
    from kernels.triton.experts import ExpertsConfig, experts_config, stage_bytes

    for dtype in BOUNDS:
        for pairs in (8, 256, 4096, 65536):
            config = experts_config(dtype, pairs, 128, 99 << 10)
            assert config.stages * stage_bytes(config, dtype) <= 99 << 10
    with pytest.raises(ValueError, match="not powers of two"):
        ExpertsConfig(48, 16, 16, 4, 1)
    with pytest.raises(ValueError, match="out of range"):
        ExpertsConfig(8, 16, 16, 4, 1)
