"""What Sarathi-Serve claims, in our simulator: statements C1 to C9.

CodeLlama-34B on two A100 stands for Yi-34B. Lengths are cut to 4,096 tokens, the end of the tables. Where a statement
does not hold, its test says what holds instead.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playground.core import Request, Spec
from playground.sim.cost import Linear, Shape, Vidur
from playground.sim.cost.tables import columns, find, numbers, required
from tests.peers.sarathi import (
    A100,
    COST,
    LONGEST,
    MODEL,
    ROOMY,
    chunks_only,
    holds,
    hybrid_only,
    replace,
    requests,
    run,
    sarathi,
    vllm,
)

STRICT, RELAXED = 0.2, 1.0
"""5 and 25 times a decode step of 32 sequences with 4k of context."""


def percentile(values, share: float) -> float:
    return float(np.percentile(values, share))


def step(*chunks: tuple[int, int], decodes: int = 0, context: int = 0) -> float:
    """Seconds of one step: chunks as (tokens before it, tokens)."""
    tokens = sum(length for _, length in chunks)
    pairs = sum(length * start + length * (length + 1) // 2 for start, length in chunks)
    read = sum(start + length for start, length in chunks)
    rows = decodes + len(chunks)
    shape = Shape(tokens + decodes, rows, rows, decodes, decodes * context, context, pairs, read, chunks)
    return COST.stage(shape, 0).device_time


workloads = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 120), st.integers(1, 30)), min_size=1, max_size=12).map(
    lambda rows: [
        Request(id, arrival, prompt, output, output) for id, (arrival, prompt, output) in enumerate(sorted(rows))
    ]
)
SMALL = Spec(blocks=2000, max_seqs=64, max_tokens=512)
SECONDS = Linear(0.5, per_token=0.01)


class TestC1NoStallsByConstruction:
    @settings(max_examples=40, deadline=None)
    @given(workloads, st.integers(16, 64))
    def test_with_sarathi_every_step_gives_a_token(self, workload, budget):
        log = run(sarathi(budget), workload, SECONDS, SMALL)
        assert not log.preempted
        assert all(later - earlier == 1 for turns in log.turns.values() for earlier, later in pairwise(turns))

    @settings(max_examples=40, deadline=None)
    @given(workloads)
    def test_with_vllm_exactly_the_prompts_come_between(self, workload):
        log = run(vllm(), workload, SECONDS, SMALL)
        prefills = np.cumsum([shape.prefill_tokens > 0 or shape.decodes == 0 for shape in log.shapes])
        one_token_prompts = any(request.prompt_length == 1 for request in workload)
        for turns in log.turns.values():
            for earlier, later in pairwise(turns):
                between = int(prefills[later - 1] - prefills[earlier]) if later > earlier + 1 else 0
                assert one_token_prompts or later - earlier == 1 + between


@pytest.fixture(scope="module")
def at_once() -> list[Request]:
    return requests(128, None, "arxiv")


@pytest.fixture(scope="module")
def by_budget(at_once):
    return {budget: run(sarathi(budget), at_once) for budget in (512, 1024, 2048)}


class TestC2TimeBetweenTokensIsBounded:
    def test_by_the_longest_step_within_the_budget(self, by_budget):
        for budget, log in by_budget.items():
            within = [
                seconds
                for shape, seconds in zip(log.shapes, log.seconds, strict=True)
                if shape.tokens <= max(budget, shape.decodes)
            ]
            assert len(within) == len(log.seconds)
            assert log.between_tokens.max() <= max(within) + 1e-9

    def test_p99_does_not_fall_as_the_budget_rises(self, by_budget):
        p99 = [percentile(by_budget[budget].between_tokens, 99) for budget in (512, 1024, 2048)]
        assert p99 == sorted(p99)
        assert p99 == pytest.approx([0.115, 0.220, 0.395], rel=0.01)

    def test_vllm_stalls_for_as_long_as_prompts_keep_coming(self, at_once):
        log = run(vllm(), at_once)
        assert log.between_tokens.max() >= log.longest_prefill_run() > 50  # seconds, against 0.12


class TestC3Ablation:
    """128 requests, budget 1024. The paper does not say at which rate; 0.8/s is about half of what Sarathi bears.

    Its ratios: P99 TBT hybrid/combined 4.9 (chat) and 8.1 (arxiv), P50 TTFT chunks-only/combined 1.37 and 1.38.
    """

    @pytest.mark.parametrize(("lengths", "rate", "stall"), [("sharegpt", 0.8, 2.61), ("arxiv", 0.6, 2.62)])
    def test_order(self, lengths, rate, stall):
        workload = requests(128, rate, lengths)
        hybrid, chunks, both = (run(policy, workload) for policy in (hybrid_only(), chunks_only(1024), sarathi(1024)))
        first = [percentile(log.first_tokens, 50) for log in (hybrid, both, chunks)]
        assert first == sorted(first)
        assert 1.37 / 2 < first[2] / first[1] < 1.37 * 2
        tbt = [percentile(log.between_tokens, 99) for log in (both, chunks, hybrid)]
        assert tbt == sorted(tbt)
        # Chat lies in the factor of 2 around 4.9. Arxiv does not (8.1): prompts of 16k are cut to 4k here, and a
        # hybrid step stalls for as long as its prompt.
        assert tbt[2] / tbt[0] == pytest.approx(stall, rel=0.02)
        assert tbt[2] / tbt[0] > 4.9 / 2


def test_c4_chunks_cost_a_little_more_than_the_whole():
    """A prompt of 4k: 512 costs 5 to 25 % more, 2048 at most 5 %, and the more chunks the more."""
    prompt = [Request(0, 0.0, LONGEST - 8, 2, 2)]
    first = {budget: run(sarathi(budget), prompt).first_tokens[0] for budget in (512, 1024, 2048, LONGEST)}
    overhead = {budget: seconds / first[LONGEST] - 1 for budget, seconds in first.items()}
    assert 0.05 < overhead[512] < 0.25
    assert overhead[512] > overhead[1024] > overhead[2048]
    assert overhead[2048] < 0.05
    assert overhead[512] == pytest.approx(0.081, abs=0.003)  # measured on an engine 0.12: tables lack the host's part


class TestC5Capacity:
    """Requests a second, found by bisection over 400 requests: strict 1.84 : 0.44 (sharegpt), 1.60 : 0.33 (arxiv),
    relaxed 1.94 : 1.22. Each test brackets what its statement needs."""

    def test_strict_is_more_than_twice_and_more_on_longer_prompts(self):
        assert not holds(vllm(), 0.46, STRICT)
        assert holds(sarathi(512), 1.80, STRICT)  # 3.9 times at least; the paper has 3.7
        assert holds(vllm(), 0.435, STRICT)
        assert not holds(sarathi(512), 1.87, STRICT)  # 4.3 times at most
        assert holds(sarathi(512), 1.58, STRICT, "arxiv")
        assert not holds(vllm(), 0.345, STRICT, "arxiv")  # 4.6 times at least

    def test_relaxed_is_between_1_2_and_2_times(self):
        """1.6 times; the paper has 1.65."""
        assert holds(vllm(), 1.19, RELAXED)
        assert not holds(vllm(), 1.25, RELAXED)
        assert holds(sarathi(2048), 1.90, RELAXED)
        assert not holds(sarathi(2048), 2.0, RELAXED)

    def test_a_batch_cap_does_not_help_vllm(self):
        """Caps of 32, 64 and 128 give one and the same run: beyond its strict capacity no batch is that large."""
        log = run(vllm(), requests(400, 0.46))
        assert max(shape.sequences for shape in log.shapes) <= 32


class TestC6Pipeline:
    def test_steps_are_alike_and_bubbles_few(self):
        """Two stages, 1 request a second: bubbles 5 % against 17 %, variation of stage times 0.48 against 1.5."""
        two, cost = replace(ROOMY, stages=2), Vidur(MODEL, A100, stages=2)
        ours, prefill_first = (run(policy, requests(128, 1.0), cost, two) for policy in (sarathi(512), vllm()))
        assert ours.bubbles() < 0.06 < 0.15 < prefill_first.bubbles()
        assert ours.variation() < 0.5 < 1.4 < prefill_first.variation()

    def test_the_strict_ratio_is_larger_than_on_one_stage(self):
        """7 times at least, against 4.3 at most."""
        assert holds(sarathi(512), 3.0, STRICT, stages=2)
        assert not holds(vllm(), 0.42, STRICT, stages=2)

    def test_the_relaxed_ratio_is_about_a_half_more(self):
        """1.4 times at least; found by hand: 1.4 to 1.75."""
        assert holds(sarathi(2048), 2.7, RELAXED, stages=2)
        assert not holds(vllm(), 1.93, RELAXED, stages=2)


def test_c7_decodes_ride_on_a_chunk_for_next_to_nothing():
    """Three decodes in place of three of 1,024 prefill tokens: within 1 to 2 %.

    That a token of a pure decode batch of four costs 50 times one of the hybrid step (80 in the paper) does NOT hold:
    it is 40 times. The paper's decodes carry some 40 ms of host time that these tables leave out.
    """
    hybrid = step((0, 1021), decodes=3, context=1024)
    assert 1 <= hybrid / step((0, 1024)) < 1.02
    assert step(decodes=4, context=1024) / 4 / (hybrid / 1024) == pytest.approx(40, abs=1)


class TestC8Budget:
    def test_a_smaller_one_trades_first_tokens_for_steadiness(self):
        workload = requests(128, 1.2)
        logs = [run(sarathi(budget), workload) for budget in (512, 1024)]
        first = [percentile(log.first_tokens, 50) for log in logs]
        between = [percentile(log.between_tokens, 99) for log in logs]
        assert first == sorted(first, reverse=True)
        assert between == sorted(between)

    def test_one_token_beyond_a_tile_is_dear(self):
        """257 tokens (264 in the tables) against 256: 22 to 28 % more for three matrix products of a layer, +20 % for
        the step. The fourth, of the attention's output, takes 4 % more only."""
        file = required(find("codellama-34b_a100_tp2"), "per_token_ops_ms_per_layer")
        table = dict(zip(columns(file), numbers(file).T, strict=True))
        dearer = {name: table[name][263] / table[name][255] - 1 for name in table if name.endswith("_proj")}
        assert all(more > 0.1 for name, more in dearer.items() if name != "attn_post_proj")
        assert dearer["attn_post_proj"] == pytest.approx(0.042, abs=0.001)
        assert step((0, 257)) / step((0, 256)) == pytest.approx(1.16, abs=0.05)


def test_c9_the_slo_is_five_decode_steps():
    """32 sequences with 4k of context: 40 ms."""
    assert step(decodes=32, context=LONGEST) == pytest.approx(0.040, rel=0.05)
