"""Picking tokens with Triton's kernels against the reference, in the interpreter on small vocabularies."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.randomness import mix, words
from kernels import reference
from kernels.batch import SamplingRows
from kernels.triton import sampling
from tests.kernels.paged import interpreted

pytestmark = interpreted()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VOCABULARY = 150


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """As if the vocabulary were too large for one program."""
    monkeypatch.setattr(sampling, "PART", 64)
    monkeypatch.setattr(sampling, "SEARCH", 128)


def logits(rows, dtype, *, seed=0, coarse=False):
    """With `coarse`, many are equal."""
    x = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    return (x.round() if coarse else x).to(dtype)


def rows(count, temperature=1.0, **others):
    return SamplingRows(
        torch.full((count,), temperature),
        seeds=torch.arange(count) * 7919 - 5,
        positions=torch.arange(count) + 3,
        **others,
    )


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)


def differing(x, how):
    """Rows that the reference picks otherwise, leaving out those whose number is within rounding of a boundary."""
    out, wanted = sampling.pick(x, how), reference.pick(x, how)
    shift = 2e-6
    near = torch.zeros(len(x), dtype=torch.bool)
    for sign in (-1, 1):
        moved = _picked(x, how, sign * shift)
        near |= moved != wanted
    return ((out != wanted) & ~near).nonzero().flatten().tolist()


def _picked(x, how, shift):
    original = reference.uniform
    try:
        reference.uniform = lambda seeds, positions: (original(seeds, positions) + shift).clamp(0, 1 - 1e-9)
        return reference.pick(x, how)
    finally:
        reference.uniform = original


def test_numbers_are_those_of_the_engine():
    seeds, positions = [0, 1, -1, 2**63 - 1, 12345678901234567], [0, 1, 2, 3, 1 << 40]
    out = reference.uniform(torch.tensor(seeds), torch.tensor(positions))
    mixed = mix(mix(words(seeds)) + words(positions))
    assert out.tolist() == [(int(word) >> 11) * 2.0**-53 for word in mixed]


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_of_the_likeliest(dtype):
    x = logits(4, dtype, coarse=True)
    wanted = torch.stack([(row == row.max()).nonzero()[0, 0] for row in x])
    assert torch.equal(sampling.pick(x), wanted)
    assert torch.equal(sampling.pick(x, rows(4, 0.0)), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_temperature(dtype, coarse):
    x = logits(8, dtype, coarse=coarse)
    how = replace(rows(8), temperature=floats(0.3, 1.0, 0.0, 5.0, 1.0, 0.01, 2.0, 100.0))
    assert not differing(x, how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_filters(dtype, coarse):
    x = logits(8, dtype, coarse=coarse)
    how = rows(
        8,
        1.5,
        top_k=torch.tensor([0, 1, 5, 40, 0, 20, VOCABULARY + 1, 7], dtype=torch.int32),
        top_p=floats(0.5, 1.0, 1.0, 0.9, 0.999, 0.3, 1e-6, 0.7),
        min_p=floats(0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2),
    )
    assert not differing(x, how)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_one_filter_alone(name):
    values = {"top_k": torch.tensor([3, 0, 9], dtype=torch.int32), "top_p": floats(0.2, 1.0, 0.8),
              "min_p": floats(0.3, 0.0, 0.9)}  # fmt: skip
    for coarse in (False, True):
        assert not differing(logits(3, torch.float32, coarse=coarse), rows(3, **{name: values[name]}))


def test_equal_logits_are_kept_in_order_of_id():
    x = torch.zeros(16, VOCABULARY, dtype=torch.bfloat16)
    how = rows(16, top_k=torch.full((16,), 70, dtype=torch.int32))
    out = sampling.pick(x, how)
    assert int(out.max()) < 70 and len(out.unique()) > 8
    assert not differing(x[:3], rows(3, top_p=floats(0.5, 0.99, 0.001)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_both_signs_are_equal(dtype):
    x = torch.zeros(6, VOCABULARY, dtype=dtype)
    x[:, ::3], x[:, 1::3] = -0.0, -1.0
    x[3:, 7] = 2.0
    for how in (
        rows(6, top_k=torch.tensor([1, 60, 100, 1, 60, 100], dtype=torch.int32)),
        rows(6, top_p=floats(0.01, 0.5, 0.9, 0.05, 0.5, 0.9)),
        rows(6, top_p=torch.full((6,), 0.9), min_p=floats(1.0, 0.9, 0.3, 1.0, 0.1353, 0.13)),
    ):
        assert not differing(x, how)


def test_masked_tokens_never_come():
    x = logits(6, torch.float32)
    x[:, ::2] = float("-inf")
    x[5] = float("-inf")
    x[5, 149] = -50.0
    for how in (rows(6, 50.0), rows(6, 50.0, top_k=torch.full((6,), 140, dtype=torch.int32))):
        out = sampling.pick(x, how)
        assert (out % 2 == 1).all() and out[5] == 149


def test_a_row_does_not_depend_on_the_batch():
    x = logits(3, torch.bfloat16)
    how = rows(3, top_p=torch.full((3,), 0.9))
    alone = [
        sampling.pick(x[i : i + 1], SamplingRows(how.temperature[:1], how.seeds[i : i + 1], how.positions[i : i + 1],
                                                 top_p=how.top_p[:1]))
        for i in range(3)
    ]  # fmt: skip
    assert torch.equal(sampling.pick(x, how), torch.cat(alone))


def penalties(count, dtype=torch.int64):
    counts = torch.zeros(3, VOCABULARY, dtype=torch.int16)
    counts[0, :40] = reference.IN_PROMPT
    counts[0, 30:60] += 2
    counts[1, 140] = 5
    return {
        "counts": counts,
        "slots": torch.tensor([1, -1, 0, 0], dtype=dtype)[:count],
        "repetition": floats(1.0, 2.0, 1.3, 1.0)[:count],
        "presence": floats(0.5, 9.0, 0.0, 1.5)[:count],
        "frequency": floats(2.0, 9.0, 0.0, 0.25)[:count],
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(dtype):
    x, how = logits(4, dtype), rows(4, 0.0, **penalties(4))
    torch.testing.assert_close(sampling.penalise(x, how), reference.penalise(x, how))
    assert torch.equal(sampling.penalise(x, how)[1], x[1].float())
    assert not differing(x, replace(how, temperature=floats(1.0, 0.0, 1.0, 2.0)))


def test_count_tokens():
    counts = torch.zeros(3, 8, dtype=torch.int16)
    counts[2, 5] = reference.IN_PROMPT + reference.COUNT_MASK
    counts[1, 1] = reference.IN_PROMPT
    sampling.count_tokens(counts, torch.tensor([1, -1, 2]), torch.tensor([1, 1, 5]))
    assert counts[1, 1] == reference.IN_PROMPT + 1
    assert counts[2, 5] == reference.IN_PROMPT + reference.COUNT_MASK
    assert not counts[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs(dtype):
    x, ids = logits(3, dtype), torch.tensor([0, 149, 70])
    for top in (0, 4):
        out, wanted = sampling.logprobs(x, ids, top), reference.logprobs(x, ids, top)
        torch.testing.assert_close(out[:2], wanted[:2], rtol=1e-4, atol=1e-4)
        assert top == 0 or torch.equal(out[2].sort().values, wanted[2].sort().values)
