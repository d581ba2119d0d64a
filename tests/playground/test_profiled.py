"""Profiles and tables as cost models: interpolation by hand, measured points hit, what they do not know refused."""

import csv
import gzip
import warnings
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from playground.core import Slice
from playground.model import ModelShape
from playground.sim.cost import Profiled, Roofline, Shape
from playground.sim.cost.routing import Loads, uniform
from playground.sim.cost.tables import BeyondTable, Bounds, Curve, Grid, find, whole_grid

LLAMA = ModelShape.read("llama-3.1-8b")


def device(name: str):
    return instantiate(OmegaConf.load(f"conf/device/{name}.yaml"))


@pytest.fixture(scope="module")
def profiled() -> Profiled:
    return Profiled(LLAMA, device("rtx4090"))


def decodes(rows: int, context: int) -> list[Slice]:
    return [Slice(row, 0, 0, context - 1, 1, True, ()) for row in range(rows)]


def chunk(history: int, tokens: int) -> Slice:
    return Slice(999, 0, 0, history, tokens, False, ())


MOE = ModelShape.read("qwen3-30b-a3b")


def moe(**options) -> Profiled:
    folder = find("RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16")
    return Profiled(MOE, device("rtxpro6000"), path=str(folder), **options)


class TestInterpolation:
    def test_a_curve_by_hand(self):
        curve = Curve([4, 2], [10.0, 6.0])
        assert [curve.at(n) for n in range(7)] == [6, 6, 6, 8, 10, 12, 14]
        staircase = Curve([1, 2, 3, 4], [1.0, 1.0, 5.0, 5.0])
        assert staircase.at(6) == 5 + 2 * (5 - 1) / 2

    def test_a_grid_by_hand(self):
        grid = Grid([[0, 10], [1, 2, 4]], np.array([[0.0, 1.0, 3.0], [10.0, 31.0, 73.0]]))
        assert grid.at(10, 2) == 31
        assert grid.at(5, 2) == 16
        assert grid.at(5, 3) == pytest.approx((1 + 3 + 31 + 73) / 4)
        assert grid.at(-3, 0) == 0  # below the first values
        assert grid.at(20, 1) == 20  # beyond the last, in a straight line

    def test_four_dimensions_reproduce_a_multilinear_function(self):
        axes = [[0, 1, 5], [2, 4], [1, 3, 9], [0, 7]]

        def function(a, b, c, d):
            return 1 + 2 * a + 3 * b * c + a * b * c * d

        grid = Grid(axes, np.vectorize(function)(*np.meshgrid(*axes, indexing="ij")).astype(float))
        for point in ([0.5, 3, 2, 3.5], [4, 2.2, 8, 1], [1, 4, 3, 7]):
            assert grid.at(*point) == pytest.approx(function(*point))

    def test_of_two_sweeps_the_grid_that_reaches_farthest(self):
        wide = {(a, b): a + b for a in (1, 2, 4) for b in (0, 1, 2, 8)}
        fine = {(a, b): a + b for a in (1, 1.5, 3) for b in (2, 3, 4, 5, 6, 7)}
        grid = whole_grid(fine | wide)
        assert grid.axes == [[1, 2, 4], [0, 1, 2, 8]]

    def test_a_grid_with_a_hole_is_refused(self):
        with pytest.raises(ValueError, match="not whole"):
            Grid([[1, 2]], np.array([1.0, np.nan]))


