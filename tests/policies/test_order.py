from itertools import pairwise
from math import log
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import RequestView, Slo
from policies.order import Edf, Fcfs, Lof, Priority, Sjf
from policies.predictors import LogNormal, MaxTokens, RankNoise, Saturating
from tests.policies.scene import Scene


def test_the_first_come_is_the_first_served():
    scene = Scene()
    first, second = scene.waits(), scene.waits()
    draft = scene.draft()
    served = []
    for sequence in Fcfs()(draft):
        served.append(sequence)
        draft.take(sequence, 10)
    assert served == [first, second]


def test_nobody_overtakes_one_that_is_not_admitted():
    scene = Scene()
    first, _ = scene.waits(), scene.waits()
    assert list(Fcfs()(scene.draft())) == [first]


def test_one_that_is_turned_away_makes_room_for_the_next():
    scene = Scene()
    first, second = scene.waits(), scene.waits()
    draft = scene.draft()
    order = Fcfs()(draft)
    assert next(order) is first
    draft.reject(first, "too long")
    assert next(order) is second


def test_a_preempted_sequence_comes_before_all_that_wait():
    scene = Scene()
    running = scene.decodes()
    waiting = scene.waits(arrival=-1.0)  # it has even arrived before
    draft = scene.draft()
    draft.preempt(running)
    order = Fcfs()(draft)
    assert next(order) is running
    draft.take(running, 10)
    assert next(order) is waiting


def test_an_empty_queue_has_no_first():
    assert list(Fcfs()(Scene().draft())) == []


def test_the_shortest_answer_is_first_and_equals_go_by_arrival():
    scene = Scene()
    long, short, same = (scene.waits(max_tokens=tokens) for tokens in (300, 20, 20))
    assert list(Sjf()(scene.draft())) == [short, same, long]


def test_what_a_preempted_sequence_has_said_counts():
    scene = Scene()
    running = scene.decodes(context=200, returned=90, max_tokens=100)
    waiting = scene.waits(max_tokens=15)
    draft = scene.draft()
    draft.preempt(running)
    assert list(Sjf()(draft)) == [running, waiting]  # 10 tokens left against 15


def test_ageing_lets_the_long_one_come_before_later_ones():
    """200 tokens more for 10 seconds earlier: even at 20 tokens a second."""
    scene = Scene()
    long = scene.waits(max_tokens=300, arrival=0.0)
    short = scene.waits(max_tokens=100, arrival=10.0)
    assert list(Sjf(ageing=19.0)(scene.draft())) == [short, long]
    assert list(Sjf(ageing=21.0)(scene.draft())) == [long, short]


def test_predictions_are_as_wrong_as_they_say_and_the_same_every_time():
    views = [RequestView(id, 0.0, 10, 100) for id in range(4000)]
    wrong = [log(LogNormal(sigma=0.5, bias=2.0)(view) / 100) for view in views]
    assert fmean(wrong) == pytest.approx(log(2.0), abs=0.03)
    assert pstdev(wrong) == pytest.approx(0.5, abs=0.02)
    assert wrong == [log(LogNormal(sigma=0.5, bias=2.0)(view) / 100) for view in views]
    other = [log(LogNormal(sigma=0.5, bias=2.0, seed=1)(view) / 100) for view in views]
    assert abs(fmean(a * b for a, b in zip(wrong, other, strict=True)) - log(2.0) ** 2) < 0.02, "seeds are independent"


def test_wrong_predictions_change_who_is_first():
    scene = Scene()
    waiting = [scene.waits(max_tokens=100 + i) for i in range(50)]
    assert list(Sjf()(scene.draft())) == waiting
    assert list(Sjf(LogNormal(sigma=1.0))(scene.draft())) != waiting


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LogNormal(sigma=-0.1), "policy.order.predictor.sigma=-0.1"),
        (lambda: LogNormal(bias=0.0), "policy.order.predictor.bias=0.0"),
        (lambda: Sjf(ageing=float("nan")), "policy.order.ageing=nan"),
        (lambda: Priority(ageing=-1.0), "policy.order.ageing=-1.0"),
        (lambda: RankNoise(share=1.5), "policy.order.predictor.share=1.5"),
        (lambda: RankNoise(longest=0), "policy.order.predictor.longest=0"),
        (lambda: Saturating(0.5), "policy.order.predictor.ceiling=0.5"),
    ],
)
def test_options_out_of_range_are_named(make, told):
    with pytest.raises(ValueError, match=told):
        make()


# --- other keys


def test_the_longest_allowed_answer_is_first():
    scene = Scene()
    short, long, same = (scene.waits(max_tokens=tokens) for tokens in (20, 300, 300))
    assert list(Lof()(scene.draft())) == [long, same, short]


def test_the_lowest_priority_number_is_first_wherever_it_was_before():
    """vLLM's: a preempted sequence goes back to its place."""
    scene = Scene()
    running = scene.decodes(priority=2)
    late, urgent, early = (scene.waits(priority=priority) for priority in (2, 0, 2))
    draft = scene.draft()
    draft.preempt(running)
    assert list(draft.waiting)[0] is running  # noqa: RUF015
    assert list(Priority()(draft)) == [urgent, running, late, early]


def test_the_less_urgent_gain_on_those_that_come_later():
    # 10 seconds earlier are 2 priorities at 0.2 a second.
    for ageing, first in ((0.19, 1), (0.21, 0)):
        scene = Scene()
        scene.waits(priority=2, arrival=0.0), scene.waits(priority=0, arrival=10.0)
        assert next(iter(Priority(ageing)(scene.draft()))).id == first


