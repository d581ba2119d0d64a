"""Others' measurements: read and split as they say, replayed within what is recorded, never beating physics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.groundtruth import aiconfigurator, mixed_steps, replay, results, splitwise, summary, tables, vllm019
from experiments.groundtruth.calibration import Unknowns
from experiments.groundtruth.client import ThroughFrontEnd
from experiments.groundtruth.costs import Hardware, cost_model
from experiments.groundtruth.engines import Engine
from experiments.groundtruth.fitting import fit
from experiments.groundtruth.physics import BeatsPhysics, Floor, Held
from experiments.groundtruth.pool import Pool
from experiments.groundtruth.recorder import InMemory
from experiments.groundtruth.servers import Point, generated, inference_max
from experiments.groundtruth.serving import ClosedLoad, Serving
from experiments.groundtruth.sources import SOURCES
from experiments.groundtruth.static import decodes, prefills
from playground.core import Request
from playground.model import ModelShape
from playground.sim.cost import Linear, Shape
from playground.sim.device import Device


@pytest.fixture(scope="module")
def points():
    return aiconfigurator.cases()


def point(points, engine, model, tp, name):
    return next(c for c in points if (c.engine, c.model, c.tp, c.name) == (engine, model, tp, name))


# --- replays


def test_preemption_thrash_of_a_real_engine_is_met_by_layer_profiles():
    """vLLM 0.19 on an RTX 4090 with 2588 blocks: nothing is fitted, and semantics decide (issue 4)."""
    case = vllm019.cases()[0]
    predicted = case.trial.predict("profiled", {})
    for metric in ("ttft", "tpot", "e2el", "makespan", "p50_ttft", "p99_ttft", "p99_tpot"):
        assert predicted[metric] == pytest.approx(case.measured[metric], rel=0.05), metric
    assert 150 < predicted["preemptions"] < 250  # LLMServingSim counts 194
    assert predicted["running_distance"] < 0.15 and predicted["waiting_distance"] < 0.15


def test_queueing_counts_from_the_engines_own_time_stamp():
    case = vllm019.cases()[0]
    requests = case.trial.serving.load.requests
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    assert requests[0].arrival == 0 and len(requests) == 300
    assert case.measured["ttft"] == pytest.approx(65.4566, abs=1e-3)  # as LLMServingSim's own summary has it
    assert case.measured["tpot"] == pytest.approx(0.0324, abs=1e-4)


def test_closed_loop_obeys_littles_law(points):
    case = point(points, "vLLM 0.12.0", "qwen3-32b", 8, "1024/128 tokens, 8 users")
    predicted = case.trial.predict("roofline", {case.trial.name: Unknowns(base=3e-3, latency=8e-3)})
    tokens_in_system = predicted["throughput"] * predicted["e2el"]
    assert tokens_in_system == pytest.approx(8 * 128, rel=0.02)
    assert predicted["e2el"] == pytest.approx(predicted["ttft"] + 127 * predicted["tpot"], rel=0.02)


def test_every_case_holds_to_physics_or_says_so():
    """Steps of a 2048-token prompt in half the time that the sheet allows cannot be of the model that is assumed."""
    told = {case.name: replay.impossible(case) for case in mixed_steps.cases()}
    assert told["prompt of 2048 with 3 decodes"] == ("step",)
    assert told["prompt of 512 with 3 decodes"] == ()
    rows = replay.replay(mixed_steps.cases(), ["roofline"], {}, Pool(0))
    assert len(rows) == 5
    assert all(row.predicted["step"] >= row_floor for row, row_floor in zip(rows, floors(), strict=True))


def floors():
    return [case.trial.floor()["step"] for case in mixed_steps.cases()]


# --- physics


TOY = ModelShape("LlamaForCausalLM", 2, 8, 2, 1, 4, 16, 32)
SHEET = Device("toy", 1e6, 5e5, 1e9, 1e6, 1e6)


def test_floor_by_hand():
    """Weights of a layer: 8 x (2 x 8 + 2 x 4) + 3 x 8 x 16 = 576; a head of 256; 16 bytes of KV a token and layer."""
    shape = Shape.of(prefills(1, 10))
    flops = 2 * 2 * 576 * 10 + 2 * 32 * 55 + 2 * 256
    assert Floor.of(TOY, SHEET, 1).seconds(shape) == pytest.approx(flops / 1e6)
    moved = 2 * 2 * 576 + 2 * 256 + 2 * 16 * 101
    assert Floor.of(TOY, SHEET, 1).seconds(Shape.of(decodes(1, 100))) == pytest.approx(moved / 5e5)
    assert Floor.of(TOY, SHEET, 2).seconds(shape) == pytest.approx(flops / 2e6)


def test_a_prediction_that_beats_physics_is_refused():
    shape = Shape.of(decodes(1, 100))
    least = Floor.of(TOY, SHEET, 1)
    assert Held(Linear(1.01 * least.seconds(shape)), least).stage(shape, 0).device_time > 0
    with pytest.raises(BeatsPhysics, match="at least"):
        Held(Linear(0.99 * least.seconds(shape)), least).stage(shape, 0)


@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-v3", "qwen3-235b-a22b"])
@pytest.mark.parametrize("slices", [decodes(1, 10), decodes(64, 8000), prefills(4, 2048)], ids=len)
def test_experts_and_latent_attention_do_not_beat_physics(model, slices):
    cost = cost_model("roofline", Hardware(model, "h200", 8), Unknowns())
    assert cost.stage(Shape.of(slices), 0).device_time > 0


# --- splits and fits


def test_splits_are_those_of_the_sources(points):
    assert {case.split for case in points} == {"fit", "test"}
    assert all(
        case.split == "test" for name in ("vllm019", "ispass26", "mixed_steps") for case in SOURCES[name].cases()
    )
    first = splitwise.cases()[0]
    # Rows 0, 2, 4 of the first shape (15 repetitions with others between) make its test median, odd ones the other.
    assert (first.split, first.name) == ("test", "batch 1 of 512/128 tokens")
    assert sum(case.split == "fit" for case in splitwise.cases()) == sum(c.split == "test" for c in splitwise.cases())


def test_fitting_asks_about_fit_rows_only_and_finds_what_was_planted(points):
    """Measurements made up from a known host: device 5 ms, 2 ms a step, 50 us a sequence; TTFT is made of launches and
    the front end, which two models share though one of them alone would fit a little better with another."""
    rows = [case for case in points if case.engine == "vLLM 0.12.0" and case.model in PLANTED]
    planted = [
        replace(case, measured={"tpot": 7e-3 + 50e-6 * case.trial.load.users, "ttft": PLANTED[case.model]})
        if case.split == "fit"
        else case
        for case in rows
    ]
    asked = []

    def predict(asks):
        asked.extend(case for case, _ in asks)
        return [
            {
                "tpot": 5e-3 + unknowns.base + unknowns.per_sequence * case.trial.load.users,
                "ttft": 50 * unknowns.eager + unknowns.latency,
            }
            for case, unknowns in asks
        ]

    found = fit([case for case in planted if not replay.impossible(case)], predict)
    assert asked and all(case.split == "fit" for case in asked)
    dense, experts = found["vLLM, qwen3-32b"], found["vLLM, qwen3-235b-a22b"]
    assert dense.base == pytest.approx(2e-3, rel=1e-3) and dense.per_sequence == pytest.approx(50e-6, rel=1e-3)
    assert (dense.eager, experts.eager) == (1e-3, 2e-3)
    assert dense.latency == experts.latency == 2e-2


PLANTED = {"qwen3-32b": 0.07, "qwen3-235b-a22b fp8": 0.12}
"""Seconds to the first token: 50 layers launched in 1 and in 2 ms each, and 20 ms on the way."""


def test_users_who_end_together_come_back_together_and_count_the_way():
    source = ThroughFrontEnd(iter([Request(i, 0.0, 4, 4) for i in range(4)]), users=3, latency=0.5)
    assert source.due() == 0.5
    assert [event.request.arrival for event in source.take(10.0)] == [0.5, 0.5, 0.5]
    source.finished(0, 4.0)
    assert source.due() == 4.5 and source.waited == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}
    assert source.take(4.4) == []
    source.finished(1, 4.2)  # nothing left to send
    source.take(10.0)
    assert source.due() == np.inf


def test_a_latency_makes_equal_users_wait_for_one_another(points):
    """One prompt a step. Users who get their first tokens a step apart end a decode apart; if they come back at once
    each finds the last one's prompt done, if they need a few decodes' time they queue."""
    case = point(points, "TensorRT-LLM 1.0.0rc3", "qwen3-32b fp8", 4, "4096/128 tokens, 8 users")
    at_once, later = (
        case.trial.predict("roofline", {case.trial.name: Unknowns(base=2e-3, latency=latency)})["ttft"]
        for latency in (0.0, 0.03)
    )
    assert at_once < 0.2
    assert later > 2 * at_once


def test_planning_ahead_is_a_step_late_as_running_ahead_is():
    """Against the simulator's own two steps in flight: random prompts, nothing on the host."""
    load = ClosedLoad(4, 400, 60, 0.5)
    hardware = Hardware("llama-3.1-8b", "h100")
    nothing = Unknowns(base=0.0, per_sequence=0.0)

    def ttft(**how):
        engine = Engine("vllm", max_seqs=8, max_tokens=512, **how)
        return Serving(hardware, engine, "", load, prefix_cache=False).run("roofline", nothing).means()["ttft"]

    plain, late, ahead = ttft(), ttft(late=True), ttft(run_ahead=2)
    assert ahead > 1.15 * plain
    assert late == pytest.approx(ahead, rel=0.1)


