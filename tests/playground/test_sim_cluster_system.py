"""Steps of whole systems, worked out by hand: lockstep, experts, exchanges, overlap. One unit is a second."""

from dataclasses import replace
from math import comb

import pytest

from playground.core import MAIN, Columns, Slice, Spec
from playground.model import Experts
from playground.sim.backend import SimBackend
from playground.sim.cluster import Cluster
from playground.sim.collectives import NONE, Exchange
from playground.sim.cost import Cost, Linear, Shape
from playground.sim.links import Link, Links
from playground.sim.overlap import shared_experts
from playground.sim.system import DUMMY, Manners, System, padded
from playground.sim.traffic import Traffic, check_experts, reach
from tests.playground.test_cost import DEVICE, MODEL
from tests.playground.test_sim import completions, part, step, times

LINKS = Links("x", Link(64.0, latency=0.0), devices_per_host=8, start=0.0, all_reduce="ring", direct=False)
"""64 bytes a second and no latency: what is left is arithmetic on bytes."""
DENSE = replace(MODEL, layers=4, hidden=16, dtype_bytes=2, vocabulary=320)
"""A hidden state of 32 bytes: half a second for each token that a device sends."""
SPARSE = replace(DENSE, experts=Experts(count=8, active=2, intermediate=16, dense=(0,)))
"""One layer without experts, three with."""


class Counting:
    """Kernels take a second a token, `expert` for each that is pooled; launching takes `eager` unless all decode."""

    def __init__(self, eager: float = 0.0, expert: float = 0.0) -> None:
        self.eager = eager
        self.expert = expert

    def stage(self, shape: Shape, stage: int, pooled: int = 0) -> Cost:
        launch = 0.0 if shape.tokens == shape.decodes else self.eager
        return Cost(0.0, 0.0, shape.tokens + self.expert * pooled, 999.0, launch)

    def host(self, shape: Shape) -> float:
        return 0.0

    def transfer(self, shape: Shape) -> float:
        raise AssertionError("the links say that")

    def copy(self, blocks: int) -> float:
        return 0.0


MANNERS = ("padding", "overlap", "overlap_rows", "overlap_threshold", "overlap_chunks")


def system(
    model=DENSE,
    cost=None,
    exchange="all_gather",
    shared=False,
    layers=(4,),
    links=LINKS,
    hidden=None,
    products=None,
    **options,
):
    manners = Manners(**{name: options.pop(name) for name in MANNERS if name in options})
    traffic = Traffic(model, Cluster(links, stages=len(layers), **options), layers, exchange)
    return System(cost or Counting(), traffic, manners, shared, hidden, products)


def decodes(rows: int) -> Shape:
    return Shape(rows, rows, rows, rows, rows, 1, 0, 0)


def prefill(tokens: int, sampled: int = 0) -> Shape:
    return Shape(tokens, 1, sampled, 0, 0, 0, tokens, tokens, ((0, tokens),))


# --- tensor parallelism


def test_tensor_parallel_ranks_sum_twice_a_layer():
    """2 sums x 4 layers of 3 x 32 bytes; a ring of two moves 2 x 1/2 of them."""
    work = system(tp=2).work([prefill(3)], 0)
    assert (work.kernels, work.wire) == (3.0, 8 * 96 / 64)


def test_the_last_stage_collects_logits_and_no_other():
    """320 logits of 2 bytes for each sampled row, half of them from the other rank; 2 layers a stage."""
    two = system(tp=2, layers=(2, 2))
    sums = 4 * 32 / 64
    assert two.work([prefill(1, sampled=1)], 0).wire == sums
    assert two.work([prefill(1, sampled=1)], 1).wire == sums + 640 / 2 / 64


def test_a_stages_exchanges_go_with_its_layers():
    uneven = system(tp=2, layers=(3, 1))
    assert [uneven.work([prefill(1)], stage).wire for stage in range(2)] == [3.0, 1.0]


def test_a_pipeline_sends_hidden_states_over_its_links():
    lanes = system(shared=True, layers=(2, 2)).of(step(0, part(0, 5))).lanes
    assert lanes[MAIN].transfer == 5 * 32


