"""The cost model: cases worked by hand, monotonicity, physical bounds, and what issue 3 says an H200 can do."""

from dataclasses import replace
from math import hypot

import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from playground.core import Slice
from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost import ATTENTION_TILE, IDLE, Linear, Roofline, Shape
from playground.sim.cost.shape import Contexts
from playground.sim.device import Device

# Every figure a small round number, so that times can be worked out on paper.
MODEL = ModelShape("LlamaForCausalLM", 4, 8, 4, 2, 2, 16, 10)
DEVICE = Device(
    "unit",
    peak_flops=1000.0,
    memory_bandwidth=100.0,
    memory_bytes=1e6,
    link_bandwidth=50.0,
    host_bandwidth=20.0,
    gemm_fraction=1.0,
    attention_fraction=0.5,
    bandwidth_fraction=1.0,
    link_fraction=1.0,
    host_fraction=1.0,
    link_latency=0.5,
    host_latency=0.25,
    kernel_latency=2.0,
    eager_launch=3.0,
    graph_launch=1.0,
    gemm_tile=4,
)
UNIT = Roofline(MODEL, DEVICE, skew=0.0)


def device(name: str) -> Device:
    return instantiate(OmegaConf.load(f"conf/device/{name}.yaml"))


def part(start: int, length: int, samples: bool = True) -> Slice:
    return Slice(0, 0, 0, start, length, samples, ())


def decodes(rows: int, context: int) -> Shape:
    """So many decodes that read `context` keys each, their own included."""
    return Shape.of(part(context - 1, 1) for _ in range(rows))


def prefills(prompts: int, length: int) -> Shape:
    return Shape.of(part(0, length) for _ in range(prompts))


slices = st.lists(st.builds(part, st.integers(0, 5000), st.integers(1, 3000), st.booleans()), max_size=40)


class TestShape:
    def test_by_hand(self):
        shape = Shape.of([part(9, 1), part(4, 3, samples=False), part(19, 1)])
        assert shape.tokens == 5
        assert shape.prefill_tokens == 3
        assert (shape.sequences, shape.sampled, shape.decodes) == (3, 2, 2)
        assert (shape.decode_context, shape.decode_longest) == (10 + 20, 20)
        # The three tokens see 5, 6 and 7 keys; the chunk reads 7.
        assert (shape.prefill_pairs, shape.prefill_context, shape.chunks) == (18, 7, ((4, 3),))

    def test_of_nothing(self):
        assert Shape.of([]) == (*(0,) * 8, (), Contexts([]))

    @given(slices)
    def test_pairs_are_the_causal_sum(self, parts):
        expected = sum(one.start + i + 1 for one in parts if one.length > 1 for i in range(one.length))
        assert Shape.of(parts).prefill_pairs == expected

    @given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 50))
    def test_a_tick_is_the_shape_of_slices_one_further(self, starts, ticks):
        if not starts:
            return
        later = Shape.of(part(start + ticks, 1) for start in starts)
        assert Shape.of(part(start, 1) for start in starts).tick(ticks) == later

    @given(st.lists(st.integers(0, 50), max_size=9), st.integers(1, 60), st.integers(0, 20))
    def test_contexts_are_cut_one_by_one(self, starts, window, ticks):
        shape = Shape.of(part(start, 1) for start in starts).tick(ticks)
        assert shape.contexts.within(window) == sum(min(start + 1 + ticks, window) for start in starts)
        assert sum(shape.contexts) == shape.decode_context

    def test_contexts_at_the_windows_edge(self):
        shape = Shape.of(part(start, 1) for start in (5, 6, 7, 8))  # 6 to 9 keys
        assert [shape.contexts.within(window) for window in (5, 6, 7, 8, 9, 10)] == [20, 24, 27, 29, 30, 30]

    def test_prefills_do_not_tick(self):
        with pytest.raises(ValueError, match="only decodes tick: this shape has 3 prefill tokens"):
            Shape.of([part(0, 3)]).tick()


