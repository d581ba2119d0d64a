from math import log
from statistics import fmean, pstdev

import pytest

from playground.core import RequestView
from policies.order import Fcfs, Sjf
from policies.predictors import LogNormal
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
    ],
)
def test_options_out_of_range_are_named(make, told):
    with pytest.raises(ValueError, match=told):
        make()