# --- lockstep


def lockstep(shapes, **options):
    return system(replicas=len(shapes), lockstep=True, **options).work(shapes, 0)


def test_everybody_waits_for_the_slowest():
    assert lockstep([prefill(5), decodes(1)]).kernels == 5.0


def test_one_rank_that_launches_eagerly_holds_up_the_others():
    """Its own kernels take 2 s and their launching 9; the other's graph takes 4."""
    assert lockstep([prefill(2), decodes(4)], cost=Counting(eager=9.0)).kernels == 9.0
    assert lockstep([decodes(2), decodes(4)], cost=Counting(eager=9.0)).kernels == 4.0


def test_without_experts_ranks_exchange_nothing():
    assert lockstep([prefill(5), decodes(1)]).wire == 0.0


def run(shapes, *parts, **options):
    """Seconds of one step of a lockstep group."""
    spec = Spec(blocks=9, ranks=shapes, lockstep=True)
    backend = SimBackend(spec, system(replicas=shapes, lockstep=True, **options))
    backend.launch(step(0, *parts, dummies=tuple(set(range(shapes)) - {part.rank for part in parts})))
    ((started, finished),) = times(completions(backend))
    return finished - started


def test_an_idle_rank_computes_a_dummy_and_sends_it():
    """Rank 1 has nothing: kernels of rank 0's 4 decodes, and 2 x 3 gathers of 4 + 1 tokens, of which half travel."""
    parts = [part(id, 1, start=3) for id in range(4)]
    assert run(2, *parts, model=SPARSE, padding="never") == 4.0 + 6 * 5 * 32 / 2 / 64


@pytest.mark.parametrize(
    "padding, prefilling, tokens",
    [("graphs", False, 8), ("graphs", True, 5), ("always", True, 8), ("never", False, 5), ("always", False, 8)],
)
def test_padding_makes_ranks_as_busy_as_the_busiest(padding, prefilling, tokens):
    """4 tokens on rank 0, 1 on rank 1: 5 travel, or 4 and 4."""
    four = [part(0, 4)] if prefilling else [part(id, 1, start=3) for id in range(4)]
    took = run(2, *four, part(9, 1, start=3, rank=1), model=SPARSE, padding=padding)
    assert took == 4.0 + 6 * tokens * 32 / 2 / 64


def test_padded_rows_are_decodes_of_one_key_among_decodes_and_tokens_among_prefills():
    assert padded(decodes(2), 5) == Shape(5, 2, 2, 5, 5, 1, 0, 0)
    assert padded(prefill(3), 5) == prefill(3)._replace(tokens=5)


# --- experts


def test_experts_compute_for_the_tokens_of_all_ranks():
    """6 s for the busiest rank's own tokens, and a quarter of one for each of all 10."""
    shapes = [decodes(6), decodes(1), decodes(1), decodes(2)]
    assert lockstep(shapes, model=SPARSE, cost=Counting(expert=0.25)).kernels == 8.5
    assert lockstep(shapes, model=DENSE, cost=Counting(expert=0.25)).kernels == 6.0


def test_a_cost_model_that_cannot_pool_says_what_can():
    with pytest.raises(ValueError, match=r"backend.cost=Linear cannot tell .* take playground.sim.cost.Roofline"):
        system(model=SPARSE, cost=Linear(1.0), replicas=2, lockstep=True)


@pytest.mark.parametrize(
    "exchange, tokens",
    [
        ("all_gather", 3 / 4 * (6 + 1 + 1 + 2)),
        ("padded_all_gather", 3 / 4 * 4 * 6),
        # A token has 2 of 8 experts: none on a given rank of four with 6/8 x 5/7.
        ("all_to_all", 6 * 3 * (1 - 6 / 8 * 5 / 7)),
        ("padded_all_to_all", 6 * 3 * 2),
    ],
)
def test_what_a_device_sends_to_the_experts_of_a_layer(exchange, tokens):
    """There and back, in the three layers that have experts."""
    work = lockstep([decodes(6), decodes(1), decodes(1), decodes(2)], model=SPARSE, exchange=exchange)
    assert work.wire == pytest.approx(6 * tokens * 32 / 64)


