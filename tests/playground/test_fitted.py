"""Fits to logged steps: known coefficients found again, ill-posed logs refused, what is saved simulates."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playground.core import Request, Slice, Spec
from playground.loop import serve
from playground.model import ModelShape
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Fitted, Linear, Shape
from playground.sim.cost.fitted import FEATURES, Fit
from playground.sim.cost.fitting import _split, fit, nnls
from playground.sim.cost.logged import Logged, steps
from playground.sim.cost.tables import BeyondTable
from playground.sim.device import Device
from playground.sim.durations import Modelled
from playground.trace import Trace
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Composed

TINY = ModelShape.read("tiny")
DEVICE = Device("unit", 1e15, 1e12, 1e12, 1e11, 1e10)
TRUE = {
    "base": 5e-3,
    "tokens": 2e-6,
    "beyond_knee": 4e-5,
    "decode_context": 3e-8,
    "prefill_pairs": 2e-9,
    "sequences": 1e-5,
}
KNEE = 128


def part(start: int, length: int) -> Slice:
    return Slice(0, 0, 0, start, length, True, ())


def seconds(shape: Shape) -> float:
    return _predicted(TRUE, shape)


def _predicted(coefficients: dict[str, float], shape: Shape) -> float:
    values = (
        1,
        shape.tokens,
        max(shape.tokens - KNEE, 0),
        shape.decode_context,
        shape.prefill_pairs,
        shape.sequences,
    )
    return sum(coefficients[name] * value for name, value in zip(FEATURES, values, strict=True))


def logged(count: int = 600, noise: float = 0.0, stages: int = 1, seed: int = 3) -> list[Logged]:
    """Steps of a server under all sorts of load."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        decodes = [part(int(context), 1) for context in rng.integers(10, 4000, rng.integers(0, 60))]
        chunks = [
            part(int(rng.integers(0, 3000)), int(rng.integers(2, 700)))
            for _ in range(int(rng.integers(0, 3)) if decodes else 1)
        ]
        shape = Shape.of([*decodes, *chunks])
        times = tuple(seconds(shape) * (1 + noise * rng.standard_normal()) for _ in range(stages))
        found.append(Logged(shape, times, 1e-4 + 2e-6 * shape.sequences))
    return found


class TestNnls:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 10_000))
    def test_nothing_nearby_is_better(self, seed):
        """Optimality as Karush, Kuhn and Tucker have it: no slope where it is free, none downwards where it is 0."""
        rng = np.random.default_rng(seed)
        design, target = np.abs(rng.standard_normal((20, 8))), rng.standard_normal(20) + 0.5
        best = nnls(design, target)
        slope = design.T @ (design @ best - target)
        assert (best >= 0).all()
        assert np.abs(slope[best > 0]).max(initial=0) < 1e-8
        assert slope[best == 0].min(initial=0) > -1e-8

    def test_by_hand(self):
        """Least squares would be (2, -1); without the second column the first is 1."""
        design = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
        assert nnls(design, design @ [2.0, -1.0]) == pytest.approx([1.0, 0.0])
        assert nnls(design, design @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])


class TestFit:
    def test_known_coefficients_are_found_again(self):
        found = fit(logged(), ["here"])
        assert found.knee == KNEE
        assert found.stages[0].coefficients == pytest.approx(TRUE, rel=1e-5)
        assert found.host.coefficients == pytest.approx({"base": 1e-4, "sequences": 2e-6}, rel=1e-6)
        assert found.held_out["all"].mape < 1e-6

    def test_intervals_hold_the_truth(self):
        """Nominally 95 %; over 20 seeds 88 % do, for blocks are few and coefficients cannot be negative."""
        inside = []
        for seed in range(5):
            line = fit(logged(1000, noise=0.05, seed=seed), [], seed=seed).stages[0]
            inside += [line.low[name] <= TRUE[name] <= line.high[name] for name in FEATURES]
            assert all(line.low[name] <= line.coefficients[name] <= line.high[name] for name in FEATURES)
        assert sum(inside) >= 0.8 * len(inside)

    def test_the_error_is_that_of_the_noise(self):
        error = fit(logged(2000, noise=0.05), [], draws=20).held_out["all"]
        assert error.mape == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.15)
        assert abs(error.bias) < 0.01

    def test_noise_does_not_pull_predictions_down(self):
        """Shares of the measured time would: by about the noise squared, 6 %."""
        line = fit(logged(2000, noise=0.25), [], draws=20).stages[0]
        quiet = logged(300, seed=8)
        bias = np.mean([_predicted(line.coefficients, step.shape) / step.seconds[0] - 1 for step in quiet])
        assert abs(bias) < 0.02

    def test_steps_that_the_machine_held_up_do_not_pull(self):
        """One step in 20 took ten times as long: plain least squares would be up by half."""
        steps_ = [
            replace(step, seconds=(10 * step.seconds[0],)) if number % 20 == 7 else step
            for number, step in enumerate(logged(1000, noise=0.02))
        ]
        assert fit(steps_, [], draws=20).stages[0].coefficients["base"] == pytest.approx(TRUE["base"], rel=0.05)

    def test_more_steps_narrow_the_intervals(self):
        few, many = (fit(logged(count, noise=0.05), []).stages[0] for count in (200, 2000))
        assert many.high["base"] - many.low["base"] < 0.5 * (few.high["base"] - few.low["base"])

    def test_errors_are_of_steps_that_were_not_fitted_to(self):
        """Times without any rule: held-out errors must not look better than chance."""
        rng = np.random.default_rng(0)
        nonsense = [replace(step, seconds=(float(np.exp(rng.normal())),)) for step in logged(200)]
        assert fit(nonsense, []).held_out["all"].mape > 0.4
        steps_ = logged(600)
        training, test = _split(steps_, 0.2, rng)
        assert {id(step) for step in training}.isdisjoint(map(id, test))
        assert len(training) + len(test) == 600
        assert sum(fit(logged(600), []).held_out[kind].steps for kind in ("decode", "prefill", "mixed")) == 128

    def test_the_same_seed_gives_the_same_fit(self):
        steps_ = logged(300, noise=0.1)
        assert (
            fit(steps_, [], draws=20, seed=4) == fit(steps_, [], draws=20, seed=4) != fit(steps_, [], draws=20, seed=5)
        )

    def test_each_stage_has_its_line(self):
        found = fit(logged(stages=2), [])
        assert [line.coefficients for line in found.stages] == [pytest.approx(TRUE, rel=1e-5)] * 2

    def test_what_cannot_be_fitted_is_refused_in_a_line(self):
        def alike(*slices: Slice) -> list[Logged]:
            return [Logged(Shape.of(slices), (0.01,), 0.0)] * 100

        everything = logged(4500)

        def only(choose) -> list[Logged]:
            return [step for step in everything if choose(step.shape)]

        twins = [
            Logged(Shape.of([part(100, 1)] * rows + [part(0, 2 * rows)]), (0.01,), 0.0)
            for rows, _ in product(range(2, 40), range(3))
        ]
        cases = [
            (logged(20), "20 steps are too few for 6 coefficients: log 60 or more"),
            (alike(part(9, 1), part(0, 30)), "only 1 different steps in 100"),
            (only(lambda shape: not shape.prefill_tokens), "no step has prefills"),
            (only(lambda shape: not shape.decodes), "no step has decodes"),
            ([replace(step, seconds=(0.0,)) for step in logged(100)], "steps of 0 seconds"),
            (logged(100) + logged(100, stages=2), "different numbers of pipeline stages"),
            (twins, "always move together"),
        ]
        for steps_, problem in cases:
            with pytest.raises(ValueError, match=problem) as raised:
                fit(steps_, [])
            assert "\n" not in str(raised.value)
        with pytest.raises(ValueError, match="held_out=1"):
            fit(logged(), [], held_out=1)


