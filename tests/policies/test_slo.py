"""Objectives kept by admission and by credits, worked by hand. The draft's clock stands at 10 s."""

from math import inf

import pytest

from playground.core import Slo
from policies.admission import Always
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.reserve import DecodeReserve
from policies.slo import Credits, SloGuard
from tests.policies.scene import Machine, Scene, placed, plan

GUARD = SloGuard(prefill=0.001, step=0.01, per_decode=0.002, memory=Always())


def why(draft):
    return [reject.why for reject in draft.rejected]


@pytest.mark.parametrize(("ttft", "rejected"), [(1.111, False), (1.109, True)])
def test_what_cannot_come_in_time_is_turned_away(ttft, rejected):
    # Came at 9: a second ago. 100 tokens take 0.1 s and a step 0.01: 1.11 s.
    scene = Scene()
    waiting = scene.waits(prompt=100, arrival=9.0, slo=Slo(ttft=ttft))
    draft = scene.draft()
    assert GUARD(draft, waiting, 100) is not rejected
    said = [f"slo.ttft={ttft} cannot be kept: the first token would come after 1.11 s"]
    assert why(draft) == (said if rejected else [])


def test_prompts_in_progress_come_first():
    # 500 tokens of it are left: 0.5 s more.
    scene = Scene()
    scene.partial(600, 100)
    waiting = scene.waits(prompt=100, arrival=9.0, slo=Slo(ttft=1.2))
    draft = scene.draft()
    assert not GUARD(draft, waiting, 100)
    assert why(draft) == ["slo.ttft=1.2 cannot be kept: the first token would come after 1.61 s"]


def test_who_has_had_tokens_is_not_turned_away():
    scene = Scene()
    sequence = scene.decodes(arrival=0.0, slo=Slo(ttft=0.1))
    scene.rank.preempt(sequence)
    draft = scene.draft()
    assert GUARD(draft, sequence, 100) and not draft.rejected


def test_a_pace_that_no_device_keeps_is_turned_away():
    scene = Scene()
    waiting = scene.waits(slo=Slo(tpot=0.011))
    draft = scene.draft()
    assert not GUARD(draft, waiting, 100)
    assert why(draft) == ["slo.tpot=0.011 cannot be kept: a step of one decode takes 0.012 s"]


@pytest.mark.parametrize(("running", "admitted"), [(4, True), (5, False)])
def test_a_virtual_batch_keeps_the_tightest_objective(running, admitted):
    # 0.01 + 0.002 x n <= 0.02: 5 of this objective in all.
    scene = Scene()
    for _ in range(running):
        scene.decodes(slo=Slo(tpot=0.02))
    waiting = scene.waits(slo=Slo(tpot=0.02))
    draft = scene.draft()
    assert GUARD(draft, waiting, 100) is admitted
    assert not draft.rejected  # it may come in later


@pytest.mark.parametrize(("loose", "admitted"), [(8, True), (9, False)])
def test_looser_ones_count_for_less(loose, admitted):
    # 1 + n / 2 = 5: 8 of half the pace beside a tight one.
    scene = Scene()
    for _ in range(loose):
        scene.decodes(slo=Slo(tpot=0.04))
    waiting = scene.waits(slo=Slo(tpot=0.02))
    assert GUARD(scene.draft(), waiting, 100) is admitted


def test_those_without_objectives_are_not_counted():
    assert GUARD.keeps({inf: 1000})
    assert GUARD.keeps({inf: 1000, 0.012: 1})


def test_memory_decides_beside_it_and_hears_of_victims():
    scene = Scene()
    waiting = scene.waits(prompt=160)
    scene.fill(scene.rank.pool.free - 9)
    assert not SloGuard()(scene.draft(), waiting, 160)
    guard = SloGuard(memory=DecodeReserve())
    scene = Scene()
    draft = scene.draft()
    draft.preempt(scene.decodes())
    guard.preempted(draft)
    assert guard.memory.ratio(draft) == 0.75


def test_a_composition_goes_on_with_the_next_after_one_is_turned_away():
    scene = Scene()
    running = scene.decodes(arrival=0.5)  # an idle rank would start somebody anyway
    late, next = scene.waits(arrival=1.0, slo=Slo(ttft=1.0)), scene.waits(arrival=2.0)
    draft = plan(Composed(ChunkedPrefill(), admission=GUARD), scene)
    assert [reject.request for reject in draft.rejected] == [late.id]
    assert placed(draft) == {running.id: 1, next.id: 100}


# --- credits


def test_half_the_pace_is_every_other_step():
    scene = Scene()
    tight, loose = scene.decodes(slo=Slo(tpot=0.02)), scene.decodes(slo=Slo(tpot=0.04))
    third = scene.decodes(slo=Slo(tpot=0.06))
    policy = Composed(Credits())
    served = []
    for _ in range(6):
        draft = plan(policy, scene)
        served.append(list(placed(draft)))
        for id in placed(draft):
            sequence = scene.rank.running[id]
            sequence.returned = sequence.promised
    # Earned: 1/2 and 1/3 a step.
    both, pair, trio = [tight.id, loose.id], [tight.id, third.id], [tight.id, loose.id, third.id]
    assert served == [[tight.id], both, pair, both, [tight.id], trio]


def test_equal_objectives_are_all_served_and_may_be_promised():
    scene = Scene()
    sequences = [scene.decodes(slo=Slo(tpot=0.03)) for _ in range(3)]
    policy = Composed(Credits())
    draft = plan(policy, scene)
    assert list(placed(draft)) == [sequence.id for sequence in sequences]
    assert policy.steady(draft) > 1
    scene.decodes(slo=Slo(tpot=0.04))
    assert Credits().steady(scene.draft()) == 0  # were all served now, they would not be in the next step


def test_one_without_an_objective_earns_the_least():
    machine = Machine(Composed(Credits(least=0.25)))
    machine.arrive(10, output=50, count=1)
    rows = [len(machine.turn()) for _ in range(9)]
    assert rows == [1] * 9  # nobody has an objective: all are served
    scene = Scene()
    scene.decodes(slo=Slo(tpot=0.02)), scene.decodes()
    policy, counts = Composed(Credits(least=0.25)), []
    for _ in range(8):
        draft = plan(policy, scene)
        counts.append(len(placed(draft)))
        for id in placed(draft):
            scene.rank.running[id].returned += 1
    assert counts == [1, 1, 1, 2, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SloGuard(prefill=-1), "policy.admission.prefill=-1 must be 0 or more seconds"),
        (lambda: Credits(tokens=0), "policy.budget.tokens=0 must be at least 1"),
        (lambda: Credits(least=0), r"policy.budget.least=0 must lie in \(0, 1\]"),
    ],
)
def test_one_line_says_what_is_wrong(make, said):
    with pytest.raises(ValueError, match=said):
        make()
