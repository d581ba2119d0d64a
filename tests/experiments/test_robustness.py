"""Deliberate errors are as large as they say, and a comparison under them runs end to end."""

from __future__ import annotations

import re

import pytest

from analysis.robustness import findings
from experiments import conclusions, robustness
from experiments.conclusions import Study
from experiments.groundtruth.pool import Pool
from experiments.perturbed import Errors, Overstated, Perturbed
from experiments.robustness import NOTHING, Run, compare, measured_errors, predict, served, told, tried
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


QUEUEING = ["workload.requests=40", "workload.rate=100", "model=qwen3-8b", "device=l20", "kv.blocks=600"]


def test_predictions_are_made_wrong_where_somebody_predicts():
    shortest = "chunked_prefill policy/order=sjf"
    assert predict(["chunked_prefill", shortest], QUEUEING)
    assert not predict(["chunked_prefill"], QUEUEING)
    assert not [change for change in tried([0.1]) if change.kind == "predicted lengths"]
    wrong = [change for change in tried([0.4], predicted=True) if change.kind == "predicted lengths"]
    assert [(change.sigma, change.predicted) for change in wrong] == [(0.4, 0), (0.4, 1)]
    for policy, different in (("chunked_prefill", 1), (shortest, 3)):
        runs = [served(Run(policy, change, "mean_e2el", tuple(QUEUEING))) for change in (NOTHING, *wrong)]
        assert len({str(run.e2el.tolist()) for run in runs}) == different


def test_a_study_is_recorded_with_all_it_says():
    study = Study("Who is next?", ["chunked_prefill", "chunked_prefill policy/order=sjf"], "mean_e2el", QUEUEING, 3.0)
    with Pool(0) as pool:
        found = conclusions.carried_out(study, pool, sizes=[0.1])
    assert found["rate"] > 0 and len(found["trials"]) == 9
    assert found["baseline"].keys() == set(study.policies)
    record = {"measured": {"tpot": [0.05, 0.2]}, "studies": {"order": found}}
    text = conclusions.page(record)
    assert text.startswith("### Who is next?") and "predicted lengths" in text
    held = re.search(r"is best.*\) holds up to ±(\d+)%; those that differed keep their order up to ±\d+%", text)
    assert held and ("bears less than the median" in text) == (int(held[1]) < 5)
    assert "Errors of TPOT as measured: median 5.0%, nine of ten below 20%" in text
    assert conclusions.told(record, "order") in text


def test_who_is_tied_with_the_best_is_told():
    trials = [{"kind": "step times", "size": 0.1, "what": "all", "scores": {"a": 2.0, "b": 1.9, "c": 5.0}}]
    baseline = {"a": 2.0, "b": 2.01, "c": 3.0}
    study = {"metric": "mean_ttft", "overrides": [], "rate": 1.0, "load": 0.8, "baseline": baseline, "trials": trials}
    text = conclusions.told({"measured": {"tpot": [0.05, 0.08]}, "studies": {"one": study}}, "one")
    assert "(`a` is best, tied with `b`) holds up to ±0%; those that differed keep their order up to ±10%" in text
    assert text.endswith("The conclusion bears less than the median, the order more than nine of ten.")


def test_measured_errors_are_sizes_of_what_was_recorded():
    sizes = measured_errors("tpot")
    assert len(sizes) > 100 and min(sizes) >= 0


@pytest.mark.parametrize("wrong", ["1.5", "-0.1", "0"])
def test_errors_out_of_range_are_refused(wrong, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["robustness", "--policies", "orca", "--errors", wrong])
    with pytest.raises(SystemExit):
        robustness.main()
    assert f"--errors {float(wrong):g} must lie between 0 and 1" in capsys.readouterr().err