def test_servers_are_started_as_published():
    point = Point("trtllm", "", "llama-3.1-70b", 4, 1024, 1024, 32)
    waits = inference_max(point)
    assert (waits.max_tokens, waits.wait_steps, waits.wait_share, waits.late) == (16384, 20, 0.9, True)
    assert inference_max(replace(point, tp=8)).wait_steps == 0
    deepseek = inference_max(replace(point, model="deepseek-v3"))
    assert deepseek.max_tokens == (32 + 1024 + 64 + 63) // 64 * 64
    made = generated(replace(point, version="1.0.0rc3", prompt=4096))
    assert made.max_tokens == 4096 + 1500 + 32 and not made.late
    assert generated(replace(point, backend="sglang", version="0.5.6.post2")).discipline == "sglang_mixed"


def test_what_was_measured_twice_is_predicted_once(points, monkeypatch):
    case = point(points, "vLLM 0.12.0", "qwen3-32b", 8, "1024/128 tokens, 8 users")
    asked = []

    def answer(question):
        asked.append(question)
        return {"ttft": 0.1}

    monkeypatch.setattr(replay, "answer", answer)
    rows = replay.replay([case, replace(case, measured={"ttft": 0.2})], ["roofline"], {}, Pool(0))
    assert len(asked) == 1
    assert [row.errors["ttft"] for row in rows] == [pytest.approx(0.1 / case.measured["ttft"] - 1), pytest.approx(-0.5)]


