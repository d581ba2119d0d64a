"""What latent attention, windows, experts, number formats and graphs cost: cases worked by hand."""

from dataclasses import replace
from math import hypot

import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from playground.core import Slice
from playground.model import Compressed, Experts, Indexer, Latent, ModelShape, Precision
from playground.sim.capacity import Layout, kv_blocks
from playground.sim.cost import ATTENTION_TILE, Roofline, Shape
from playground.sim.device import Device

# As in test_cost: every figure small and round.
MODEL = ModelShape("LlamaForCausalLM", 4, 8, 4, 2, 2, 16, 10)
LATENT = replace(MODEL, architecture="DeepseekV2ForCausalLM", kv_heads=4, head_dim=3, latent=Latent(None, 6, 2, 1, 2))
EXPERTS = Experts(8, 2, 4, shared=4, dense=(0,))
MIXED = replace(MODEL, architecture="Qwen2MoeForCausalLM", experts=EXPERTS)
DEVICE = Device(
    "unit",
    peak_flops=1000.0,
    memory_bandwidth=100.0,
    memory_bytes=1e6,
    link_bandwidth=50.0,
    host_bandwidth=20.0,
    eight_bit_flops=4000.0,
    gemm_fraction=1.0,
    expert_fraction=0.5,
    eight_bit_fraction=0.5,
    eight_bit_expert_fraction=0.25,
    attention_fraction=0.5,
    bandwidth_fraction=1.0,
    link_fraction=1.0,
    kernel_latency=2.0,
    gather_fraction=1.0,
    expert_latency=0.5,
    expert_width=0,
    eager_launch=3.0,
    graph_launch=1.0,
    gemm_tile=1,
)


def part(start: int, length: int, samples: bool = False) -> Slice:
    return Slice(0, 0, 0, start, length, samples, ())


def shape(*chunks: tuple[int, int]) -> Shape:
    """Of (start, length), none sampled."""
    return Shape.of(part(*chunk) for chunk in chunks)


def roofline(model: ModelShape, **options) -> Roofline:
    return Roofline(model, DEVICE, skew=0.0, **options)


class TestLatent:
    # A layer: query 8 x 4 x 3 = 96, compression 8 x 7 = 56, expansion 6 x 4 x 4 = 96, output 4 x 2 x 8 = 64: 312; MLP
    # 384. Norms: 2 x 8, and 6 of the latent vector. KV: 7 x 2 = 14 bytes a token.

    def test_parameters(self):
        assert LATENT.attention_weights == 312
        assert LATENT.layer_parameters == 312 + 384 + 16 + 6
        assert LATENT.kv_bytes_per_token == 4 * 14

    def test_a_decode_works_on_what_is_cached(self):
        # Scores over 7 elements, sums over 6, in 4 heads: 2 x 4 x 13 = 104 FLOPs; 14 bytes.
        more = roofline(LATENT).stage(shape((20, 1)), 0)
        less = roofline(LATENT).stage(shape((10, 1)), 0)
        assert more.compute - less.compute == pytest.approx(10 * 4 * 104 / 500)
        assert more.memory - less.memory == pytest.approx(10 * 4 * 14 / 100)

    def test_a_prefill_expands_what_was_before(self):
        # Pairs: 2 x 4 x (3 + 2) = 40 FLOPs. Earlier tokens: 2 x 96 FLOPs to expand each; all: 4 x 5 elements written
        # and read beside the 14 bytes.
        cost = roofline(LATENT).stage(shape((10, 5)), 0)
        tokens, expanded = 5 * 4 * 2 * 696 / 1000, 10 * 4 * 192 / 1000
        pairs = (65 + ATTENTION_TILE * 15) * 4 * 40 / 500
        assert cost.compute == pytest.approx(tokens + expanded + pairs)
        fresh = roofline(LATENT).stage(shape((0, 5)), 0)
        assert cost.memory - fresh.memory == pytest.approx(10 * 4 * (14 + 2 * 20 * 2) / 100)

    def test_ranks_hold_the_whole_cache_and_the_compression(self):
        layout = Layout.of(LATENT, tp=4)
        assert layout.kv_bytes_per_token_layer == 14
        assert layout.attention_weights(0) == 56 + 256 / 4
        # Heads are divided: a fourth of the FLOPs of a pair, all of the bytes.
        one, four = roofline(LATENT)._stages[0], roofline(LATENT, tp=4)._stages[0]
        assert four.decode_compute == pytest.approx(one.decode_compute / 4)
        assert four.decode_memory == one.decode_memory

    def test_deepseek_v3_fits_eight_h200_with_fp8(self):
        h200 = replace(DEVICE, memory_bytes=150754820096)
        blocks = kv_blocks(ModelShape.read("deepseek-v3"), h200, tp=8)
        # 135.7 GB to use, 84 GB of weights sharded and 1.2 GB not: some 48 GB of 1,124,352 bytes a block.
        assert blocks == pytest.approx(44_000, rel=0.05)


