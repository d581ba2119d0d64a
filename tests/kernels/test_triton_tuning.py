"""What tuning tries is what kernels take, and what it finds is what they use."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernels.autotune import Store
from kernels.triton import decode, linear, prefill, tuning
from kernels.triton.decode import DecodeConfig
from kernels.triton.launch import INTERPRETED_SHARED
from kernels.triton.linear import CUBLAS, MATVEC, SKINNY, LinearConfig
from kernels.triton.tuning import Sizes
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
