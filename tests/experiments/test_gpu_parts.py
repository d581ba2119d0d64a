"""Parts of the GPU benchmark, rehearsed on the host: what they measure is what they say."""

import pytest

from engine.cuda.backend import CudaBackend
from engine.tiny import tiny
from experiments.benchmarks.gpu.engine import beside, flight
from experiments.benchmarks.gpu.engine.crowd import in_flight
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE, policy
from experiments.benchmarks.gpu.engine.subject import Subject
from playground.core import Request
from playground.model import ModelShape
from tests.engine.cuda_host import HostTimeline, load_on_host


@pytest.fixture(scope="module")
def subject():
    """One with everything made already, on the host."""
    model = load_on_host(tiny("qwen3"))
    sizes = dict(blocks=400, block_size=SIZE, max_seqs=8, max_tokens=512, max_length=512)
    backend = CudaBackend(model, timeline=HostTimeline(), **sizes)
    backend.now()
    made = Subject("tiny", {})
    made.__dict__ |= {"model": model, "backend": backend}
    yield made
    backend.close()


def test_a_closed_loop_is_watched_while_it_is_full(subject):
    found = in_flight(subject.backend, lambda id, output: Request(id, 0.0, 40, output, output), 6, 24, policy(64), 1.0)
    assert found.steps > 6
    assert found.ended > 6
    assert 0 < min(found.gaps) <= found.tpot <= max(found.gaps)
    assert found.computed_of_prompt == pytest.approx(40, rel=0.2)
    # Little's law: six are inside, each as long as it waits for its first token and then decodes.
    inside = found.tokens_per_second / 24 * (sum(found.waits) / len(found.waits) + 23 * found.tpot)
    assert inside == pytest.approx(6, rel=0.3)


def test_the_published_shapes_are_measured_in_three_ways(subject):
    report, shape = Report(out=None, budget=60), flight.Shape(4, 40, 12, 11.25, 0.5, (64,))
    flight.time_alone(report, subject, flight.Shape(4, 40, 100, 11.25, 0.5, (64,)))
    flight.time_computed(report, subject, shape, 64)
    flight.time_seen(report, subject, shape)
    alone, computed, seen = report.rows
    assert alone["work"].endswith("decode step 4 x 90")
    assert computed["limit"] < computed["limit_with_prompts_ms"] < computed["measured"]
    assert computed["computed_of_prompt"] > 30
    assert seen["computed_of_prompt"] < SIZE
    assert all(row["vllm_fp8_ms"] == 11.25 for row in report.rows)


@pytest.fixture(scope="module")
def theirs():
    shape = ModelShape("Qwen3ForCausalLM", 2, 64, 4, 2, 16, 128, 256, qk_norm=True, max_length=512)
    return beside.theirs(shape, "cpu")


def batch(theirs, count: int, new: int, seconds: float) -> beside.Batch:
    ids = [list(range(3 + id, 23 + id)) for id in range(count)]
    return beside.batched(theirs, ids, new, seconds, dict(num_blocks=64, max_batch_tokens=64))


def test_generate_batch_is_timed_whole(theirs):
    whole = batch(theirs, 4, 12, 60.0)
    assert (whole.finished, whole.tokens) == (4, 48)
    assert 0 < whole.step_ms / 1e3 < whole.seconds
    assert "sdpa" in whole.choices["attention"]


def test_generate_batch_is_cut_short(theirs):
    cut = batch(theirs, 16, 400, 0.5)
    assert cut.finished < 16
    assert 0 < cut.tokens < 16 * 400
    assert batch(theirs, 4, 12, 60.0).finished == 4


def test_generate_is_timed_by_a_difference(theirs):
    assert beside.generate_step_ms(theirs, 2, 12) > 0