class TestIndexer:
    INDEXED = replace(LATENT, architecture="DeepseekV32ForCausalLM", indexer=Indexer(3, 5, 8))

    def test_a_decode_scores_all_keys_and_sees_the_best(self):
        more, less, few = (roofline(self.INDEXED).stage(shape((start, 1)), 0) for start in (99, 49, 6))
        # 50 keys more to score: 3 x 5 products in each of 4 layers, and 5 + 4 bytes.
        assert more.compute - less.compute == pytest.approx(4 * 50 * 30 / 500)
        assert more.memory - less.memory == pytest.approx(4 * 50 * 9 / 100)
        # Of 8 keys and more 8 are seen: 7 wide, 4 heads of 2 x (7 + 6).
        assert less.compute - few.compute == pytest.approx(4 * (43 * 30 + 104) / 500)
        assert less.memory - few.memory == pytest.approx(4 * (43 * 9 + 14) / 100)

    def test_a_prefill_works_on_what_is_cached(self):
        one = roofline(self.INDEXED)._stages[0]
        assert one.expansion == 0.0
        (best,) = one.windowed
        assert (best.window, best.prefill_compute) == (8, best.decode_compute)
        # Shorter ones see everything, and score it, too.
        more = roofline(self.INDEXED).stage(shape((0, 5)), 0).compute - roofline(LATENT).stage(shape((0, 5)), 0).compute
        pairs = 15 + ATTENTION_TILE * 5
        weights = 8 * 3 * 5 + 8 * (5 + 3)
        assert more == pytest.approx(4 * (pairs * (30 + 104 - 2 * 4 * 5) / 500 + 5 * 2 * weights / 1000))

    def test_every_rank_scores(self):
        whole, half = (roofline(self.INDEXED, tp=tp)._stages[0] for tp in (1, 2))
        assert (half.decode_compute, half.decode_memory) == (whole.decode_compute, whole.decode_memory)
        assert half.windowed[0].decode_compute == whole.windowed[0].decode_compute / 2

    def test_its_keys_are_cached(self):
        assert self.INDEXED.kv_bytes_per_token == LATENT.kv_bytes_per_token + 4 * 9
        assert Layout.of(self.INDEXED, tp=2).kv_bytes_per_token(0) == self.INDEXED.kv_bytes_per_token
        # DeepSeek-V3.2: 576 elements, and 132 bytes of the indexer, in 61 layers.
        assert ModelShape.read("deepseek-v3.2").kv_bytes_per_token == 61 * (1152 + 132)


