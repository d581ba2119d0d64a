"""AIConfigurator's kernel tables: small ones of every kind, and steps put together from them by hand."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from playground.core import Slice
from playground.model import Experts, Latent, ModelShape, Precision
from playground.sim.cost import Profiled, Roofline, Shape
from playground.sim.cost.__main__ import main
from playground.sim.cost.kernels import ELEMENTWISE, found
from playground.sim.cost.tables import BeyondTable
from tests.playground.test_cost import DEVICE

MODEL = ModelShape("LlamaForCausalLM", 2, 64, 4, 2, 16, 96, 256)
EXPERTS = replace(MODEL, experts=Experts(8, 2, 32, shared=32, dense=(0,)))
WINDOWED = replace(MODEL, windows=(8, None))
SYSTEM = replace(DEVICE, name="H200", memory_bytes=1e9, memory_bandwidth=1e9)
PRODUCT = 1e-6
"""Milliseconds of a product of one element each way."""


def save(folder: Path, name: str, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"device": "NVIDIA H200", **row} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def gemm(dtype: str, factor: float) -> list[dict]:
    sizes = dict(m=(1, 4, 64), n=(8, 32, 64, 128, 256), k=(32, 64, 128))
    return [
        dict(gemm_dtype=dtype, m=m, n=n, k=k, latency=factor * PRODUCT * (m + 10) * n * k)
        for m in sizes["m"]
        for n in sizes["n"]
        for k in sizes["k"]
    ]


def attention(name: str, lengths: dict[str, tuple[int, ...]], time) -> list[dict]:
    (axis, values), rows = next(iter(lengths.items())), []
    for heads, kv in ((4, 2), (2, 1)):
        for window in (0, 8):
            for batch in (1, 2, 8):
                for value in values[: None if batch < 8 else -1]:
                    own = dict(num_heads=heads, num_key_value_heads=kv, head_dim=16, window_size=window)
                    seen = min(value, window or value)
                    rows.append(
                        dict(own, kv_cache_dtype="bfloat16", batch_size=batch, latency=heads * time(batch, seen))
                        | {"isl": 1, "step": 0}
                        | {axis: value}
                    )
    return rows


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("h200_sxm")
    save(root / "gemm/vllm/0.9.0", "gemm_perf", [dict(gemm_dtype="bfloat16", m=1, n=1, k=1, latency=99.0)])
    # The newer of two versions, and the faster of two kernels.
    save(root / "gemm/vllm/0.24.0", "gemm_perf", gemm("bfloat16", 1.0) + gemm("bfloat16", 3.0) + gemm("fp8_block", 0.5))
    place = root / "attention/vllm/0.24.0"
    save(place, "context_attention_perf", attention("isl", {"isl": (1, 16, 64)}, lambda b, n: 0.05 + b * n * n / 1e4))
    save(place, "generation_attention_perf", attention("step", {"step": (1, 15, 63)}, lambda b, n: 0.01 + b * n / 1e4))
    moe = dict(moe_dtype="bfloat16", hidden_size=64, inter_size=32, topk=2, num_experts=8, distribution="balanced")
    cuts = {(1, 1): 1.0, (2, 1): 0.5, (1, 2): 0.25}
    save(
        root / "moe/vllm/0.24.0",
        "moe_perf",
        [
            dict(moe, moe_tp_size=slices, moe_ep_size=ep, num_tokens=tokens, latency=factor * (1 + tokens / 8))
            for (slices, ep), factor in cuts.items()
            for tokens in (1, 8, 128)
        ]
        + [dict(moe, moe_tp_size=1, moe_ep_size=1, num_tokens=tokens, latency=9.0) for tokens in (1, 8)]
        + [dict(moe, moe_tp_size=1, moe_ep_size=1, num_tokens=1, latency=0.1) | {"distribution": "power_law_1.2"}],
    )
    sizes = (64, 640, 64 * 64)
    save(
        root / "comm/vllm/0.24.0",
        "custom_allreduce_perf",
        [dict(num_gpus=2, backend="vllm_graph", message_size=size, latency=0.01 + size / 1e6) for size in sizes]
        + [dict(num_gpus=2, backend="vllm_eager", message_size=size, latency=1e-6) for size in sizes],
    )
    nccl = dict(num_gpus=2, nccl_dtype="half", op_name="all_reduce")
    save(root / "comm/nccl/2.29.2", "nccl_perf", [dict(nccl, message_size=size, latency=0.013) for size in sizes])
    return str(root)


def profiled(tables: str, model: ModelShape = MODEL, **options) -> Profiled:
    return Profiled(model, SYSTEM, path=tables, **options)


def shape(*parts: tuple[int, int], samples: bool = False) -> Shape:
    return Shape.of(Slice(id, 0, 0, start, length, samples, ()) for id, (start, length) in enumerate(parts))


def product(rows: float, outputs: float, inputs: float) -> float:
    """Seconds."""
    return PRODUCT * 1e-3 * (rows + 10) * outputs * inputs


def elementwise(model: ModelShape, tokens: int, layer: int = 0) -> float:
    one = Roofline(replace(model, layers=1, experts=None, windows=()), SYSTEM)._stages[0].activation
    if model.has_experts(layer):  # shared experts are narrower than the MLP
        one -= 3 * 2 * (model.intermediate - model.experts.shared) / SYSTEM.bandwidth
    return 3 * ELEMENTWISE + one * tokens


class TestByHand:
    def test_decodes(self, tables):
        # 4 decodes of 16 keys: halfway between 2 and 8 rows is 1/3 of the way from 2.
        products = product(4, 128, 64) + product(4, 64, 64) + product(4, 192, 64) + product(4, 64, 96)
        attention = 4 * (0.01 + 4 * 15 / 1e4) * 1e-3
        cost = profiled(tables).stage(shape(*((15, 1),) * 4), 0)
        assert cost.kernels == pytest.approx(2 * (products + attention + elementwise(MODEL, 4)))

    def test_a_sampled_row_has_a_head(self, tables):
        model = profiled(tables)
        more = model.stage(shape((15, 1), samples=True), 0).kernels - model.stage(shape((15, 1)), 0).kernels
        assert more == pytest.approx(product(1, 256, 64) + 256 * (2 + 4) / SYSTEM.bandwidth)

    def test_wider_than_all_in_proportion(self, tables):
        wide = profiled(tables, replace(MODEL, vocabulary=1024)).measured.operators.head
        assert wide.at(4) == pytest.approx(4 * product(4, 256, 64) + 4 * 1024 * 6 / SYSTEM.bandwidth)

    def test_chunks_after_what_was_before(self, tables):
        attend = profiled(tables).measured.attention[None].seconds
        alone = 4 * (0.05 + 64 * 64 / 1e4) * 1e-3
        assert attend(shape((0, 64))) == pytest.approx(alone)
        # 16 after 48: what 64 take, but for a share (48 / 64)^2.
        assert attend(shape((48, 16))) == pytest.approx(alone * (1 - (48 / 64) ** 2))
        # Never less than without anything before.
        assert attend(shape((62, 2))) == attend(shape((0, 2))) > alone * (1 - (62 / 64) ** 2)
        # Two like prompts are a batch of two: one start.
        assert attend(shape((0, 64), (0, 64))) == pytest.approx(4 * (0.05 + 2 * 64 * 64 / 1e4) * 1e-3)

    def test_prefills_and_decodes_add_up(self, tables):
        attend = profiled(tables).measured.attention[None].seconds
        assert attend(shape((15, 1), (0, 16))) == pytest.approx(attend(shape((15, 1))) + attend(shape((0, 16))))

    def test_skew(self, tables):
        step = shape((1, 1), (15, 1))
        mean = shape((8, 1), (8, 1))
        even, skewed = (profiled(tables, skew=skew).measured.attention[None].seconds(step) for skew in (0.0, 0.5))
        assert even == pytest.approx(profiled(tables).measured.attention[None].seconds(mean))
        assert skewed - even == pytest.approx(0.5 * 4 * 2 * (15 - 8) / 1e4 * 1e-3, rel=0.1)

    def test_windows_have_tables_of_their_own(self, tables):
        attention = profiled(tables, WINDOWED).measured.attention
        step = shape((60, 1))
        assert attention[8].seconds(step) == pytest.approx(4 * (0.01 + 8 / 1e4) * 1e-3)
        assert attention[None].seconds(step) > attention[8].seconds(step)
        total = profiled(tables, WINDOWED).stage(step, 0).kernels - profiled(tables).stage(step, 0).kernels
        assert total == pytest.approx(attention[8].seconds(step) - attention[None].seconds(step))

    def test_eight_bits(self, tables):
        half = profiled(tables, replace(MODEL, precision=Precision("fp8"))).measured.operators
        layer = profiled(tables).measured.operators.layer
        assert layer.at(4) - half.layer.at(4) == pytest.approx(0.5 * (layer.at(4) - elementwise(MODEL, 4)))
        assert half.head.at(4) == profiled(tables).measured.operators.head.at(4)  # heads stay in the dtype

    def test_tensor_parallel(self, tables):
        two = profiled(tables, tp=2)
        assert two.measured.operators.layer.at(4) == pytest.approx(
            product(4, 64, 64)  # 2 of 4 heads and 1 of 2 KV heads
            + product(4, 64, 32)
            + product(4, 96, 64)
            + product(4, 64, 48)
            + 3 * ELEMENTWISE
            + Roofline(replace(MODEL, layers=1), SYSTEM, tp=2)._stages[0].activation * 4
        )
        # 4 sums of 64 elements a token: vLLM's for one token, NCCL's for 64, straight lines between 10 and 64.
        assert two.stage(shape((9, 1)), 0).communication == pytest.approx(4 * 0.010064e-3)
        assert two.stage(shape((0, 60)), 0).communication == pytest.approx(
            4e-3 * (0.01064 + 50 / 54 * (0.013 - 0.01064))
        )
        sampled = two.stage(shape((9, 1), samples=True), 0).communication
        assert sampled == pytest.approx(4 * 0.010064e-3 + 256 / SYSTEM.link)


class TestExperts:
    def test_layers_with_and_without(self, tables):
        operators = profiled(tables, EXPERTS).measured.operators
        beside = product(4, 128, 64) + product(4, 64, 64) + product(4, 8, 64) + product(4, 64, 64) + product(4, 64, 32)
        assert operators.sparse.at(4) == pytest.approx(beside + elementwise(EXPERTS, 4, 1))
        assert operators.routed.at(8) == pytest.approx(2e-3)
        # In 8 bits shared experts take half, and the router as long as before.
        half = profiled(tables, replace(EXPERTS, precision=Precision("fp8"))).measured.operators
        fewer = 0.5 * (beside - product(4, 8, 64))
        assert operators.sparse.at(4) - half.sparse.at(4) == pytest.approx(fewer)
        step = shape(*((15, 1),) * 4)
        attention = 2 * profiled(tables).measured.attention[None].seconds(step)
        whole = operators.layer.at(4) + operators.sparse.at(4) + operators.routed.at(4)
        assert profiled(tables, EXPERTS).stage(step, 0).kernels == pytest.approx(whole + attention)

    def test_each_stage_has_its_own(self, tables):
        first, last = (profiled(tables, EXPERTS, stages=2).stage(shape((15, 1)), stage) for stage in (0, 1))
        assert last.kernels > 1e-3 > first.kernels

    def test_for_the_tokens_of_all(self, tables):
        """DP attention: two ranks hold half of the experts each, attention is each rank's own."""
        two, step = profiled(tables, EXPERTS, ep=2, pooling=2), shape((15, 1))
        more = two.stage(step, 0, pooled=8).kernels - two.stage(step, 0).kernels
        assert more == pytest.approx(0.25e-3 * 7 / 8)
        with pytest.raises(BeyondTable, match="tokens of all ranks that share experts=129 lies beyond the 128"):
            two.stage(step, 0, pooled=129)

    def test_what_was_not_cut_so(self, tables):
        with pytest.raises(ValueError, match=r"2 of 8, sliced over 1 ranks in ep=4 groups.*1 x 1, 1 x 2, 2 x 1$"):
            profiled(tables, EXPERTS, ep=4, pooling=4)
        with pytest.raises(ValueError, match=r"measured .* other sizes in bfloat16 only"):
            profiled(tables, replace(EXPERTS, experts=replace(EXPERTS.experts, intermediate=31)))


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            (replace(MODEL, latent=Latent(None, 6, 2, 1, 2)), {}, "has attention that these tables do not hold"),
            (MODEL, {"tp": 4}, "attention of 1 heads, 1 KV heads of 16 in bfloat16, window none, was not measured"),
            (replace(MODEL, precision=Precision(kv="fp8")), {}, "in fp8, window none, was not measured"),
            (replace(MODEL, precision=Precision("int4")), {}, "model.weights=int4 is not in these tables; they have"),
            (replace(MODEL, hidden=256), {}, "products of 256 x 128 were not measured"),
        ],
    )
    def test_one_line(self, tables, model, options, message):
        with pytest.raises(ValueError, match=message):
            profiled(tables, model, **options)

    def test_of_another_device(self, tables):
        with pytest.raises(ValueError, match="measured on NVIDIA H200, and device=unit; choose the same"):
            Profiled(MODEL, replace(SYSTEM, name="unit"), path=tables)

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ([(15, 1)] * 9, "decodes=9 lies beyond the 8"),
            ([(64, 1)], "decode_context=65 lies beyond the 64"),
            ([(60, 1)] * 4, "keys of all decodes=244 lies beyond the 128"),
            ([(32, 33)], r"prefill_history \+ prefill_tokens=65 lies beyond the 64"),
            ([(0, 2)] * 9, "chunks=9 lies beyond the 8"),
            ([(0, 33)] * 2, "tokens=66 lies beyond the 64"),
        ],
    )
    def test_beyond_the_tables(self, tables, parts, message):
        with pytest.raises(BeyondTable, match=message):
            profiled(tables).stage(shape(*parts), 0)

    def test_a_folder_without_products(self, tmp_path):
        assert not found(tmp_path)
        for name in ("gemm", "attention"):
            (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=r"gemm/\*/\*/gemm_perf\.parquet is missing"):
            profiled(str(tmp_path))


def test_evaluate_holds_models_against_them(tables, capsys, monkeypatch):
    monkeypatch.setattr("playground.sim.cost.__main__.ModelShape.read", lambda *_: MODEL)
    assert (
        main(["evaluate", tables, "--cost", "profiled", "--tables", tables, "--model", "any", "--device", "h200"]) == 0
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(tables)]
    # Of 8 batches of decodes all; of prompts those of more than one token, and of 64 in all.
    assert [(region, steps, mape) for _, region, steps, mape, *_ in lines] == [
        ("decode", "8", "0.0%"),
        ("prefill", "3", "0.0%"),
    ]
