"""Levels, worked out by hand: quanta of 1, 2, 4, 8 decode steps, and a prompt of 100 tokens is one."""

import pytest

from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.mlfq import SkipJoinMlfq
from tests.policies.scene import Machine, Scene, placed, plan, victims


def mlfq(**options):
    return SkipJoinMlfq(**({"levels": 4, "prefill_tokens": 100, "starve_limit": 1000.0} | options))


def test_a_prompt_joins_where_its_quantum_covers_it():
    # 3 steps skip the quanta of 1 and 2; 20 steps are more than any: the last level.
    scene = Scene()
    huge, long, short, other = (scene.waits(prompt=tokens) for tokens in (2000, 300, 100, 50))
    assert list(mlfq()(scene.draft())) == [short, other, long, huge]


def test_the_first_quantum_is_the_first_levels():
    scene = Scene()
    long, short = scene.waits(prompt=400), scene.waits(prompt=200)
    assert list(mlfq(quantum=4.0)(scene.draft())) == [long, short]  # both at level 0 now


def test_a_new_request_takes_the_seat_of_one_that_used_its_quantum_up():
    # 100 tokens: 1 step of prompt, at level 0 to the first token; the second is asked for at level 1, with 2 more.
    for returned, prompt, expected in ((1, 100, [0]), (1, 200, []), (3, 200, [0]), (6, 200, [0]), (3, 400, [])):
        scene = Scene(max_seqs=1)
        scene.decodes(context=99 + returned, returned=returned, max_tokens=50)
        heir = scene.waits(prompt=prompt)
        draft = plan(Composed(ChunkedPrefill(), order=mlfq()), scene)
        assert victims(draft) == expected, (returned, prompt)
        assert (heir.id in placed(draft)) == bool(expected)


def test_of_those_at_higher_levels_the_highest_goes_first_and_the_last_level_is_the_last():
    scene = Scene(max_seqs=3)
    # Tokens at which quanta end, of a prompt of 1 step: 1, 3, 7; after that nobody falls any further.
    for returned in (3, 20, 900):
        scene.decodes(context=99 + returned, returned=returned, max_tokens=1000)
    heir, order = scene.waits(prompt=100), mlfq()
    draft = scene.draft()
    list(order(draft))
    assert [one.id for one in order.gives_way(draft, heir)] == [2, 1, 0]  # levels 3 and 3, the youngest first, and 2


def test_whoever_has_waited_too_long_begins_anew_at_the_top():
    """The scene's clock stands at 10 seconds; the long one came at 0, and is promoted after 9."""
    for limit, first in ((9.0, 0), (10.0, 1)):
        scene = Scene()
        scene.waits(prompt=2000, arrival=0.0), scene.waits(prompt=100, arrival=1.5)
        assert next(iter(mlfq(starve_limit=limit)(scene.draft()))).id == first


def test_a_promoted_one_has_a_whole_quantum_and_falls_again():
    scene = Scene(max_seqs=1)
    old = scene.waits(prompt=2000, arrival=0.0)
    order = mlfq(starve_limit=9.0, quantum=2.0)
    policy = Composed(ChunkedPrefill(), order=order)
    assert placed(plan(policy, scene)) == {old.id: 2000}
    heir, draft = scene.waits(prompt=100), scene.draft()
    old.promised = 1
    assert order.gives_way(draft, heir) == []
    old.promised = 2
    assert order.gives_way(draft, heir) == [old]


def test_an_id_that_comes_again_is_another_request():
    scene, order = Scene(), mlfq()
    draft = scene.draft()
    old = scene.waits(prompt=2000)
    list(order(draft))
    draft.reject(old, "unwanted")
    scene.requests = 0
    short, long = scene.waits(prompt=100), scene.waits(prompt=300)
    assert (short.id, list(order(scene.draft()))) == (old.id, [short, long])


def test_who_gave_way_waits_from_then_on():
    scene = Scene(max_seqs=1)
    running = scene.decodes(context=101, returned=2, max_tokens=50, arrival=-500.0)
    order = mlfq(starve_limit=100.0)
    draft = scene.draft()
    list(order(draft))
    draft.preempt(running)
    other = scene.waits(prompt=100, arrival=9.0)
    assert list(order(scene.draft())) == [other, running]


def test_short_answers_do_not_wait_for_long_ones():
    """One seat, a long answer first: nobody says which are short, and the mean falls all the same."""
    means = {}
    for name, order in {"mlfq": mlfq(), "fcfs": None}.items():
        policy = Composed(ChunkedPrefill(), order=order) if order else Composed(ChunkedPrefill())
        machine = Machine(policy, max_seqs=1)
        machine.arrive(prompt=16, output=300)
        for _ in range(20):
            machine.turn()
        machine.arrive(prompt=16, output=2, count=8)
        while machine.turn():
            pass
        means[name] = sum(ended.finished for ended in machine.scheduler.ended) / 9
    assert means["mlfq"] < means["fcfs"] / 4


@pytest.mark.parametrize(
    ("option", "value"),
    [("quantum", 0.0), ("ratio", 0.5), ("levels", 0), ("prefill_tokens", 0), ("starve_limit", 0.0)],
)
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=f"policy.order.{option}={value}"):
        SkipJoinMlfq(**{option: value})