class TestByHand:
    # Linear FLOPs of a token: 4 layers x 2 x (192 + 384) = 4608; weights: 4 x (576 + 16) x 2 = 4736 bytes.
    # Element-wise bytes of a token: 4 x 2 x (3*16 + 4*8 + 2*(4 + 2*2)*2) = 896. Head: 2 x 80 FLOPs a row, 160 bytes.
    # KV: 4 x 16 = 64 bytes a key; attention: 4 x 32 = 128 FLOPs a pair. Logits: 10 x (2 + 4) = 60 bytes a row.

    def test_one_decode(self):
        cost = UNIT.stage(decodes(1, 10), 0)
        linear, stream = 4608 / 1000, 4736 / 100
        keys = (10 + ATTENTION_TILE) * 64 / 100
        head = hypot(160 / 1000, 160 / 100)
        assert cost.compute == pytest.approx(linear + (10 + ATTENTION_TILE) * 128 / 500 + 0.16)
        assert cost.memory == pytest.approx(stream + 8.96 + keys + 1.6 + 0.6)
        assert cost.kernels == pytest.approx(5 * 2.0 + hypot(linear, stream) + 8.96 + keys + head + 0.6)
        assert (cost.communication, cost.host) == (0.0, 1.0)
        assert cost.device_time == cost.kernels

    def test_a_chunk_that_samples_nothing(self):
        cost = UNIT.stage(Shape.of([part(10, 5, samples=False)]), 0)
        # 5 tokens are two tiles of 4; pairs 5 x 10 + 15 = 65, and 64 more queries over all 15 keys.
        linear, stream = 8 * 4.608, 47.36
        attention = (65 + ATTENTION_TILE * 15) * 128 / 500
        assert attention > 15 * 64 / 100
        assert cost.kernels == pytest.approx(10.0 + hypot(linear, stream) + 5 * 8.96 + attention)
        assert cost.host == 5 * 3.0

    def test_skew_is_a_share_of_the_longest(self):
        shape = Shape.of([part(9, 1), part(29, 1)])  # 10 and 30 keys: 40 in all, 60 if both were long
        extra = replace(UNIT, skew=0.5).stage(shape, 0).memory - UNIT.stage(shape, 0).memory
        assert extra == pytest.approx(0.5 * 20 * 64 / 100)

    def test_stages_share_the_layers_and_the_last_has_the_head(self):
        two = Roofline(MODEL, DEVICE, layers=(3, 1), skew=0.0)
        shape = decodes(2, 10)
        first, last, whole = two.stage(shape, 0), two.stage(shape, 1), UNIT.stage(shape, 0)
        assert first.memory + last.memory == pytest.approx(whole.memory)
        assert first.kernels + last.kernels == pytest.approx(whole.kernels)
        assert first.kernels == pytest.approx(3 * (whole.kernels - 2.0 - hypot(0.32, 1.6) - 1.2) / 4)

    def test_tensor_parallel_halves_the_work_and_talks(self):
        two = Roofline(MODEL, DEVICE, tp=2, skew=0.0)
        shape = Shape.of([part(0, 4, samples=False)])
        # 8 all-reduces of 0.5 s; each moves 2 x 1/2 x 8 x 2 = 16 bytes a token over 50 bytes/s.
        assert two.stage(shape, 0).communication == pytest.approx(8 * 0.5 + 4 * 8 * 16 / 50)
        assert two.stage(shape, 0).compute == pytest.approx(UNIT.stage(shape, 0).compute / 2)

    def test_kv_heads_are_copied_beyond_their_number(self):
        one_head = Roofline(MODEL, DEVICE, tp=2, skew=0.0)._stages[0].decode_memory
        assert Roofline(MODEL, DEVICE, tp=4, skew=0.0)._stages[0].decode_memory == one_head

    def test_host_transfer_and_copy(self):
        model = replace(UNIT, host_base=1.0, host_per_sequence=0.25, block_size=2)
        assert model.host(decodes(4, 10)) == 2.0
        assert model.transfer(decodes(4, 10)) == pytest.approx(0.5 + 4 * 8 * 2 / 50)
        assert model.copy(3) == pytest.approx(0.25 + 3 * 2 * 64 / 20)
        assert model.copy(0) == 0.0

    def test_a_short_eager_step_waits_for_its_launches(self):
        slow = replace(UNIT, device=replace(DEVICE, eager_launch=1000.0))
        shape = Shape.of([part(0, 2)])
        assert slow.stage(shape, 0).device_time == 5000.0
        assert slow.stage(decodes(2, 10), 0).host == 1.0

    def test_more_rows_than_the_graphs_hold_are_launched_eagerly(self):
        assert replace(UNIT, graph_rows=1).stage(decodes(2, 10), 0).host == 15.0

    def test_nothing_costs_nothing(self):
        assert UNIT.stage(Shape.of([]), 0) == Linear(1.0).stage(Shape.of([]), 0) == IDLE

    def test_linear(self):
        model = Linear(1.0, per_token=0.5, per_context=0.1, host_base=2.0, host_per_sequence=1.0)
        shape = Shape.of([part(9, 1), part(4, 3)])
        assert model.stage(shape, 0).device_time == pytest.approx(1.0 + 4 * 0.5 + 17 * 0.1)
        assert model.host(shape) == 4.0
        assert (Linear(1.0, per_block=0.5).copy(3), Linear(1.0, per_transfer=0.5).transfer(shape)) == (1.5, 0.5)


