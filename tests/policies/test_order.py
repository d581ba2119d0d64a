from policies.order import Fcfs
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
