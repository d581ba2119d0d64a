"""When ranks report and when a router hears of it. One unit is a second."""

import pytest

from playground.core import Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.route import LeastOutstanding
from tests.playground.fakes import Greedy, Log
from tests.playground.test_seam import request


def told(arrivals, answer=lambda request, view: 0, steps=(), **options):
    """(taken, waiting on rank 0) of what a router is told at each arrival; `steps` are launched and end in between."""
    seen = []
    policy = Greedy()

    def place(request, view):
        seen.append((view.taken, view.loads[0].waiting))
        return answer(request, view)

    policy.place = place
    scheduler = Scheduler(Spec(blocks=20, ranks=2), policy, **options)
    for id, now in enumerate(arrivals):
        scheduler.arrive(request(id), now)
    return seen


def test_reports_are_taken_on_the_interval_and_not_when_they_are_asked_for():
    """At 2.7 the report of 2.0 is known: nothing had changed since 1.5, when the third came."""
    assert told([0.0, 0.5, 1.5, 2.7, 2.9], report_interval=1.0) == [(0, 0), (0, 0), (1, 2), (2, 3), (2, 3)]


def test_a_report_says_what_was_before_anything_of_its_instant():
    assert told([1.0, 1.0, 2.0], report_interval=1.0) == [(1, 0), (1, 0), (2, 2)]


def test_a_report_arrives_later_than_it_was_taken():
    """Known at 1.4: that of 1.0 not before 1.5. At 2.5: that of 2.0."""
    seen = told([0.5, 1.4, 1.6, 2.4, 2.5], report_interval=1.0, report_delay=0.5)
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 3)]


def test_reports_may_be_under_way_several_at_a_time():
    """Delay 2.5: at 3.6 that of 1.0 is known, at 4.6 that of 2.0."""
    seen = told([0.5, 1.5, 3.4, 3.6, 4.6], report_interval=1.0, report_delay=2.5)
    assert seen == [(0, 0), (0, 0), (0, 0), (1, 1), (2, 2)]


def test_of_a_long_silence_only_the_newest_report_counts():
    assert told([0.5, 1e9 + 0.5], report_interval=1.0) == [(0, 0), (1e9, 1)]


@pytest.mark.parametrize(
    "steps, delay, known", [(1, 0.0, [0, 1, 2, 2]), (2, 0.0, [0, 0, 1, 2]), (1, 2.0, [0, 0, 1, 1])]
)
def test_ranks_report_after_steps_of_their_own(steps, delay, known):
    """Steps end at 1, 2, 3 and 4, when 1, 1, 2 and 2 requests run: who comes in a step is taken into the next one."""
    seen = []
    policy = Greedy()
    policy.place = lambda request, view: seen.append(view.loads[0].running) or 0
    spec = Spec(blocks=40, block_size=4, ranks=2)
    requests = [request(id, arrival=arrival, output=9) for id, arrival in enumerate((0.0, 1.5, 3.5, 4.5))]
    scheduler = Scheduler(spec, policy, report_steps=steps, report_delay=delay)
    serve(OpenLoop(requests), scheduler, SimBackend(spec, Modelled(Linear(1.0))), Log(scheduler))
    assert seen == known


def spread(own, **options):
    """Requests on each of two ranks when 10 come at once."""
    policy = Composed(ChunkedPrefill(), route=LeastOutstanding(own=own, ties="first"))
    scheduler = Scheduler(Spec(blocks=99, ranks=2), policy, **options)
    for id in range(10):
        scheduler.arrive(request(id), 0.25)
    return [len(rank.waiting) for rank in scheduler.ranks]


def test_a_burst_between_two_reports_goes_to_one_replica_unless_the_router_counts_its_own():
    assert spread(own=False) == [5, 5]  # present loads
    assert spread(own=False, report_interval=1.0) == [10, 0]
    assert spread(own=True, report_interval=1.0) == [5, 5]
    assert spread(own=True) == [5, 5]


def test_a_router_forgets_its_own_placements_when_a_report_knows_them():
    """Two at 0.5, to ranks 0 and 1; the report of 1.0 knows them, so that those of 1.5 are counted anew."""
    route = LeastOutstanding(own=True)
    scheduler = Scheduler(Spec(blocks=99, ranks=2), Composed(ChunkedPrefill(), route=route), report_interval=1.0)
    for id, now in enumerate((0.5, 0.5, 1.5, 1.5, 1.5)):
        scheduler.arrive(request(id), now)
    assert [len(rank.waiting) for rank in scheduler.ranks] == [3, 2]
    assert len(route._dispatched) == 3


def test_waiting_and_running_may_weigh_differently():
    from tests.policies.test_route import REQUEST, view

    assert LeastOutstanding(waiting=4.0)(REQUEST, view((1, 0), (0, 3))) == 1
    assert LeastOutstanding(waiting=2.0)(REQUEST, view((1, 0), (0, 3))) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"report_interval": -1.0}, r"report_interval=-1.0 must be 0 \(always fresh\) or more seconds"),
        ({"report_steps": -1}, r"report_steps=-1"),
        ({"report_interval": 1.0, "report_steps": 1}, r"report_interval=1.0 and report_steps=1: give one of the two"),
        ({"report_delay": -1.0, "report_steps": 1}, r"report_delay=-1.0"),
        ({"report_delay": 1.0}, r"report_delay=1.0: say when reports are taken"),
    ],
)
def test_reports_that_cannot_be_say_why(options, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(Spec(blocks=9, ranks=2), Greedy(), **options)
