"""Layers that move between stages, from the rule to the clock, worked out by hand. One unit is a second, or a byte."""

from dataclasses import replace
from random import Random

import pytest

from playground.core import MAIN, LayerMove, Request, Spec, Step
from playground.draft import Draft
from playground.loop import serve
from playground.rank import Rank
from playground.scheduler import Scheduler
from playground.sequence import Sequence
from playground.sim.backend import SimBackend
from playground.sim.capacity import Layout
from playground.sim.cluster import Cluster
from playground.sim.cost import Cost
from playground.sim.fabric import Fabric
from playground.sim.links import Link
from playground.sim.migration import blocks_beside_spares, crossing, seconds
from playground.sim.system import System
from playground.sim.traffic import Traffic
from playground.trace import Trace, read
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Admissions, Composed, Decodes
from policies.placement import DynaPipe, Static
from tests.playground.fakes import Log
from tests.playground.test_cost import DEVICE, MODEL
from tests.playground.test_sim import part
from tests.playground.test_sim_cluster_system import LINKS

FOUR = replace(MODEL, layers=8, hidden=16)
SPEC = Spec(blocks=100, block_size=4, stages=4, layers=(2, 2, 2, 2), spare_layers=1)


# --- the rule


def draft(decodes: int, spec: Spec = SPEC, layers=None) -> Draft:
    """One in which so many sequences decode with a context of 4."""
    rank = Rank(0, spec, False, True)
    made = Draft(rank, spec, 0.0, Random(0), (), 1, layers or spec.layers)
    for id in range(decodes):
        made._placed.add(Sequence(Request(id, 0.0, 4, 4), 0), 3, 1, True, (), MAIN)
    made._tokens = decodes
    return made


def rule(**options) -> DynaPipe:
    given = dict(layer_base=1.0, layer_per_token=0.0, sample_base=0.0, sample_per_row=0.0, window=1, least_decodes=1)
    return DynaPipe(**(given | options))


@pytest.mark.parametrize(
    "sample, layers",
    [
        (0.0, None),  # nothing to balance
        (0.9, None),  # |0.9| against |0.9 - 1 - 1| = 1.1
        (1.2, (2, 2, 3, 1)),  # 1.2 against 0.8
        (9.0, (2, 2, 3, 1)),  # the last stage keeps one
    ],
)
def test_as_many_layers_leave_as_balance_the_last_stage(sample, layers):
    """One layer to m = 1 stage: the last is shorter by a layer, one other longer by one."""
    assert rule(sample_base=sample)(draft(6)) == layers


def test_several_stages_share_what_leaves():
    """Sampling takes 5: k = 3 leaves |5 - 3 - 1| = 1, k = 4 (3 takers) |5 - 4 - 4/3| = 1/3, k = 5 |5 - 5 - 5/3|."""
    spec = replace(SPEC, layers=(6, 6, 6, 6), spare_layers=2)
    assert rule(sample_base=5.0, most_extra=1)(draft(6, spec)) == (7, 7, 7, 3)
    assert rule(sample_base=5.0, most_extra=2)(draft(6, spec)) == (7, 7, 8, 2)


def test_predictions_grow_with_the_step():
    """6 decodes of 4 keys. T_sample = 6 x 0.25 = 1.5: a layer of 1 moves, one of 1 + 6 x 0.5 or 1 + 24 x 0.5 not."""
    assert rule(sample_per_row=0.25)(draft(6)) == (2, 2, 3, 1)
    assert rule(sample_per_row=0.25, layer_per_token=0.5)(draft(6)) is None
    assert rule(sample_per_row=0.25, layer_per_key=0.5)(draft(6)) is None


def test_a_choice_must_last():
    """25 steps in a row; one of another opinion starts the count anew; steps of few decodes say nothing."""
    patient = rule(sample_per_row=0.2, window=25, least_decodes=3)
    assert [patient(draft(6)) for _ in range(24)] == [None] * 24
    assert patient(draft(3)) is None  # 0.6: stay
    assert [patient(draft(6)) for _ in range(24)] == [None] * 24
    assert patient(draft(2)) is None
    assert patient(draft(6)) == (2, 2, 3, 1)
    assert patient(draft(6, layers=(2, 2, 3, 1))) is None  # as it is now


def test_layers_come_back_when_sampling_is_short_again():
    assert rule(sample_base=0.0)(draft(6, layers=(2, 2, 3, 1))) == (2, 2, 2, 2)


# --- the verb


@pytest.mark.parametrize(
    "layers, moves",
    [
        ((2, 2, 3, 1), True),
        ((3, 3, 1, 1), True),
        ((2, 2, 2, 2), False),  # as now
        ((2, 2, 4, 0), False),  # an empty stage
        ((1, 1, 2, 4), False),  # no room for two more
        ((2, 2, 2, 1), False),  # a layer lost
        ((4, 4), False),
    ],
)
def test_a_move_keeps_every_layer_and_finds_room(layers, moves):
    made = draft(1)
    made._rank.pool.allocate(7)
    assert made.move_layers(layers) is moves
    assert made.move == (LayerMove(layers, 7) if moves else None)


# --- what it takes


def test_stages_hold_consecutive_layers_so_that_boundaries_shift():
    assert crossing((6, 6, 6, 6), (7, 7, 7, 3)) == [1, 2, 3]
    assert crossing((2, 2, 3, 1), (2, 2, 2, 2)) == [0, 0, 1]


def test_kv_of_every_boundarys_layers_moves_at_once():
    """5 blocks x 32 bytes x 3 layers at 64 bytes/s, after a start of 1; the other boundaries are done before."""
    cluster = Cluster(replace(LINKS, start=1.0), stages=4)
    assert seconds(LayerMove((7, 7, 7, 3), 5), (6, 6, 6, 6), cluster, 0, 32.0) == 1 + 5 * 32 * 3 / 64