# --- what is told


def row(case, cost, fitted, error, metric="tpot", impossible=()):
    return replay.Row(
        "s", case, "test", "e", "m", "d", 1, "below saturation", "", cost, fitted,
        {metric: 1.0}, {metric: 1 + error}, {metric: error}, impossible,
    )  # fmt: skip


def test_summary_takes_the_best_prediction_of_each_case_and_leaves_out_the_impossible():
    rows = [
        row("a", "roofline", False, -0.5),
        row("a", "roofline", True, -0.1),
        row("b", "roofline", True, 0.4),
        row("b", "profiled", False, 0.2),
        row("c", "roofline", False, 9.0, impossible=("tpot",)),
    ]
    chosen = summary.best(rows)
    assert [(r.name, r.errors["tpot"]) for r in chosen] == [("a", -0.1), ("b", 0.2), ("c", 9.0)]
    found = summary.spread(chosen, "tpot")
    assert (found.count, found.size, found.above) == (2, pytest.approx(0.15), 0.5)
    assert found.sign == pytest.approx(0.05)
    assert "missed" in tables.targets(rows) and "-0.1" not in tables.targets(rows)


def test_results_come_back_as_they_were_written(tmp_path):
    rows = [row("a", "roofline", False, -0.5)]
    results.write(rows, [], "s", "test", tmp_path)
    results.write_unknowns({"roofline": {"e": Unknowns(1e-3, 2e-6, 1e-4, 0.02)}}, tmp_path)
    assert results.read(tmp_path) == rows
    assert results.read_unknowns(tmp_path) == {"roofline": {"e": Unknowns(1e-3, 2e-6, 1e-4, 0.02)}}


def test_page_is_made_from_recorded_results():
    text = tables.PAGE.read_text(encoding="utf-8")
    assert text == tables.filled(text), "run python -m experiments.groundtruth --tables"


def test_queues_are_those_of_the_last_step_before():
    seen = InMemory()
    seen._queues = [(0.0, 1, 0), (1.0, 2, 5), (2.0, 3, 4)]
    running, waiting = seen.queues_at(np.array([0.5, 1.0, 9.0]))
    assert running.tolist() == [1, 2, 3] and waiting.tolist() == [0, 5, 4]