class TestWindows:
    def windowed(self, *windows: int | None) -> ModelShape:
        return replace(MODEL, windows=windows)

    def test_decodes_read_no_further(self):
        model = roofline(self.windowed(8, 8, 8, None))
        cost, full = model.stage(shape((19, 1)), 0), roofline(MODEL).stage(shape((19, 1)), 0)
        # 20 keys in one layer and 8 in three, of 16 bytes each.
        assert full.memory - cost.memory == pytest.approx(3 * (20 - 8) * 16 / 100)
        assert full.compute - cost.compute == pytest.approx(3 * (20 - 8) * 32 / 500)

    def test_skew_ends_at_the_window(self):
        step = shape((3, 1), (99, 1))  # 4 and 8 keys of a window of 8: half of the 4 that the shorter one lacks
        even, skewed = (Roofline(self.windowed(8, 8, 8, 8), DEVICE, skew=skew).stage(step, 0) for skew in (0.0, 0.5))
        assert skewed.memory - even.memory == pytest.approx(0.5 * 4 * 4 * 16 / 100)
        short = shape((1, 1), (3, 1))  # 2 and 4: half of the 2 that the shorter one lacks
        even, skewed = (Roofline(self.windowed(8, 8, 8, 8), DEVICE, skew=skew).stage(short, 0) for skew in (0.0, 0.5))
        assert skewed.memory - even.memory == pytest.approx(0.5 * 2 * 4 * 16 / 100)

    def test_decodes_of_unlike_length_are_cut_one_by_one(self):
        model = roofline(self.windowed(8, 8, 8, 8))
        more, less = (model.stage(shape((2, 1), (start, 1)), 0) for start in (99, 4))
        # 3 and 8 keys, 3 and 5.
        assert more.memory - less.memory == pytest.approx(4 * 3 * 16 / 100)
        # Where only the sum is known, they are taken to be alike.
        unknown = shape((2, 1), (99, 1))._replace(contexts=None)
        assert model.stage(unknown, 0).memory - less.memory == pytest.approx(4 * 8 * 16 / 100)

    def test_a_row_of_padding_reads_one_key(self):
        graphs, eager = roofline(self.windowed(8, 8, 8, 8)), roofline(self.windowed(8, 8, 8, 8), graph_rows=0)
        assert graphs.stage(shape(*((9, 1),) * 3), 0)[:4] == eager.stage(shape(*((9, 1),) * 3, (0, 1)), 0)[:4]

    def test_short_contexts_are_read_whole(self):
        cost = roofline(self.windowed(8, 8, 8, None)).stage(shape((3, 1), (4, 1)), 0)
        assert cost == pytest.approx(roofline(MODEL).stage(shape((3, 1), (4, 1)), 0))

    @given(st.lists(st.tuples(st.integers(0, 60), st.integers(2, 40)), min_size=1, max_size=5), st.integers(1, 70))
    def test_prefills_see_what_the_mask_shows(self, chunks, window):
        seen = read = 0
        for start, length in chunks:
            rows = [range(max(0, end - window), end) for end in range(start + 1, start + length + 1)]
            seen += sum(map(len, rows))
            read += len(set().union(*rows))
        cost = roofline(self.windowed(window, window, window, window)).stage(shape(*chunks), 0)
        none = roofline(self.windowed(*(None,) * 4)).stage(shape(*chunks), 0)
        full = Shape.of(part(*chunk) for chunk in chunks)
        fewer = full.prefill_pairs - seen + ATTENTION_TILE * (full.prefill_context - read)
        assert none.compute - cost.compute == pytest.approx(4 * 32 * fewer / 500)
        assert none.memory - cost.memory == pytest.approx(4 * 16 * (full.prefill_context - read) / 100)

    def test_each_stage_has_its_own(self):
        model = roofline(self.windowed(8, 8, None, None), stages=2)
        first, last = (model.stage(shape((99, 1)), stage).memory for stage in (0, 1))
        assert last - first == pytest.approx(2 * (100 - 8) * 16 / 100)


