"""Turned away on arrival: who is new, what is predicted, and how the naive rule swings. The clock stands at 10 s."""

import pytest

from playground.core import Request, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import NoTrace
from playground.workload.source import OpenLoop
from policies.admission import Always
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.rejection import Arrivals, EarlyRejection, LoadRejection
from policies.reserve import DecodeReserve
from tests.policies.scene import Scene


def screened(rule, scene):
    draft = scene.draft()
    rule.screen(draft)
    return {reject.request: reject.why for reject in draft.rejected}


# --- who is new


def test_everybody_is_new_once():
    scene, arrivals = Scene(), Arrivals()
    first = [scene.waits(arrival=1.0), scene.waits(arrival=2.0), scene.waits(arrival=2.0)]
    assert arrivals.since(scene.draft()) == first
    assert arrivals.since(scene.draft()) == []
    second = [scene.waits(arrival=2.0), scene.waits(arrival=3.0)]
    assert arrivals.since(scene.draft()) == second
    third = [scene.waits(arrival=3.0)]
    assert arrivals.since(scene.draft()) == third
    assert arrivals.since(scene.draft()) == []


def test_nobody_is_new_again_when_those_after_it_have_left():
    scene, arrivals = Scene(), Arrivals()
    scene.waits(arrival=1.0)
    arrivals.since(scene.draft())
    later = scene.waits(arrival=1.0)
    assert arrivals.since(scene.draft()) == [later]
    scene.rank.end(later)
    assert arrivals.since(scene.draft()) == []


def test_whoever_comes_back_is_not_new_wherever_it_queues():
    scene, arrivals = Scene(), Arrivals()
    scene.waits(arrival=1.0)
    back = scene.decodes(arrival=0.0)
    arrivals.since(scene.draft())
    scene.rank.requeue_front = False
    scene.rank.preempt(back)
    assert arrivals.since(scene.draft()) == []
    new = scene.waits(arrival=5.0)
    scene.rank.preempt(scene.decodes(arrival=0.5))
    assert arrivals.since(scene.draft()) == [new]


# --- what is predicted


def decoding(scene, since, count=1):
    for _ in range(count):
        scene.decodes().first_token = since


@pytest.mark.parametrize(
    ("most", "rejected"), [(4, {}), (3, {2: "4 decodes predicted 0.1 s from now, when its prompt is computed"})]
)
def test_decodes_of_now_and_prompts_ahead_count(most, rejected):
    # Two decodes that began at 8 and take 5 s; a prompt half computed and it: 4. 60 + 40 tokens: 0.1 s.
    scene = Scene()
    decoding(scene, 8.0, 2)
    rule = EarlyRejection(most, prefill=0.001, decode=5.0)
    scene.requests = 2
    waiting = scene.waits(prompt=40)
    partial = scene.partial(120, 60)
    assert (waiting.id, partial.id) == (2, 3)
    assert screened(rule, scene) == rejected


@pytest.mark.parametrize(("since", "load"), [(5.11, 2), (5.09, 1)])
def test_decodes_that_will_have_ended_do_not_count(since, load):
    # The prompt is computed at 10.1; answers take 5 s.
    scene = Scene()
    decoding(scene, since)
    assert EarlyRejection(prefill=0.001, decode=5.0).load(scene.draft(), 0.1, ahead=0) == load


def test_prompts_ahead_may_have_ended_too_where_the_wait_is_long():
    # 20 s of prompts, answers of 5 s: a quarter of them still decodes.
    rule = EarlyRejection(prefill=0.001, decode=5.0)
    assert rule.load(Scene().draft(), 20.0, ahead=40) == 11
    assert rule.load(Scene().draft(), 0.0, ahead=40) == 41


def test_each_that_is_let_in_counts_for_the_next():
    scene = Scene()
    ids = [scene.waits(prompt=100).id for _ in range(4)]
    assert list(screened(EarlyRejection(2, prefill=0.001), scene)) == ids[2:]


def test_the_naive_rule_counts_decodes_of_now_only():
    scene, rule = Scene(), LoadRejection(2)
    decoding(scene, 8.0)
    scene.partial(100, 50)
    scene.waits(), scene.waits()
    assert screened(rule, scene) == {}
    decoding(scene, 8.0)
    late = scene.waits()
    assert screened(rule, scene) == {late.id: "2 decodes now, at most 2 wanted"}


def test_memory_decides_who_of_the_others_starts():
    scene = Scene()
    waiting = scene.waits(prompt=160)
    scene.fill(scene.rank.pool.free - 9)
    for rule in (EarlyRejection(), LoadRejection()):
        assert not rule(scene.draft(), waiting, 160)
    scene = Scene()
    draft = scene.draft()
    draft.preempt(scene.decodes())
    for kind in (EarlyRejection, LoadRejection):
        rule = kind(memory=DecodeReserve())
        rule.preempted(draft)
        assert rule.memory.ratio(draft) == 0.75


# --- the loop is closed


class Decodes(NoTrace):
    """How many sequences decode, step by step, and who was turned away."""

    def __init__(self):
        self.rows, self.rejected = [], 0

    def launched(self, step, group):
        self.rows.append(sum(part.length == 1 for part in step.slices))

    def ended(self, ended):
        self.rejected += ended.outcome == "rejected"


def overloaded(admission) -> Decodes:
    """20 requests a second for 30 s. Prompts of 240 tokens take 0.1 s each, answers of 400 tokens 8 s."""
    spec = Spec(blocks=100_000, max_seqs=1000)
    log = Decodes()
    scheduler = Scheduler(spec, Composed(ChunkedPrefill(64), admission=admission))
    requests = [Request(id, id / 20, 240, 400, 400) for id in range(600)]
    serve(OpenLoop(requests), scheduler, SimBackend(spec, Modelled(Linear(0.02), 1)), log)
    return log


def test_the_naive_rule_swings_and_prediction_damps_it():
    naive = overloaded(LoadRejection(16, memory=Always()))
    predicted = overloaded(EarlyRejection(16, prefill=0.0005, decode=8.0, memory=Always()))
    settled = slice(500, 1400)  # some 20 s after the queue has filled
    swings = [max(log.rows[settled]) - min(log.rows[settled]) for log in (naive, predicted)]
    # Until the sixteenth decodes, as many queue: twice what was wanted. Later waves are as high.
    assert max(naive.rows) == 32 and swings[0] >= 16
    assert max(predicted.rows) == 16 and swings[1] <= 2
    assert naive.rejected > 500 and predicted.rejected > 500


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EarlyRejection(0), "policy.admission.most=0 must be at least 1 decode"),
        (lambda: LoadRejection(0), "policy.admission.most=0 must be at least 1 decode"),
        (lambda: EarlyRejection(prefill=-1), "policy.admission.prefill=-1 must be 0 or more seconds a token"),
        (lambda: EarlyRejection(decode=0), "policy.admission.decode=0 must be above 0 seconds an answer"),
    ],
)
def test_one_line_says_what_is_wrong(make, said):
    with pytest.raises(ValueError, match=said):
        make()