def test_devices_that_hold_the_same_tokens_send_a_share_each():
    """tp=2: each of 4 devices sends half of the 6 tokens; the tensor-parallel sums (8 x 6 x 32 bytes) stay."""
    work = lockstep([decodes(6), decodes(2)], model=SPARSE, exchange="padded_all_to_all", tp=2)
    logits = 6 * 640 / 2 / 64
    assert work.wire == pytest.approx(6 * (3 * 3 * 2) * 32 / 64 + 8 * 6 * 32 / 64 + logits)


def test_each_of_them_sends_a_share_to_those_who_have_its_experts():
    """As above, but only to ranks that have one of a token's 2 of 8 experts."""
    work = lockstep([decodes(6), decodes(2)], model=SPARSE, exchange="all_to_all", tp=2)
    copies = 3 * (1 - 6 / 8 * 5 / 7)
    assert work.wire == pytest.approx(6 * (3 * copies) * 32 / 64 + 8 * 6 * 32 / 64 + 6 * 640 / 2 / 64)


def test_every_stage_exchanges_for_its_own_layers_with_experts():
    """The first of four layers has none: one on the first stage, two on the second, each there and back."""
    two = system(model=SPARSE, replicas=2, lockstep=True, layers=(2, 2))
    shapes = [prefill(4), prefill(4)]
    assert [two.work(shapes, stage).wire for stage in range(2)] == [2 * 1 * 4 * 32 / 64, 2 * 2 * 4 * 32 / 64]


def test_experts_across_hosts_go_through_the_ports_between_them():
    """2 hosts of 2: a ring of 4 moves 3/4 of 10 tokens through 2 ports of 8 bytes/s."""
    links = replace(LINKS, across=Link(8.0, latency=0.0), devices_per_host=2)
    work = lockstep([decodes(6), decodes(1), decodes(1), decodes(2)], model=SPARSE, links=links, padding="never")
    assert work.wire == pytest.approx(6 * 3 / 4 * 10 * 32 / 16)


@pytest.mark.parametrize("count, active, ranks", [(8, 2, 4), (128, 8, 8), (64, 6, 64), (4, 3, 2)])
def test_how_far_a_token_reaches_is_one_minus_the_chance_of_no_expert_there(count, active, ranks):
    elsewhere = count - count // ranks
    assert reach(Experts(count, active, 1), ranks) == pytest.approx(1 - comb(elsewhere, active) / comb(count, active))


@pytest.mark.parametrize(
    "model, ep, ranks, message",
    [
        (DENSE, 2, 2, r"parallel.ep=2: the model has no experts"),
        (SPARSE, 3, 3, r"parallel.ep=3 must divide the model's 8 experts"),
        (SPARSE, 4, 2, r"parallel.ep=4 must divide the 2 devices that share experts"),
    ],
)
def test_experts_that_cannot_be_dealt_out_say_why(model, ep, ranks, message):
    with pytest.raises(ValueError, match=message):
        check_experts(model, ep, ranks)


def test_only_whole_experts_can_be_sent_to():
    with pytest.raises(ValueError, match=r"parallel.exchange=all_to_all needs .* set parallel.ep=4, or gather"):
        check_experts(SPARSE, 2, 4, "all_to_all")
    check_experts(SPARSE, 4, 4, "all_to_all")
    check_experts(SPARSE, 2, 4)


def test_experts_that_can_be_dealt_out():
    check_experts(SPARSE, 4, 8)
    check_experts(DENSE, 1, 3)


# --- overlap


def test_two_batches_compute_and_exchange_in_turns():
    """4 tokens: halves of 2. Kernels 2 + 2; exchanges 2 x (8 sums x 2 x 32 / 64 = 8). In 4 layers the longer chain and
    one layer's half of the shorter: 16 + 4 / 2 / 4, as stepping through the layers gives."""
    work = system(tp=2, overlap="two_batch").work([prefill(4)], 0)
    assert work.alone == 16.5 == layer_by_layer(kernels=0.5, waits=2.0, layers=4)


