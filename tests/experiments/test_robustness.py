"""Deliberate errors are as large as they say, and a comparison under them runs end to end."""

from __future__ import annotations

import pytest

from analysis.robustness import findings
from experiments.groundtruth.pool import Pool
from experiments.perturbed import Errors, Overstated, Perturbed
from experiments.robustness import NOTHING, compare, told, tried
from playground.core import Request, Slice
from playground.sim.cost import Linear, Shape
from playground.workload.source import OpenLoop

DECODE = Shape.of([Slice(0, 0, 0, 100, 1, True, ())])
PREFILL = Shape.of([Slice(0, 0, 0, 0, 50, True, ())])


def test_errors_of_prefills_and_decodes_are_apart():
    wrong = Perturbed(Linear(1.0, host_base=0.5), Errors(prefill=0.2, decode=-0.1))
    assert wrong.stage(PREFILL, 0).device_time == pytest.approx(1.2)
    assert wrong.stage(DECODE, 0).device_time == pytest.approx(0.9)
    assert wrong.host(DECODE) == pytest.approx(0.45)


def test_scatter_is_bounded_and_the_same_for_the_same_shape():
    shapes = [Shape.of([Slice(0, 0, 0, 0, length, True, ())]) for length in range(2, 200)]
    wrong = Perturbed(Linear(1.0), Errors(scatter=0.3))
    times = [wrong.stage(shape, 0).device_time for shape in shapes]
    assert times == [wrong.stage(shape, 0).device_time for shape in shapes]
    assert 0.7 <= min(times) < 0.8 and 1.2 < max(times) <= 1.3
    assert times != [Perturbed(Linear(1.0), Errors(scatter=0.3, seed=1)).stage(s, 0).device_time for s in shapes]


def test_shown_lengths_are_never_too_short_and_come_out_as_before():
    requests = [Request(i, 0.0, 10, 100) for i in range(50)]
    shown = [event.request for event in Overstated(OpenLoop(requests), 0.5, 0).take(0.0)]
    assert all(100 <= request.max_tokens <= 150 and request.output_length == 100 for request in shown)
    assert max(request.max_tokens for request in shown) > 130
    with pytest.raises(ValueError, match="0 or more"):
        Overstated(OpenLoop(requests), -0.1, 0)


def test_a_comparison_under_errors_runs_end_to_end():
    """Orca's 16 seats against all that fit, with more requests at once than that: no error of 10 % makes up for it."""
    given = ["workload.requests=40", "workload.rate=100", "model=qwen3-8b", "device=l20", "kv.blocks=600"]
    changes = [NOTHING, *[change for change in tried([0.1]) if not change.what.endswith(("seed 1", "-10%"))]]
    baseline, trials = compare(["orca", "chunked_prefill"], changes[:6], "mean_ttft", given, Pool(0))
    assert baseline["chunked_prefill"] < baseline["orca"]
    found = findings(baseline, trials)
    kinds = ["step times", "prefill against decode", "single shapes", "output lengths shown"]
    assert [one.kind for one in found] == kinds and all(one.holds_up_to == 0.1 for one in found)
    assert all(trial.scores != baseline for trial in trials)
    text = told("mean_ttft", baseline, found, found)
    assert "chunked_prefill is best) holds up to ±10%" in text
