"""Orders for which running sequences give way to waiting ones, and how compositions have them do it."""

import pytest

from playground.draft import How
from policies.admission import FullPrompt
from policies.budget import ChunkedPrefill, Orca
from policies.composed import PATIENCE, Composed
from policies.order import Priority
from policies.predictors import MaxTokens
from policies.preemptive import PreemptivePriority, Srtf
from policies.victims import LastArrived
from tests.policies.scene import Machine, Scene, placed, plan, victims


def srtf(**options):
    return Composed(ChunkedPrefill(), order=Srtf(**({"hysteresis": 0.0} | options)))


def test_the_one_with_most_left_gives_its_seat_to_one_with_less():
    # Left: 100 - 40 = 60, 300 - 10 = 290, 90 - 1 = 89; the waiting one has 70.
    scene = Scene(max_seqs=3)
    scene.decodes(returned=40, max_tokens=100), scene.decodes(returned=10, max_tokens=300)
    scene.decodes(returned=1, max_tokens=90)
    waiting = scene.waits(prompt=30, max_tokens=70)
    draft = plan(srtf(), scene)
    assert victims(draft) == [1]
    assert placed(draft) == {0: 1, 2: 1, waiting.id: 30}


def test_of_equals_the_youngest_goes_first():
    scene = Scene(max_seqs=3)
    for arrival in (5.0, 7.0, 6.0):
        scene.decodes(max_tokens=300, arrival=arrival)
    heir, order = scene.waits(max_tokens=5), Srtf()
    assert [one.id for one in order.gives_way(scene.draft(), heir)] == [1, 2, 0]


def test_whoever_waits_longer_is_not_served_for_it():
    scene = Scene(max_seqs=2)
    scene.decodes(returned=40, max_tokens=100), scene.decodes(returned=1, max_tokens=61)
    scene.waits(prompt=30, max_tokens=60)  # as much as either has left
    assert victims(plan(srtf(), scene)) == []


def test_hysteresis_is_what_the_heir_must_be_shorter_by():
    # 100 tokens are left, 99 when this step's decode is placed, and prompts come after decodes.
    for hysteresis, expected in ((29.0, []), (28.0, [0])):
        scene = Scene(max_seqs=1)
        scene.decodes(returned=10, max_tokens=110)
        scene.waits(max_tokens=70)
        assert victims(plan(srtf(hysteresis=hysteresis), scene)) == expected


def test_with_ageing_an_early_long_one_keeps_its_seat_and_comes_before_late_short_ones():
    # 89 tokens are left after this step's decode, since 0 s; the heir has 70 since 4 s: equal at 19 / 4 a second.
    for ageing, expected in ((0.0, [0]), (4.5, [0]), (4.75, []), (9.0, [])):
        scene = Scene(max_seqs=1)
        scene.decodes(returned=10, max_tokens=100, arrival=0.0)
        scene.waits(max_tokens=70, arrival=4.0)
        assert victims(plan(srtf(ageing=ageing), scene)) == expected
        scene = Scene()
        scene.waits(max_tokens=89, arrival=0.0), scene.waits(max_tokens=70, arrival=4.0)
        first = next(iter(Srtf(ageing=ageing)(scene.draft()))).id
        assert first == (1 if expected else 0)


def test_one_that_outlived_its_prediction_is_as_old_as_it_is():
    # Preempted, since 10 s, with nothing left by its prediction: 1 + 10 to the other's 6 + 0.
    scene = Scene()
    victim = scene.decodes(returned=50, max_tokens=100, arrival=10.0)
    scene.draft().preempt(victim)
    other = scene.waits(max_tokens=6, arrival=0.0)
    order = Srtf(predictor=lambda request: 5.0 if request.max_tokens == 100 else 6.0, ageing=1.0)
    assert [one.id for one in order(scene.draft())] == [other.id, victim.id]


def test_one_that_outlived_its_prediction_keeps_its_seat():
    scene = Scene(max_seqs=1)
    scene.decodes(returned=90, max_tokens=1000)
    scene.waits(max_tokens=2)

    def predictor(request):
        return 50.0 if request.max_tokens == 1000 else 2.0

    assert victims(plan(srtf(predictor=predictor), scene)) == []


def test_memory_is_taken_from_as_many_as_it_takes():
    # The heir's 64 tokens need 4 blocks; each rival has 2 of the 6, and the one with most left goes first.
    scene = Scene(blocks=6)
    scene.decodes(30, max_tokens=100), scene.decodes(30, max_tokens=300), scene.decodes(30, max_tokens=200)
    heir = scene.waits(prompt=64, max_tokens=5)
    policy = Composed(ChunkedPrefill(), order=Srtf(hysteresis=0.0), admission=FullPrompt(0.0))
    draft = plan(policy, scene)
    assert victims(draft) == [1, 2]
    assert placed(draft) == {0: 1, heir.id: 64}


def test_nobody_gives_way_in_vain():
    # All rivals' blocks would not hold its prompt: the first has less left than it, and keeps 4 of 6.
    scene = Scene(blocks=6)
    scene.decodes(60, max_tokens=4), scene.decodes(30, max_tokens=300)
    scene.waits(prompt=64, max_tokens=5)
    assert victims(plan(srtf(), scene)) == []