@pytest.mark.parametrize("kernels, waits", [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_the_two_batch_formula_is_what_stepping_through_layers_gives(kernels, waits):
    class Fixed(Counting):
        def stage(self, shape, stage, pooled=0):
            return Cost(0.0, 0.0, 4 * kernels, 0.0, 0.0)

    links = replace(LINKS, within=Link(8 * 32 * 2 / (4 * waits), latency=0.0))
    work = system(tp=2, overlap="two_batch", links=links, cost=Fixed()).work([prefill(4)], 0)
    assert work.alone == pytest.approx(layer_by_layer(kernels, waits, 4))


def layer_by_layer(kernels: float, waits: float, layers: int) -> float:
    """Two halves in turn on one device and one link, each half's layer after its exchange."""
    device = link = 0.0
    ready = [0.0, 0.0]
    for _ in range(layers):
        for batch in (0, 1):
            device = max(device, ready[batch]) + kernels
            link = max(link, device) + waits
            ready[batch] = link
    return max(ready)


def test_small_steps_are_not_cut():
    assert not system(tp=2, overlap="two_batch", overlap_rows=5).work([prefill(4)], 0).overlaps
    assert system(tp=2, overlap="two_batch", overlap_rows=4).work([prefill(4)], 0).overlaps


def test_a_single_batch_hides_the_way_to_the_experts_behind_the_shared_ones():
    """The way of one layer takes 4 tokens x 32 / 2 / 64 = 1 s; shared experts of 0.25 s a layer hide so much of it."""
    for seconds, hidden in ((0.25, 0.25), (7.0, 1.0)):
        manners = {"overlap": "single_batch", "hidden": lambda tokens, seconds=seconds: seconds, "model": SPARSE}
        plain = lockstep([decodes(2), decodes(2)], model=SPARSE)
        assert plain.alone - lockstep([decodes(2), decodes(2)], **manners).alone == pytest.approx(3 * hidden)


def test_shared_experts_take_what_matrices_take():
    model = replace(SPARSE, experts=replace(SPARSE.experts, shared=8))
    weights = 3 * 16 * 8 / 2
    took = shared_experts(model, DEVICE, tp=2)(5)
    compute, memory = 2 * weights * 5 / DEVICE.gemm_flops, weights * 2 / DEVICE.bandwidth
    assert took == pytest.approx((compute**2 + memory**2) ** 0.5)
    assert shared_experts(SPARSE, DEVICE, 1) is None


# --- as durations


def test_a_quiet_stretch_takes_what_its_steps_take():
    """Two decodes on two tensor-parallel devices, again and again."""
    durations = system(tp=2)
    quiet = step(0, part(0, 1, start=3), part(1, 1, start=4))
    first = durations.of(quiet).lanes[MAIN].stages[0]
    ticking = durations.ticks(quiet)
    assert [next(ticking) for _ in range(3)] == [(0.0, first)] * 3


def test_alone_a_system_exchanges_nothing():
    assert system().work([prefill(3)], 0)[:4] == (3.0, 0.0, False, 0.0)
    assert system(overlap="two_batch").work([prefill(4)], 0).alone == 4.0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"padding": "some"}, r"parallel.padding=some must be one of graphs, always, never"),
        ({"overlap": "x"}, r"parallel.overlap=x must be one of none, lanes, two_batch, single_batch, row_chunks"),
        ({"overlap_threshold": 0.6}, r"parallel.overlap_threshold=0.6 must lie in \[0, 0.5\]; 0 cuts no prompt"),
        ({"overlap_chunks": 1}, r"parallel.overlap_chunks=1 must be at least 2"),
        ({"overlap_rows": -1}, r"parallel.overlap_rows=-1"),
        ({"exchange": "x"}, r"parallel.exchange=x must be one of all_gather"),
    ],
)
def test_unknown_manners_name_the_known_ones(options, message):
    with pytest.raises(ValueError, match=message):
        system(**options)


def test_a_dummy_is_one_token_that_samples_nothing():
    assert Shape.of_columns(Columns.of([Slice(0, 0, 0, 0, 1, False, ())]))._replace(contexts=None) == DUMMY
    assert Exchange(1.0, 2.0).plus(NONE).times(2) == (2.0, 4.0)