REAL = [
    Roofline(ModelShape.read("qwen3-8b"), device("h200")),
    Roofline(ModelShape.read("qwen2.5-32b"), device("l20"), stages=4),
    Roofline(ModelShape.read("llama-3.1-70b"), device("h100"), tp=4),
    Roofline(ModelShape.read("tiny"), device("cpu")),
    Roofline(ModelShape.read("qwen3-30b-a3b"), device("h200"), tp=2, ep=2),
    Roofline(ModelShape.read("deepseek-v3"), device("h200"), tp=8, stages=2),
    Roofline(ModelShape.read("gpt-oss-20b"), device("h100")),
]


class TestProperties:
    @given(st.sampled_from(REAL), slices, st.data())
    def test_never_faster_than_physics(self, model, parts, data):
        shape, stage = Shape.of(parts), data.draw(st.integers(0, model.stages - 1))
        if not shape.tokens:
            return
        cost, one = model.stage(shape, stage), model.model
        layout = Layout.of(one, model.tp, layers=model.layers, ep=model.ep)
        flops = read = 0.0
        for layer in layout.stage_layers(stage):
            window = one.window(layer) or one.max_length
            seen = sum(
                min(part.start + i + 1, window)
                for part in parts
                for i in (range(part.length) if part.length < 9 else ())
            )
            flops += layout.matrix_flops(layer) * shape.tokens + one.attention_flops / model.tp * seen
            read += layout.matrix_bytes(layer)
            read += layout.kv_bytes_per_token_layer * sum(min(part.start + 1, window) for part in parts)
        if stage == model.stages - 1 and shape.sampled:
            flops += one.head_flops * shape.sampled / model.tp
            read += one.head_bytes / model.tp
        assert cost.device_time >= max(flops / model.device.peak_flops, read / model.device.memory_bandwidth)
        assert cost.kernels >= max(cost.compute, cost.memory) * (1 - 1e-12)
        assert min(cost) >= 0

    @given(st.sampled_from(REAL), slices, st.builds(part, st.integers(0, 5000), st.integers(1, 3000), st.booleans()))
    def test_more_work_never_takes_less(self, model, parts, more):
        model = replace(model, graph_rows=0)  # a prefill more, and decodes are padded no longer
        before, after = (model.stage(Shape.of(some), model.stages - 1) for some in (parts, [*parts, more]))
        assert all(new >= old for new, old in zip(after[:4], before[:4], strict=True))

    @given(st.sampled_from(REAL), st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 100))
    def test_longer_contexts_never_take_less(self, model, starts, ticks):
        shape = Shape.of(part(start, 1) for start in starts)
        assert model.stage(shape.tick(ticks), 0).device_time >= model.stage(shape, 0).device_time

    @given(st.sampled_from(REAL), slices, slices)
    def test_one_mixed_step_is_cheaper_than_two(self, model, left, right):
        # Without skew: there one long decode makes the short ones of the other step wait a little.
        model = replace(model, skew=0.0, graph_rows=0)
        both, one, other = (model.stage(Shape.of(some), 0).kernels for some in ([*left, *right], left, right))
        assert max(one, other) * (1 - 1e-9) <= both <= (one + other) * (1 + 1e-9)