class TestCompressed:
    COMPRESSED = Compressed(6, 2, 3, 8, (0, 4, 128, 4), 4, 3, 5, 4)

    def model(self) -> ModelShape:
        return replace(MODEL, architecture="DeepseekV4ForCausalLM", compressed=self.COMPRESSED, kv_heads=1)

    def test_a_decode_by_hand(self):
        more, less = (roofline(self.model()).stage(shape((start, 1)), 0) for start in (1279, 1023))
        # 256 keys more, all beyond windows of 8 and of the best 4 x 4: two indexers of 3 x 5 over a fourth of them, and
        # 128-fold entries of 2 wide in 4 heads.
        assert more.compute - less.compute == pytest.approx((2 * 64 * 30 + 2 * 32) / 500)
        assert more.memory - less.memory == pytest.approx((2 * 64 * 5 + 2 * 2) * 2 / 100)

    def test_cache_by_hand(self):
        # Two layers hold (2 + 5) / 4 elements a token, one 2 / 128.
        assert self.model().kv_bytes_per_token == (2 * 7 / 4 + 2 / 128) * 2
        assert Layout.of(self.model(), tp=4).kv_bytes_per_token(0) == self.model().kv_bytes_per_token

    def test_layers_differ_in_weights(self):
        layout = Layout.of(self.model(), layers=(1, 3))
        whole = sum(layout.weight_bytes(stage) for stage in range(2))
        assert whole == pytest.approx(self.model().weight_bytes - 16)  # the last norm's 8 are nobody's

    def test_streams_are_mixed_and_sent(self):
        one, four = roofline(MODEL), roofline(replace(MODEL, streams=4))
        # Two maps of 24 x 32 a layer; (3 x 4 + 2) x 8 elements in place of 4 x 8; four hidden states to the next stage.
        assert four._stages[0].linear_compute - one._stages[0].linear_compute == pytest.approx(
            4 * 2 * 1536e-3 + 4 * 2 * 54e-3
        )
        assert four._stages[0].activation - one._stages[0].activation == pytest.approx(4 * 80 * 2 / 100)
        assert four.transfer(shape((9, 1))) - one.transfer(shape((9, 1))) == pytest.approx(3 * 16 / 50)