class TestProfiled:
    def test_a_step_is_the_sum_of_its_operators(self, profiled):
        """64 decodes of 1,024 keys, every table read here by hand."""
        folder = find("RTX4090/meta-llama/Llama-3.1-8B/bf16") / "tp1"

        def read(name):
            with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
                return list(csv.DictReader(file))

        dense = {row["layer"]: float(row["time_us"]) for row in read("dense") if row["tokens"] == "64"}
        head = sum(float(row["time_us"]) for row in read("per_sequence") if row["sequences"] == "64")
        attention = next(
            float(row["time_us"])
            for row in read("attention")
            if (row["prefill_chunk"], row["n_decode"], row["kv_decode"]) == ("0", "64", "1024")
        )
        once = dense.pop("embedding") + dense.pop("final_layernorm")
        layer = sum(dense.values()) + dense["layernorm"] + attention
        expected = (32 * layer + once + head) * 1e-6
        assert profiled.stage(Shape.of(decodes(64, 1024)), 0).kernels == pytest.approx(expected, rel=1e-9)

    def test_a_mixed_point_is_hit(self, profiled):
        seconds = profiled.measured.attention[None].seconds
        with gzip.open(find("RTX4090/meta-llama/Llama-3.1-8B/bf16") / "tp1" / "attention.csv.gz", "rt") as file:
            table = {tuple(map(int, row[:4])): float(row[4]) * 1e-6 for row in list(csv.reader(file))[1:]}
        for c, h, n, kv in [(512, 1024, 64, 1024), (16, 0, 1, 16), (2048, 16384, 128, 16384), (256, 4096, 0, 0)]:
            shape = Shape.of([chunk(h, c), *decodes(n, kv)])
            assert seconds(shape) == pytest.approx(table[c, h, n, kv], rel=1e-9), (c, h, n, kv)

    def test_like_prompts_cost_what_one_adds_each(self, profiled):
        one = profiled.measured.attention[None].seconds(Shape.of([chunk(0, 256)]))
        floor = profiled.measured.attention[None].prefill.at(0, 0)
        four = profiled.measured.attention[None].seconds(Shape.of([chunk(0, 256)] * 4))
        assert four == pytest.approx(floor + 4 * (one - floor), rel=0.01)
        whole = profiled.measured.attention[None].seconds(Shape.of([chunk(0, 1024)]))
        assert one < four < whole  # less than one prompt of as many tokens: fewer pairs

    def test_decodes_beyond_those_beside_a_chunk_add_what_they_add_alone(self, profiled):
        seconds = profiled.measured.attention[None].seconds
        more = seconds(Shape.of([chunk(0, 512), *decodes(200, 512)])) - seconds(
            Shape.of([chunk(0, 512), *decodes(128, 512)])
        )
        alone = seconds(Shape.of(decodes(200, 512))) - seconds(Shape.of(decodes(128, 512)))
        assert more == pytest.approx(alone, rel=1e-9)

    def test_skew_lies_between_mean_and_longest(self, profiled):
        seconds = profiled.measured.attention[None].seconds
        unlike = seconds(Shape.of([*decodes(8, 256), *decodes(8, 3840)]))
        mean, longest = (seconds(Shape.of(decodes(16, context))) for context in (2048, 3840))
        assert profiled.measured.attention[None].skew == pytest.approx(0.016, abs=5e-4)  # least squares over skew.csv
        assert unlike == pytest.approx(mean + profiled.measured.attention[None].skew * (longest - mean))

    def test_it_does_not_leave_its_tables_silently(self, profiled):
        far = Shape.of([chunk(0, 4096)])
        with pytest.raises(BeyondTable, match=r"tokens=4096 lies beyond the 2048 .* cost.extrapolate=true"):
            profiled.stage(far, 0)
        with pytest.raises(BeyondTable, match="decode_context=20000"):
            profiled.stage(Shape.of(decodes(4, 20_000)), 0)
        going_on = replace(profiled, extrapolate=True)
        with pytest.warns(UserWarning, match="extrapolated, as asked for"):
            assert going_on.stage(far, 0).kernels > 2 * profiled.stage(Shape.of([chunk(0, 2000)]), 0).kernels

    def test_one_warning_is_enough(self):
        bounds = Bounds("here", extrapolate=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                bounds.check("tokens", 9, 8)
        assert len(told) == 1

    def test_what_profiles_lack_comes_from_the_sheet(self):
        here = device("rtxpro6000")
        sheet, two = Roofline(LLAMA, here, 2), Profiled(LLAMA, here, 2)
        shape = Shape.of([chunk(0, 512), *decodes(8, 512)])
        ours, its = two.stage(shape, 0), sheet.stage(shape, 0)
        assert ours.communication == its.communication > 0
        assert (two.host(shape), two.transfer(shape), two.copy(3)) == (
            sheet.host(shape),
            sheet.transfer(shape),
            sheet.copy(3),
        )
        assert ours.compute <= ours.kernels
        assert ours.memory <= ours.kernels
        assert ours.kernels < Profiled(LLAMA, here, 1).stage(shape, 0).kernels

    def test_stages_add_up(self, profiled):
        halves = Profiled(LLAMA, device("rtx4090"), stages=2)
        shape = Shape.of(decodes(16, 700))
        assert sum(halves.stage(shape, stage).kernels for stage in (0, 1)) == pytest.approx(
            profiled.stage(shape, 0).kernels
        )

    def test_it_names_what_ships(self):
        with pytest.raises(ValueError, match=r"no profile of this model on device=H100 .*RTX4090/meta-llama"):
            Profiled(LLAMA, device("h100"))
        with pytest.raises(ValueError, match=r"tp=8 was not profiled .* it has tp1"):
            Profiled(LLAMA, device("rtx4090"), tp=8)
        with pytest.raises(ValueError, match=r"cost\.path=nowhere: no such folder"):
            Profiled(LLAMA, device("rtx4090"), path="nowhere")

    def test_experts_that_are_busy_grow_with_tokens(self):
        operators = moe().measured.operators
        # One token keeps 8 experts busy (50 us in the table), 64 nearly all of 128 (828 us).
        assert operators.with_experts(1, 1) == pytest.approx(76e-6, rel=0.02)
        assert operators.with_experts(64, 64) == pytest.approx(854e-6, rel=0.02)
        assert operators.with_mlp(64) == 0.0

    def test_a_share_of_the_experts_for_the_tokens_of_all(self):
        """DP attention: two ranks with half of the experts each compute for both ranks' tokens."""
        whole, half = moe(), moe(ep=2, pooling=2)
        rows, busy = Loads(uniform(MOE.experts), 2).of(256)
        assert (rows / 8, busy) == pytest.approx((128, 64), rel=0.1)
        step = Shape.of(decodes(64, 100))
        own, pooled = half.stage(step, 0, pooled=128), half.stage(step, 0)
        operators = half.measured.operators
        assert own.kernels - pooled.kernels == pytest.approx(48 * (operators.routed.at(128) - operators.routed.at(64)))
        # Half of the weights, which is nearly all that 64 tokens take.
        ratio = operators.routed.at(64) / whole.measured.operators.routed.at(64)
        assert 0.5 < ratio < 0.6
        assert half.stage(step, 0).kernels < whole.stage(step, 0).kernels
        # Half of the rows, which is nearly all that a thousand take.
        assert 0.5 < operators.routed.at(2048) / whole.measured.operators.routed.at(2048) < 0.55

    def test_experts_that_were_not_cut_so(self):
        with pytest.raises(
            ValueError, match=r"experts cut over 2 ranks were not profiled \(no tp2/moe\.csv\): set para"
        ):
            moe(pooling=2)

    def test_start_up_and_look_ups_are_fast(self):
        begun = process_time()
        cost = Profiled(LLAMA, device("rtxpro6000"))
        assert process_time() - begun < 2
        shape = Shape.of([chunk(100, 400), *decodes(50, 700)])
        begun = process_time()
        for _ in range(200):
            cost.stage(shape, 0)
        assert (process_time() - begun) / 200 < 300e-6  # 15 us on a quiet machine