class TestRealDevices:
    @pytest.mark.parametrize(
        ("shape", "limit", "least", "most"),
        [
            (decodes(1, 512), 3.5e-3, 3.5e-3, 4.5e-3),
            (decodes(32, 1024), 4.6e-3, 4.6e-3, 6.0e-3),
            (decodes(128, 1024), 8.0e-3, 8.0e-3, 10.5e-3),
            (prefills(8, 2048), 0.31, 0.31, 0.45),
        ],
        ids=["1x512", "32x1k", "128x1k", "prefill"],
    )
    def test_qwen3_8b_on_an_h200_lies_between_limit_and_goal(self, shape, limit, least, most):
        assert least <= REAL[0].stage(shape, 0).device_time <= most

    def test_qwen25_32b_on_four_l20(self):
        model = REAL[1]
        # 16 layers x 487.6e6 weights x 2 bytes / 864 GB/s = 18.06 ms; with the head's 1.56 GB 19.86 on the last.
        floors = [model._stages[stage].linear_memory * model.device.bandwidth_fraction for stage in range(4)]
        assert floors == pytest.approx([18.06e-3] * 4, rel=1e-3)
        per_token = model.stage(prefills(1, 2048), 0).device_time / 2048
        assert 0.21e-3 <= per_token <= 0.24e-3

    def test_one_token_more_than_a_tile_is_dearer(self):
        """Sarathi's and Vidur's 257 against 256 tokens: +16 to +32 % in the matrix products."""
        at, over = (REAL[0].stage(prefills(1, tokens), 0).device_time for tokens in (256, 257))
        assert 1.05 <= over / at <= 1.32

    def test_piggybacked_decodes_are_nearly_free(self):
        """Sarathi's Yi-34B table: 1021 + 3 against 1024 tokens within 2 %."""
        prompt = [part(0, 1021, samples=False)]
        mixed = REAL[0].stage(Shape.of([*prompt, *(part(1000, 1) for _ in range(3))]), 0).kernels
        assert mixed / REAL[0].stage(Shape.of([part(0, 1024, samples=False)]), 0).kernels <= 1.05


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tp": 3}, "tp=3 must divide the model's 4 heads"),
            ({"tp": 0}, "tp=0 must be at least 1"),
            ({"stages": 5}, r"stages=5 must lie in 1\.\.4, the model's layers"),
            ({"layers": (3, 2)}, r"layers=\[3, 2\] sum to 5; the model has 4"),
            ({"layers": (4, 0)}, "every stage needs at least 1 layer"),
            ({"layers": (2, 2), "stages": 3}, r"stages=3 but layers=\[2, 2\] name 2"),
            ({"skew": 2.0}, r"cost\.skew=2\.0 must lie in 0\.\.1"),
            ({"block_size": 0}, r"cost\.block_size=0 must be at least 1"),
            ({"graph_rows": -1}, r"cost\.graph_rows=-1 must be 0 or more"),
        ],
    )
    def test_options_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            Roofline(MODEL, DEVICE, **options)

    def test_a_model_that_does_not_fit(self):
        with pytest.raises(
            ValueError, match=r"device=RTX4090 has 25\.8 GB to use and stage 0 needs 65\.5 GB.*raise tp"
        ):
            Roofline(ModelShape.read("qwen2.5-32b"), device("rtx4090"))

    def test_linear_names_its_option(self):
        with pytest.raises(ValueError, match=r"cost\.per_token=-1 must be 0 or more seconds"):
            Linear(1.0, per_token=-1)