class TestExperts:
    # Attention 192 in each of 4 layers; MLP 384 in the first; in three a router 64, shared experts 96, and 8 of 96.

    def test_parameters(self):
        assert MIXED.expert_layers == 3
        assert MIXED.expert_layer_parameters == 192 + 64 + 96 + 8 * 96 + 16
        assert MIXED.parameters == 592 + 3 * 1136 + 160 + 8
        assert MIXED.active_parameters == MIXED.parameters - 3 * 6 * 96

    def test_one_token_by_hand(self):
        cost = roofline(MIXED).stage(shape((9, 1)), 0)
        common = 2 * (4 * 192 + 384 + 3 * 160)
        read = 2 * (4 * 192 + 384 + 3 * 160 + 4 * 16)
        # Two experts, 2 x 96 FLOPs and 192 bytes each, at half of the peak.
        routed, moved = 3 * 2 * 192 / 500, 3 * 2 * 192 / 100
        # Two picks of 16 written and read, and of 20 between: 2 bytes each.
        gathered = 3 * 2 * (16 + 20) * 2 / 100
        attention = (10 + ATTENTION_TILE) * 4
        # Gate, up and product of 16 or 4 wide, norms 32, query 16, keys and values 16.
        elements = (3 * 16 + 3 * 3 * 4 + 4 * (32 + 16 + 16)) * 2 / 100
        assert cost.compute == pytest.approx(common / 1000 + routed + attention * 32 / 500)
        assert cost.memory == pytest.approx(read / 100 + moved + gathered + elements + attention * 16 / 100)
        kernels = 5 * 2.0 + 3 * 0.5 - 2.0 + 2.0 + hypot(common / 1000, read / 100) + hypot(routed, moved)
        assert cost.kernels == pytest.approx(kernels + gathered + elements + attention * 16 / 100)

    def test_many_tokens_read_every_expert_once(self):
        model = roofline(MIXED)
        one = model._stages[0]
        more, less = (model.stage(shape((0, tokens)), 0).compute for tokens in (401, 400))
        pairs = one.prefill_compute * (401 + ATTENTION_TILE)
        # A token more: 2 picks more; that its experts' weights are read already.
        assert more - less == pytest.approx(one.linear_compute + pairs + 3 * 2 * 192 / 500)

    def test_experts_dealt_over_ranks(self):
        whole, dealt = Layout.of(MIXED, tp=2), Layout.of(MIXED, tp=2, ep=2)
        assert (whole.experts_held, whole.expert_slices, whole.expert_bytes) == (8, 2, 96)
        assert (dealt.experts_held, dealt.expert_slices, dealt.expert_bytes) == (4, 1, 192)
        assert whole.weight_bytes(0) == dealt.weight_bytes(0)
        assert roofline(MIXED, tp=2)._stages[0].expert_activation == pytest.approx(3 * 2 * (16 + 10) * 2 / 100)
        assert Layout.of(MIXED, tp=2, ep=2, pooling=2).expert_slices == 2
        # Two replicas that share the experts hold half of them each.
        pooled = Layout.of(MIXED, ep=2, pooling=2)
        assert Layout.of(MIXED).weight_bytes(0) - pooled.weight_bytes(0) == 3 * 4 * 192

    def test_a_step_takes_the_busiest_rank(self):
        sliced, dealt = roofline(MIXED, tp=4), roofline(MIXED, tp=4, ep=4)
        step = shape((0, 64))
        # Sliced: 128 rows of a fourth; dealt: 32 whole rows on average, and more on the busiest of four.
        least = sliced.stage(step, 0).compute
        assert least < dealt.stage(step, 0).compute < 1.3 * least
        skewed = roofline(MIXED, tp=4, ep=4, expert_skew=1.0)
        assert skewed.stage(step, 0).compute > dealt.stage(step, 0).compute

    def test_a_histogram_names_the_rank_that_waits_for(self):
        all_on_one = roofline(MIXED, tp=4, ep=4, expert_counts=[1, 1, 0, 0, 0, 0, 0, 0])
        one = roofline(MIXED, tp=4)
        # Both picks of each token on one rank, whole: four times the rows' work of slices.
        more = all_on_one.stage(shape((0, 64)), 0).compute - one.stage(shape((0, 64)), 0).compute
        assert more == pytest.approx(3 * 128 * 192 * (1 - 1 / 4) / 500)

    def test_narrow_slices_are_multiplied_more_slowly(self):
        narrow = replace(DEVICE, expert_width=6)
        for tp, width in ((1, 4), (2, 2)):
            slow = Roofline(MIXED, narrow, tp=tp)._stages[0].expert_compute
            assert slow == pytest.approx(Roofline(MIXED, DEVICE, tp=tp)._stages[0].expert_compute * (1 + 6 / width))

    def test_gathering_reaches_less_than_streaming(self):
        slow = Roofline(MIXED, replace(DEVICE, gather_fraction=0.25))._stages[0].expert_activation
        assert slow == pytest.approx(4 * roofline(MIXED)._stages[0].expert_activation)

    def test_experts_of_four_bits_are_unpacked_on_their_way(self):
        bits = {name: replace(MIXED, precision=Precision(experts=name)) for name in ("int8", "mxfp4")}
        slow = replace(DEVICE, unpack_fraction=0.5)
        four, eight = (Roofline(bits[name], slow)._stages[0].expert_memory for name in ("mxfp4", "int8"))
        assert four == pytest.approx(2 * 4.25 / 8 * eight)

    def test_rows_of_an_expert_fill_small_tiles(self):
        tiled = Roofline(MIXED, replace(DEVICE, gemm_tile=64), skew=0.0)
        load = tiled._loads.of(5)
        one = tiled._stages[0]
        assert tiled._experts(one, 5).compute == pytest.approx(one.expert_compute * (load.rows + 8 * load.distinct))

    def test_finding_ones_own_tokens_and_quantising_them_take_longer(self):
        def latency(model=MIXED, **options):
            device = replace(DEVICE, dealt_latency=7.0, quantise_latency=11.0, dealt_packed_latency=13.0)
            return Roofline(model, device, tp=2, **options)._stages[0].latency

        assert latency(ep=2) - latency() == pytest.approx(3 * 7.0)
        assert latency(replace(MIXED, precision=Precision(experts="fp8"))) - latency() == pytest.approx(3 * 11.0)
        four = replace(MIXED, precision=Precision(experts="int4"))
        assert latency(four) == latency()
        assert latency(four, ep=2) - latency(four) == pytest.approx(3 * 13.0)

    def test_kernels_of_four_bits_gather_their_own_only(self):
        four = replace(MIXED, precision=Precision(experts="mxfp4"))
        gathered = [roofline(model, ep=4, pooling=4)._stages[0].expert_activation for model in (MIXED, four)]
        assert gathered[0] == pytest.approx(4 * gathered[1])

    def test_pooled_tokens_of_other_ranks(self):
        model = roofline(MIXED, ep=4, pooling=4)
        own, pooled = model.stage(shape((9, 1)), 0), model.stage(shape((9, 1)), 0, pooled=400)
        # 200 rows on average, all but a few of the two experts' weights.
        assert pooled.compute - own.compute > 3 * 199 * 192 / 500
        assert model.stage(shape((9, 1)), 0, pooled=1) == own

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ep": 3}, "ep=3 must divide the model's 8 experts"),
            ({"ep": 2}, "ep=2 must divide the 1 ranks that share the experts"),
            ({"ep": 0}, "ep=0 must be at least 1"),
            ({"pooling": 0}, "pooling=0 must be at least 1"),
            ({"expert_skew": -1.0}, r"cost\.expert_skew=-1\.0 must be 0 or more"),
            ({"expert_skew": 1.0, "expert_counts": [1] * 8}, "are both given: choose one"),
            ({"expert_counts": [1] * 7}, r"cost\.expert_counts has 7 entries"),
        ],
    )
    def test_options_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            roofline(MIXED, **options)

    def test_no_experts_to_deal_out(self):
        with pytest.raises(ValueError, match="ep=2: LlamaForCausalLM has no experts to deal out; set ep=1"):
            roofline(MODEL, tp=2, ep=2)