def moving(layers=(4, 4), links=LINKS) -> System:
    class Cut:
        """A second a layer and step, two more for the head."""

        def __init__(self, layers) -> None:
            self.layers = layers

        def stage(self, shape, stage):
            head = 2.0 if stage == len(self.layers) - 1 else 0.0
            return Cost(0.0, 0.0, self.layers[stage] + head, 0.0, 0.0)

        def host(self, shape) -> float:
            return 0.0

    traffic = Traffic(FOUR, Cluster(links, stages=len(layers)), layers)
    return System(Cut(layers), traffic, shared=True, recut=Cut, layer_block_bytes=64.0)


def stages(system: System, planned: float, move=None) -> list[float]:
    made = Step(0, 0, planned, (part(0, 1, start=3),), move=move)
    return [work.kernels for work in system.of(made).lanes[MAIN].stages]


def test_layers_change_hands_when_their_kv_has_arrived():
    """One layer of 3 blocks, 64 bytes each, at 64 bytes/s: 3 s after it was asked for."""
    system = moving()
    assert stages(system, 10.0, LayerMove((5, 3), 3)) == [4.0, 6.0]
    assert stages(system, 12.9) == [4.0, 6.0]
    assert stages(system, 13.0) == [5.0, 5.0]


def test_a_second_move_begins_when_the_first_is_over():
    """Back again with 2 blocks, asked for at 11: from 13 to 15."""
    system = moving()
    stages(system, 10.0, LayerMove((5, 3), 3))
    stages(system, 11.0, LayerMove((4, 4), 2))
    assert [stages(system, when) for when in (13.0, 14.9, 15.0)] == [[5.0, 5.0], [5.0, 5.0], [4.0, 6.0]]


def test_groups_move_by_themselves():
    system = moving()
    stages(system, 0.0, LayerMove((5, 3), 1))
    made = Step(1, 1, 9.0, (part(0, 1, start=3),))
    assert [work.kernels for work in system.of(made).lanes[MAIN].stages] == [4.0, 6.0]
    assert stages(system, 9.0) == [5.0, 5.0]


def test_room_is_kept_for_layers_that_may_come():
    layout = Layout.of(MODEL, stages=2)
    heavier = [layout.weight_bytes(stage) + layout.layer_bytes(0) for stage in range(2)]
    token = layout.kv_bytes_per_token(0) + layout.kv_bytes_per_token_layer
    room = max(heavier) + 10 * 16 * token
    assert blocks_beside_spares(layout, 1, DEVICE, 16, room) == 10
    with pytest.raises(ValueError, match=r"parallel.spare_layers=1 leaves device=.* no room for KV"):
        blocks_beside_spares(layout, 1, DEVICE, 16, min(heavier))


# --- all of it


class Halves:
    """Six sequences a step: two steps of them are in the pipeline at a time."""

    def phases(self, draft):
        yield Decodes(6)
        if not draft.tokens:
            yield Admissions(rows=6)


def serve_all(placement, recorder=None) -> float:
    """Seconds a step: 12 requests of 40 tokens on two stages of 4 s and 6 s, or 5 and 5."""
    spec = Spec(blocks=400, block_size=4, stages=2, layers=(4, 4), spare_layers=1, forwards_tokens=True)
    policy = Composed(Halves(), placement=placement)
    scheduler = Scheduler(spec, policy)
    system = moving(links=replace(LINKS, within=Link(1e6, latency=0.0)))
    log = Log(scheduler)
    requests = [Request(id, 0.0, 4, 40) for id in range(12)]
    backend = SimBackend(spec, system, build=Fabric(system._traffic.cluster))
    if recorder:
        serve(OpenLoop(requests), scheduler, backend, recorder)
        return backend.now()
    serve(OpenLoop(requests), scheduler, backend, log)
    assert set(log.outcomes.values()) == {"finished"} and set(log.tokens.values()) == {40}
    return log.dones[-1].finished / len(log.dones)


def test_a_policy_sees_where_layers_are_and_moves_them_once():
    seen = []

    class Once(Static):
        def __call__(self, draft):
            seen.append(draft.layers)
            return (5, 3)

    serve_all(Once())
    assert seen[0] == (4, 4) and set(seen[1:]) == {(5, 3)}


def test_a_move_is_an_event_of_the_trace(tmp_path):
    """With the layers and the blocks that it was decided with: 6 + 6 prompts of 4 tokens, a block each, at first."""

    class Once(Static):
        def __call__(self, draft):
            return (5, 3)

    with Trace(tmp_path) as trace:
        serve_all(Once(), trace)
    events = read(tmp_path, "events").to_pylist()
    (move,) = [event for event in events if event["kind"] == "layers"]
    assert (move["now"], move["sequence"], move["rank"], move["detail"]) == (0.0, None, 0, "to 5-3, 6 blocks")


def test_a_balanced_pipeline_is_faster():
    """Each step waits for the last stage: 6 s, or 5 s once a layer of a second has moved against sampling of two."""
    still, moved = serve_all(Static()), serve_all(rule(sample_base=2.0, window=5))
    assert still == pytest.approx(6.0, rel=0.03)
    assert moved == pytest.approx(5.0, rel=0.08)


def test_a_backend_without_room_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"policy.placement=dynapipe: no stage has room .* set parallel.spare_layers"):
        Scheduler(Spec(blocks=9, stages=2), Composed(ChunkedPrefill(), placement=rule()))


@pytest.mark.parametrize("options", [{"layer_base": -1.0}, {"window": 0}, {"most_extra": 0}, {"sample_per_row": -1.0}])
def test_impossible_figures_name_themselves(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"policy.placement.{name}="):
        rule(**options)