class TestFitted:
    @pytest.fixture
    def file(self, tmp_path):
        fit(logged(), ["here"]).save(tmp_path / "fit.json")
        return tmp_path / "fit.json"

    def test_what_is_saved_predicts(self, file):
        cost = Fitted(str(file), TINY, DEVICE)
        for step in logged(50, seed=9):
            assert cost.stage(step.shape, 0).device_time == pytest.approx(step.seconds[0], rel=1e-5)
        assert cost.host(Shape.of([part(9, 1)] * 10)) == pytest.approx(1.2e-4)
        assert Fit.load(file) == fit(logged(), ["here"])

    def test_it_does_not_leave_its_log_silently(self, file):
        far = Shape.of([part(0, 5000)])
        with pytest.raises(BeyondTable, match=r"tokens=5000 lies beyond .*cost\.extrapolate=true"):
            Fitted(str(file), TINY, DEVICE).stage(far, 0)
        with pytest.warns(UserWarning, match="extrapolated"):
            going_on = Fitted(str(file), TINY, DEVICE, extrapolate=True).stage(far, 0)
        assert going_on.device_time == pytest.approx(seconds(far), rel=1e-5)

    def test_a_file_that_is_no_fit_is_told(self, file, tmp_path):
        with pytest.raises(ValueError, match="fitted to 1 stages, but stages=2"):
            Fitted(str(file), TINY, DEVICE, stages=2)
        with pytest.raises(ValueError, match="cannot be read"):
            Fitted(str(tmp_path / "missing.json"), TINY, DEVICE)
        for content in ("{", "[]", '{"version": 9}'):
            file.write_text(content)
            with pytest.raises(ValueError, match="no fit that this can read"):
                Fitted(str(file), TINY, DEVICE)


class TestLogged:
    def record(self, folder, repeats: bool):
        spec = Spec(blocks=500, max_tokens=64, repeats=repeats)
        cost = Linear(1e-2, 1e-4, 1e-6, host_base=1e-3)
        requests = [Request(id, 0.05 * id, 20 + 7 * id, 9 + id, 9 + id) for id in range(8)]
        trace = Trace(folder)
        scheduler = Scheduler(spec, Composed(ChunkedPrefill(64)))
        serve(OpenLoop(requests), scheduler, SimBackend(spec, Modelled(cost)), trace)
        trace.close()
        return cost

    @pytest.mark.parametrize("repeats", [False, True])
    def test_a_run_gives_back_what_its_steps_took(self, tmp_path, repeats):
        cost = self.record(tmp_path, repeats)
        found = steps(tmp_path)
        assert len(found) > 30
        for step in found:
            assert step.seconds[0] == pytest.approx(cost.stage(step.shape, 0).device_time)
            assert step.host == pytest.approx(1e-3)

    def test_merged_steps_are_taken_apart(self, tmp_path):
        for repeats in (False, True):
            self.record(tmp_path / str(repeats), repeats)
        one, merged = (steps(tmp_path / str(repeats)) for repeats in (False, True))
        assert [step.shape for step in one] == [step.shape for step in merged]

    def test_a_folder_without_a_run_is_told(self, tmp_path):
        with pytest.raises(ValueError, match="is not the folder of a run"):
            steps(tmp_path)