def test_an_encoder_lies_on_the_first_stage():
    beside, plain = Layout.of(replace(MODEL, encoder_parameters=100), stages=2), Layout.of(MODEL, stages=2)
    assert [beside.weight_bytes(stage) - plain.weight_bytes(stage) for stage in range(2)] == [200, 0]


class TestPrecision:
    def test_eight_bits_are_half_of_the_bytes_at_another_rate(self):
        model = replace(MODEL, precision=Precision("int8_a8"))
        plain, small = roofline(MODEL)._stages[0], roofline(model)._stages[0]
        assert small.linear_memory == pytest.approx((4 * 576 + 4 * 16 * 2) / 100)
        assert small.linear_compute == pytest.approx(plain.linear_compute / 2)  # 4000 x 0.5 to 1000
        assert small.head_memory == plain.head_memory

    def test_weights_alone_are_multiplied_in_the_dtype(self):
        for name, bits in {"fp8_a16": 8, "int4": 4 + 20 / 128, "nvfp4": 4.5, "mxfp4": 4.25}.items():
            small = roofline(replace(MODEL, precision=Precision(name)))._stages[0]
            assert small.linear_compute == roofline(MODEL)._stages[0].linear_compute
            assert small.linear_memory == pytest.approx((4 * 576 * bits / 8 + 4 * 16 * 2) / 100)

    def test_a_device_without_eight_bit_products(self):
        model = replace(MODEL, precision=Precision("fp8"))
        old = Roofline(model, replace(DEVICE, eight_bit_flops=None))
        assert old._stages[0].linear_compute == roofline(MODEL)._stages[0].linear_compute

    def test_experts_have_a_format_of_their_own(self):
        plain = roofline(MIXED)._stages[0]
        small = roofline(replace(MIXED, precision=Precision(experts="fp8")))._stages[0]
        assert small.linear_memory == plain.linear_memory
        assert small.expert_memory == pytest.approx(plain.expert_memory / 2, rel=1e-3)
        assert small.expert_compute == pytest.approx(plain.expert_compute / 2)  # 4000 x 0.25 to 1000 x 0.5

    def test_fp8_cache_holds_twice_the_tokens(self):
        half = replace(MODEL, precision=Precision(kv="fp8"))
        assert kv_blocks(half, DEVICE, reserve_bytes=0) == pytest.approx(
            2 * kv_blocks(MODEL, DEVICE, reserve_bytes=0), abs=1
        )
        assert roofline(half)._stages[0].decode_memory == roofline(MODEL)._stages[0].decode_memory / 2
        assert roofline(half).copy(8) == pytest.approx(DEVICE.host_latency + 8 * 16 * 32 / DEVICE.host_link)

    def test_smaller_weights_leave_more_room(self):
        device = replace(DEVICE, memory_bytes=6000)
        more = kv_blocks(replace(MODEL, precision=Precision("fp8_a16")), device, block_size=1, reserve_bytes=0)
        # 4 x 576 bytes less, 64 a block.
        assert more - kv_blocks(MODEL, device, block_size=1, reserve_bytes=0) == 4 * 576 // 64


