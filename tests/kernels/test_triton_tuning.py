"""What tuning tries is what kernels take, and what it finds is what they use."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernels.autotune import Store
from kernels.triton import decode, experts, linear, prefill, tuning
from kernels.triton.decode import DecodeConfig
from kernels.triton.experts import ExpertsConfig
from kernels.triton.launch import INTERPRETED_SHARED
from kernels.triton.linear import CUBLAS, MATVEC, SKINNY, LinearConfig
from kernels.triton.tuning import Mixture, Sizes
from tests.kernels.paged import interpreted

pytestmark = interpreted()

SIZES = Sizes(heads=4, kv_heads=2, head_dim=16, hidden=32, intermediate=64, vocabulary=48, dtype=torch.float16,
              block_size=4, context=9)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store("interpreter", folder=tmp_path, shipped=tmp_path)


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs every candidate once; the time is the number of its turn, counted down, so the last one wins."""
    turns = iter(range(1000, 0, -1))

    def time(calls):
        calls[0]()
        return float(next(turns))

    monkeypatch.setattr(tuning, "DEVICE", "cpu")
    monkeypatch.setattr(tuning, "microseconds", time)
    monkeypatch.setattr(tuning, "compile_ahead", lambda calls: None)
    monkeypatch.setattr(tuning, "sets_for", lambda *_: 2)


def test_decode(store, on_cpu, monkeypatch):
    monkeypatch.setattr(tuning, "decode_reads", lambda start: [replace(start, tile=16), replace(start, tile=32)])
    monkeypatch.setattr(tuning, "decode_cuts", lambda start: [replace(start, programs=1)])
    lines = []
    best = tuning.tune_decode(store, SIZES, 2, lines.append)
    assert best == replace(decode.decode_config(torch.float16, 16, 2), tile=32, programs=1)
    assert store.best(DecodeConfig, decode.bucket(torch.float16, 4, 2, 16, 2), decode.source()) == best
    assert len(lines) == 4 and lines[0].startswith("  decode|float16|h4k2d16|2 tile=16")


def test_projections(store, on_cpu, monkeypatch):
    space = [LinearConfig(CUBLAS), LinearConfig(MATVEC, 4, 32), LinearConfig(SKINNY, 16, 16, 4, 1, 1)]
    monkeypatch.setattr(tuning, "linear_space", lambda *_: space)
    for name in SIZES.projections:
        assert tuning.tune_projection(store, SIZES, name, 2, lambda line: None) == space[-1]


def test_experts(store, on_cpu, monkeypatch):
    space = [ExpertsConfig(16, 16, 16, 4, 1), ExpertsConfig(16, 32, 16, 4, 1)]
    monkeypatch.setattr(tuning, "experts_space", lambda *_: space)
    monkeypatch.setattr(tuning, "MIXED_TOKENS", (3,))
    mixture = Mixture(count=4, active=2, width=24)
    lines = []
    assert tuning.tune_experts(store, SIZES, mixture, 3, lines.append) == space[-1]
    key = experts.bucket(torch.empty(4, 32, 24, dtype=torch.float16), 6)
    assert store.best(ExpertsConfig, key, experts.source()) == space[-1]
    assert len(lines) == 3 and lines[0].startswith("  experts|float16|e4x32x24|8 rows=16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("each", [1, 32, 33, 1000])
def test_the_space_of_experts_is_valid(each, dtype):
    space = list(tuning.experts_space(each, dtype))
    assert len(set(space)) == len(space)


def test_what_was_tuned_is_used_where_it_fits(monkeypatch):
    known, tuned = Known(), ExpertsConfig(16, 32, 64, 4, 2)
    monkeypatch.setattr(experts, "store", lambda device: known)
    down = torch.empty(4, 32, 24)
    for found, used in ((tuned, tuned), (replace(tuned, inputs=256, outputs=256, stages=8), None)):
        known.found = found
        experts.forget()
        default = experts.experts_config(torch.float32, 8, 4, INTERPRETED_SHARED)
        assert experts.configured(down, 6) == (used or default)
    experts.forget()


class Known:
    found = None

    def best(self, *_):
        return self.found


def test_active_experts_are_among_those_there_are():
    with pytest.raises(ValueError, match=r"active=5 must lie in 1\.\.4"):
        Mixture(4, 5, 24)


def test_a_config_that_fails_is_reported_and_left_out(store, on_cpu, monkeypatch):
    monkeypatch.setattr(tuning, "linear_space", lambda *_: [LinearConfig(CUBLAS), LinearConfig(SKINNY, 16, 16)])

    def fail(*_):
        raise RuntimeError("first line\nout of resource: shared memory")

    monkeypatch.setattr(linear, "_skinny", fail)
    lines = []
    assert tuning.tune_projection(store, SIZES, "out", 8, lines.append) == LinearConfig(CUBLAS)
    assert lines[1].endswith("failed, RuntimeError: out of resource: shared memory")


@pytest.mark.parametrize("tokens", tuning.TOKENS)
def test_the_space_of_projections_is_valid(tokens):
    space = list(tuning.linear_space(tokens, torch.bfloat16))
    assert space[0].method == CUBLAS and len(set(space)) == len(space)
    assert (MATVEC in {config.method for config in space}) == (tokens == 1)
    assert [config.method for config in tuning.linear_space(tokens, torch.float32)] == [CUBLAS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_spaces_of_attention_are_valid(dtype, dim):
    """A config's own check speaks up at once."""
    for rows in tuning.ROWS:
        start = decode.decode_config(dtype, dim, rows)
        assert [*tuning.decode_reads(start), *tuning.decode_cuts(start)]
    assert prefill.prefill_config(dtype, dim, 99 << 10)


def test_nothing_tuned_means_the_default():
    device = torch.device("cpu")
    assert decode.configured(torch.float16, device, 4, 2, 16, 3) == decode.decode_config(torch.float16, 16, 3)
    assert prefill.configured(torch.float16, device, 4, 2, 16) == prefill.prefill_config(
        torch.float16, 16, INTERPRETED_SHARED
    )