def test_the_earliest_deadline_of_a_next_token_is_first():
    scene = Scene()
    never = scene.waits(arrival=0.0).id
    late = scene.waits(arrival=1.0, slo=Slo(ttft=5.0)).id  # due at 6
    soon = scene.waits(arrival=4.0, slo=Slo(ttft=1.0)).id  # due at 5
    # It has 10 tokens of 0.2 s each: the next is due at 2 + 1.5 + 2 = 5.5
    half = scene.decodes(returned=10, arrival=2.0, slo=Slo(1.5, 0.2))
    endless = scene.decodes(returned=10, arrival=0.5, slo=Slo(ttft=1.5))
    draft = scene.draft()
    draft.preempt(half), draft.preempt(endless)
    assert [one.id for one in Edf()(draft)] == [soon, half.id, late, never, endless.id]


# --- predictors


def views(count=3000):
    """True lengths are log-uniform in [1, 2048]."""
    wild = Random(1)
    return [RequestView(id, 0.0, 10, round(2048 ** wild.random())) for id in range(count)]


def tau(pairs):
    """Kendall's, of pairs of (truth, prediction), from neighbours."""
    agree = [(a > c) == (b > d) for (a, b), (c, d) in pairwise(pairs) if a != c]
    return 2 * fmean(agree) - 1


def test_noise_in_rank_is_of_a_share_of_requests():
    exact = [view.max_tokens for view in views()]
    for share in (0.0, 0.3, 1.0):
        noisy = [RankNoise(share)(view) for view in views()]
        assert fmean(a != b for a, b in zip(exact, noisy, strict=True)) == pytest.approx(share, abs=0.03)
        expected = (1 - share) ** 2 + 2 / 3 * share * (1 - share)
        assert tau(zip(exact, noisy, strict=True)) == pytest.approx(expected, abs=0.05)
        assert min(noisy) >= 1 and max(noisy) <= 2048
        noise = [log(b, 2048) for a, b in zip(exact, noisy, strict=True) if a != b]
        assert not noise or fmean(noise) == pytest.approx(0.5, abs=0.04), "whatever chose who is noise"


def test_saturation_is_what_no_prediction_exceeds():
    views = [RequestView(0, 0.0, 10, tokens) for tokens in (99, 100, 5000)]
    assert [Saturating(100.0)(view) for view in views] == [99, 100, 100]


def test_errors_come_one_over_another():
    view = RequestView(3, 0.0, 10, 700)
    assert LogNormal(bias=0.5, of=Saturating(600.0))(view) == 300.0
    assert RankNoise(0.0, of=LogNormal(bias=2.0))(view) == 1400.0
    assert Saturating(50.0, of=RankNoise(0.0))(view) == 50.0
    assert MaxTokens()(view) == 700


# --- the queue is kept from step to step


@given(st.lists(st.tuples(st.sampled_from("wwwwppaae"), st.integers(0, 9)), max_size=60), st.booleans())
def test_a_kept_queue_is_what_sorting_anew_gives(events, front):
    """Whoever comes (w), is admitted and preempted (p, a) or ends (e): the order is that of all that wait."""
    scene = Scene(blocks=4000)
    scene.rank.requeue_front = front
    order = Lof()
    for kind, size in events:
        draft = scene.draft()
        waiting, running = list(draft.waiting), list(draft.running)
        if kind == "w":
            scene.waits(prompt=5, max_tokens=size + 1)
        elif kind == "a" and waiting:
            draft.take(waiting[size % len(waiting)], 5)
        elif kind == "p" and running:
            draft.preempt(running[size % len(running)])
        elif kind == "e" and waiting:
            draft.reject(waiting[size % len(waiting)], "unwanted")
        if size % 2:
            expected = sorted(draft.waiting, key=lambda one: (-one.max_tokens, one.request.arrival, one.id))
            assert list(order(draft)) == expected


@pytest.mark.parametrize("front", [True, False])
def test_one_that_comes_back_is_found_at_either_end_of_the_queue(front):
    scene, order = Scene(), Lof()
    scene.rank.requeue_front = front
    waiting = [scene.waits(max_tokens=tokens) for tokens in (30, 20, 10)]
    draft = scene.draft()
    assert list(order(draft)) == waiting
    draft.take(waiting[1], 5)
    assert list(order(draft)) == [waiting[0], waiting[2]]
    draft.preempt(waiting[1])
    newcomer = scene.waits(max_tokens=5)
    assert list(order(draft)) == [*waiting, newcomer]


def test_a_look_costs_what_came_not_what_waits():
    calls = []

    def predictor(request):
        calls.append(request.id)
        return request.max_tokens

    scene, order = Scene(), Sjf(predictor)
    for _ in range(300):
        scene.waits()
    assert next(iter(order(scene.draft()))).id == 0
    assert len(calls) == 300
    newcomer = scene.waits(max_tokens=1)
    assert next(iter(order(scene.draft()))) is newcomer
    assert calls[300:] == [newcomer.id]


def test_those_that_left_are_not_kept():
    scene, order = Scene(blocks=10), Lof()
    scene.waits(max_tokens=9999)
    for _ in range(2000):
        draft = scene.draft()
        draft.reject(scene.waits(max_tokens=1), "unwanted") if draft.waiting else None
        next(iter(order(draft)))
        scene.waits(max_tokens=2)
        next(iter(order(scene.draft())))
        draft.reject(list(draft.waiting)[-1], "unwanted")
    (ranking,) = order._ranks.values()
    assert len(ranking._known) < 200
    assert sum(map(len, ranking._shelves.values())) < 200