# Qwen3-30B-A3B in AIConfigurator's table for H200 (vLLM 0.24, bf16), which the sheet's figures were not fitted to.
@pytest.mark.parametrize(
    ("slices", "ep", "tokens", "seconds"),
    [
        (1, 1, 256, 339e-6),
        (1, 1, 16384, 2463e-6),
        (8, 1, 1024, 111e-6),
        (8, 1, 4096, 272e-6),
        (4, 1, 1024, 165e-6),
        (1, 8, 1024, 126e-6),
        (1, 8, 4096, 289e-6),
        (1, 32, 16384, 831e-6),
        (1, 64, 1024, 95e-6),
    ],
)
def test_experts_of_qwen3_30b_on_an_h200(slices, ep, tokens, seconds):
    sheet = instantiate(OmegaConf.load("conf/device/h200.yaml"))
    one = Roofline(ModelShape.read("qwen3-30b-a3b"), sheet, ep=ep, pooling=ep * slices)
    # Even shares, as in the table: not those of the busiest rank.
    rows, own = 8 * tokens / ep, 128 / ep
    stage = one._stages[0]
    kernels = (
        hypot(stage.expert_compute * (rows + 8 * own), stage.expert_memory * own) + stage.expert_activation * tokens
    )
    latency = stage.latency - 49 * sheet.kernel_latency
    assert (kernels + latency) / 48 == pytest.approx(seconds, rel=0.15)


class TestOneLaunch:
    def test_a_decode_beside_a_prefill_fills_a_tile(self):
        tiled, plain = Roofline(MODEL, replace(DEVICE, decode_tile=64), skew=0.0), roofline(MODEL)
        mixed, alone = shape((9, 1), (0, 2)), shape((9, 1))
        more = tiled.stage(mixed, 0).compute - plain.stage(mixed, 0).compute
        assert more == pytest.approx(63 * (10 + ATTENTION_TILE) * 4 * 32 / 500)
        assert tiled.stage(mixed, 0).kernels > plain.stage(mixed, 0).kernels
        assert tiled.stage(alone, 0) == plain.stage(alone, 0)

    def test_in_windows_too(self):
        windowed = replace(MODEL, windows=(8,) * 4)
        tiled, plain = Roofline(windowed, replace(DEVICE, decode_tile=64), skew=0.0), roofline(windowed)
        more = tiled.stage(shape((9, 1), (0, 2)), 0).compute - plain.stage(shape((9, 1), (0, 2)), 0).compute
        assert more == pytest.approx(63 * (8 + ATTENTION_TILE) * 4 * 32 / 500)

    def test_latent_attention_has_a_kernel_for_each(self):
        tiled = Roofline(LATENT, replace(DEVICE, decode_tile=64), skew=0.0)
        assert tiled.stage(shape((9, 1), (0, 2)), 0) == roofline(LATENT).stage(shape((9, 1), (0, 2)), 0)


