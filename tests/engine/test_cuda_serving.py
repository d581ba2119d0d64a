"""The real scheduler and policies over the CUDA backend on the host: the checks of the GPU benchmark, without a GPU."""

import pytest

from engine.backend import TorchBackend
from engine.cuda.backend import CudaBackend
from engine.load import load_model
from engine.tiny import tiny
from experiments.benchmarks.gpu.engine import tokens
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE, alike, idle_share, policy, served
from experiments.benchmarks.gpu.engine.tokens import WAYS, conversations
from tests.engine.cuda_host import HostTimeline, load_on_host


@pytest.fixture(scope="module")
def expected():
    backend = TorchBackend(load_model(tiny("qwen3")), blocks=512, block_size=SIZE)
    yield served(backend, conversations(), policy(ahead=1)).tokens
    backend.close()


@pytest.fixture
def on_host(monkeypatch):
    def backend(model, **options):
        sizes = dict(blocks=400, block_size=SIZE, max_seqs=8, max_tokens=512, max_length=512) | options
        backend = CudaBackend(model, timeline=HostTimeline(), **sizes)
        backend.now()
        backend._pool.data.fill_(float("nan"))
        return backend

    monkeypatch.setattr(tokens, "tiny_backend", backend)


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_way_they_are_served(on_host, expected):
    report = Report(out=None, budget=600)
    tokens.check_tokens(report, "qwen3", load_on_host(tiny("qwen3")), expected)
    assert [check for check in report.checks if not check["good"]] == []
    assert len(report.checks) == len(WAYS) + 2


def test_what_is_timed_is_what_is_meant(on_host, expected):
    """The benchmark's own arithmetic on a workload whose steps are known."""
    backend = tokens.tiny_backend(load_on_host(tiny("qwen3")))
    run = served(backend, alike(4, 40, 24), policy(512, 2))
    assert [len(run.tokens[id]) for id in range(4)] == [24] * 4
    assert len(run.decodes(4)) == 23 - 8
    assert len(run.tpot()) == 4
    assert 0 < min(run.tpot()) <= max(run.tpot()) < run.duration
    assert len(run.watched.landing) == 24
    assert all(run.watched.preparing[step.id] > 0 for step, _ in run.decodes(4))
    assert 0 <= idle_share([done for _, done in run.recorder.done]) < 1
    again = served(backend, alike(4, 40, 24), policy(512, 2))
    assert again.tokens == run.tokens
    backend.close()