def test_nor_for_a_prompt_that_is_too_long_for_the_step():
    scene = Scene(max_seqs=2, max_tokens=64)
    scene.decodes(max_tokens=300), scene.decodes(max_tokens=300)
    scene.waits(prompt=64, max_tokens=5)  # 62 tokens are left beside the decodes
    assert victims(plan(Composed(Orca(8), order=Srtf()), scene)) == []


def test_of_a_rival_in_flight_blocks_are_waited_for():
    scene = Scene(blocks=4, stages=2)
    scene.decodes(30, returned=2, max_tokens=300), scene.decodes(30, returned=2, max_tokens=200)
    scene.flies(*scene.rank.running.values())
    scene.waits(prompt=32, max_tokens=5)
    draft = plan(srtf(), scene)
    assert (victims(draft), placed(draft), draft.blocks_freeing) == ([0], {}, 2)
    assert victims(plan(srtf(), scene)) == []


def test_who_gives_way_is_swapped_where_victims_are():
    scene = Scene(max_seqs=1, host_blocks=100)
    scene.decodes(max_tokens=300)
    scene.waits(max_tokens=5)
    policy = Composed(ChunkedPrefill(), order=Srtf(), victims=LastArrived("swap"))
    assert plan(policy, scene).preempted[0].how is How.SWAP


def test_who_suffered_enough_gives_way_to_elders_only():
    for arrival, expected in ((20.0, []), (-1.0, [0])):
        scene = Scene(max_seqs=1)
        scene.decodes(max_tokens=300).preemptions = PATIENCE
        scene.waits(max_tokens=5, arrival=arrival)
        assert victims(plan(srtf(), scene)) == expected


def test_nobody_gives_way_to_one_that_must_wait_for_its_elders():
    scene = Scene(max_seqs=1)
    scene.decodes(max_tokens=300, arrival=-1.0)
    scene.waits(max_tokens=5).preemptions = PATIENCE
    assert victims(plan(srtf(), scene)) == []


def test_the_less_urgent_give_way_from_the_threshold_on_the_youngest_first():
    """SGLang's: the highest number is the most urgent; 3 is more urgent than 0 by more than 2, than 1 it is not."""
    scene = Scene(max_seqs=4)
    for priority in (0, 1, 0, 2):
        scene.decodes(priority=priority)
    order = PreemptivePriority(threshold=2)
    heir = scene.waits(priority=3)
    draft = scene.draft()
    assert [one.id for one in order.gives_way(draft, heir)] == [2, 0]
    assert [one.id for one in PreemptivePriority(threshold=0).gives_way(draft, heir)] == [2, 0, 1, 3]
    assert victims(plan(Composed(ChunkedPrefill(), order=order), scene)) == [2]


def test_lowest_first_turns_priorities_round():
    scene = Scene(max_seqs=2)
    scene.decodes(priority=0), scene.decodes(priority=9)
    urgent, idle = scene.waits(priority=1), scene.waits(priority=7)
    order = PreemptivePriority(threshold=5, lowest_first=True)
    assert list(order(scene.draft())) == [urgent, idle]
    assert victims(plan(Composed(ChunkedPrefill(), order=order), scene)) == [1]
    assert next(iter(PreemptivePriority()(scene.draft()))).request.priority == 9, "who gave way waits like all others"


def test_vllms_priority_takes_nobodys_seat():
    """vllm-project/vllm #40004: the most urgent waits while the least urgent runs."""
    scene = Scene(max_seqs=1)
    scene.decodes(priority=9)
    scene.waits(priority=0)
    assert victims(plan(Composed(ChunkedPrefill(), order=Priority()), scene)) == []


def test_nothing_is_promised_while_somebody_may_take_over():
    for policy, promises in ((srtf(), False), (Composed(ChunkedPrefill()), True)):
        scene = Scene(max_seqs=1)
        scene.decodes(max_tokens=300)
        assert policy.steady(plan(policy, scene))
        scene = Scene(max_seqs=1)
        scene.decodes(max_tokens=300), scene.waits(max_tokens=299)
        assert bool(policy.steady(plan(policy, scene))) == promises


def test_shortest_remaining_first_is_best_for_the_mean():
    """One long answer and nine short ones that come later, one seat: 9 short ones do not wait for the long one."""
    finished = {}
    for name, order in {"srtf": Srtf(MaxTokens(), 0.0), "priority": Priority()}.items():
        machine = Machine(Composed(ChunkedPrefill(), order=order), max_seqs=1)
        machine.arrive(prompt=16, output=200)
        machine.turn()
        machine.arrive(prompt=16, output=5, count=9)
        while machine.turn():
            pass
        finished[name] = sorted(ended.finished for ended in machine.scheduler.ended)
    assert finished["srtf"][8] < finished["priority"][0]
    assert finished["srtf"][9] < finished["priority"][9] + 3, "its prompt is computed twice, once"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Srtf(hysteresis=-1.0), "policy.order.hysteresis=-1.0"),
        (lambda: Srtf(ageing=-1.0), "policy.order.ageing=-1.0"),
        (lambda: PreemptivePriority(threshold=-1), "policy.order.threshold=-1"),
    ],
)
def test_options_out_of_range_are_named(make, told):
    with pytest.raises(ValueError, match=told):
        make()