class TestGraphs:
    def test_decodes_are_padded_to_the_next_size(self):
        graphs, eager = roofline(MODEL), roofline(MODEL, graph_rows=0)
        five, eight = (Shape.of(part(9, 1, True) for _ in range(rows)) for rows in (5, 8))
        padded = graphs.stage(five, 0)
        # Three rows more in every product, with one key each.
        expected = eager.stage(
            Shape.of([*(part(9, 1, True) for _ in range(5)), *(part(0, 1, True) for _ in range(3))]), 0
        )
        assert padded[:4] == pytest.approx(expected[:4])
        assert (padded.host, eager.stage(five, 0).host) == (1.0, 15.0)
        assert graphs.stage(eight, 0)[:4] == eager.stage(eight, 0)[:4]

    def test_sizes_are_the_engines_unless_given(self):
        from playground.graphs import decode_sizes

        model = roofline(MODEL, graph_rows=20)
        assert sorted(set(model._padded[1:])) == list(decode_sizes(20)) == [1, 2, 4, 8, 16, 20]
        given = roofline(MODEL, graph_sizes=(4, 16))
        assert given._padded == (0, 4, 4, 4, 4, *(16,) * 12)
        assert given.stage(shape(*((9, 1),) * 17), 0).host == 15.0

    def test_a_step_with_a_prefill_is_not_padded(self):
        mixed = shape((9, 1), (9, 1), (9, 1), (0, 2))
        assert roofline(MODEL).stage(mixed, 0) == roofline(MODEL, graph_rows=0).stage(mixed, 0)

    def test_a_mixed_step_is_padded_as_the_engine_pads_it(self):
        graphs, eager = roofline(MODEL, mixed_graphs=True), roofline(MODEL, graph_rows=0)
        padded = graphs.stage(shape((9, 1), (9, 1), (9, 1), (0, 4), (3, 3)), 0)
        rows = shape(*((9, 1),) * 3, *((0, 1),) * 5, (0, 4), (3, 3))
        # 8 decodes and 80 tokens of prefills; the head for each decode and for 16 chunks.
        assert padded[:4] == eager.stage(rows._replace(tokens=88, sampled=24), 0)[:4]
        assert padded.host == 1.0

    @pytest.mark.parametrize(
        ("decodes", "lengths", "padded"),
        [
            (0, (79,), (8, 80)),
            (9, (80,), (32, 144)),
            (250, (527,), (256, 528)),
            (0, (2,) * 16, (8, 80)),
            (0, (2,) * 17, None),
            (0, (528,), None),
            (257, (2,), None),
        ],
    )
    def test_what_a_mixed_graph_holds(self, decodes, lengths, padded):
        step = shape(*((9, 1),) * decodes, *((0, length) for length in lengths))
        cost, eager = (roofline(MODEL, mixed_graphs=on).stage(step, 0) for on in (True, False))
        if padded is None:
            assert cost == eager
            return
        rows, tokens = padded
        whole = step._replace(tokens=rows + tokens, decodes=rows, sampled=rows + 16)
        whole = whole._replace(decode_context=step.decode_context + rows - decodes)
        assert cost == roofline(MODEL, graph_rows=0).stage(whole, 0)._replace(host=1.0)

    def test_without_graphs_there_are_no_mixed_ones(self):
        off = roofline(MODEL, graph_rows=0, mixed_graphs=True)
        assert off.stage(shape((0, 2)), 0) == roofline(MODEL, graph_rows=0).stage(shape((0, 2)), 0)

    def test_sizes_that_cannot_be(self):
        with pytest.raises(ValueError, match=r"cost\.graph_sizes=\[0, 4\] must be numbers of rows, at least 1 each"):
            roofline(MODEL, graph_sizes=[0, 4])
