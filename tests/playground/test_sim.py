"""The simulated backend against times worked out by hand. One unit is a second."""

from math import inf

import pytest

from playground.core import COPY_IN, COPY_OUT, MAIN, Copy, Done, Request, Slice, Spec, Step, Turn
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.contention import APART, Gain
from playground.sim.cost import Linear
from playground.sim.durations import LaneTimes, Modelled, StepTimes
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import LastArrived
from tests.playground.fakes import Greedy, Log


class Table:
    """Durations by step: (host, {lane: (stages, transfer)})."""

    def __init__(self, *rows) -> None:
        self._rows = rows

    def of(self, step: Step) -> StepTimes:
        host, lanes = self._rows[step.id]
        return StepTimes(host, {lane: LaneTimes(*times) for lane, times in lanes.items()})


def part(sequence=0, length=1, start=0, lane=MAIN, rank=0, samples=True) -> Slice:
    return Slice(sequence, 0, rank, start, length, samples, (), lane)


def step(id, *slices, group=0, **more) -> Step:
    return Step(id, group, 0.0, slices or (part(),), **more)


def rows(*work, transfer=0.0, host=0.0):
    return Table(*[(host, {MAIN: (stages, transfer)}) for stages in work])


def completions(backend) -> list[Done]:
    found = []
    try:
        while done := backend.wait():
            found.append(done)
    except RuntimeError:
        return found


def times(dones) -> list[tuple[float, float]]:
    return [(done.started, done.finished) for done in dones]


# --- stages


def test_steps_on_one_stage_follow_one_another():
    backend = SimBackend(Spec(blocks=9), rows((2.0,), (3.0,)))
    backend.launch(step(0))
    backend.launch(step(1))
    assert times(completions(backend)) == [(0.0, 2.0), (2.0, 5.0)]


def test_two_stages_work_at_the_same_time():
    """By hand: start(m, s) = max(end(m, s-1) + transfer, end(m-1, s))."""
    backend = SimBackend(Spec(blocks=9, stages=2), rows((2.0, 3.0), (2.0, 3.0), (4.0, 1.0), transfer=0.5))
    for id in range(3):
        backend.launch(step(id))
    assert [done.stages for done in completions(backend)] == [
        ((0.0, 2.0), (2.5, 5.5)),
        ((2.0, 4.0), (5.5, 8.5)),
        ((4.0, 8.0), (8.5, 9.5)),
    ]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_keeps_its_recurrence(stages):
    work = [tuple(float(1 + (7 * m + 3 * s) % 5) for s in range(stages)) for m in range(6)]
    transfer = 0.25
    backend = SimBackend(Spec(blocks=9, stages=stages), rows(*work, transfer=transfer))
    for id in range(len(work)):
        backend.launch(step(id))
    ends: dict[tuple[int, int], float] = {}
    for m, done in enumerate(completions(backend)):
        for s, (started, finished) in enumerate(done.stages):
            arrived = ends[m, s - 1] + transfer if s else 0.0
            assert started == max(arrived, ends.get((m - 1, s), 0.0))
            assert finished == started + work[m][s]
            ends[m, s] = finished
        assert (done.started, done.finished) == (done.stages[0][0], done.stages[-1][1])


def test_a_link_carries_one_transfer_at_a_time():
    backend = SimBackend(Spec(blocks=9, stages=2), rows((1.0, 1.0), (1.0, 1.0), transfer=3.0))
    backend.launch(step(0))
    backend.launch(step(1))
    assert [done.stages[1] for done in completions(backend)] == [(4.0, 5.0), (7.0, 8.0)]


def test_replicas_do_not_wait_for_one_another():
    backend = SimBackend(Spec(blocks=9, ranks=2), rows((5.0,), (1.0,)))
    backend.launch(step(0, group=0))
    backend.launch(step(1, group=1))
    assert [(done.step, done.finished) for done in completions(backend)] == [(1, 1.0), (0, 5.0)]


# --- what a step takes


def modelled(spec, **cost) -> SimBackend:
    return SimBackend(spec, Modelled(Linear(**cost), spec.stages))


def test_a_lockstep_group_takes_as_long_as_its_slowest_rank():
    backend = modelled(Spec(blocks=9, ranks=3, lockstep=True), base=1.0, per_token=0.5)
    backend.launch(step(0, part(0, 2), part(1, 8, rank=1), part(2, 4, rank=2)))
    assert times(completions(backend)) == [(0.0, 5.0)]


def test_ranks_of_a_group_plan_at_the_same_time():
    backend = modelled(Spec(blocks=9, ranks=2, lockstep=True), base=1.0, host_base=0.5, host_per_sequence=0.25)
    backend.launch(step(0, part(0), part(1), part(2, rank=1)))
    assert backend.now() == 1.0


def test_a_step_is_as_long_on_every_stage_as_it_is_there():
    backend = modelled(Spec(blocks=9, stages=2), base=1.0, per_token=0.5, per_transfer=0.25)
    backend.launch(step(0, part(0, 4)))
    assert completions(backend)[0].stages == ((0.0, 3.0), (3.25, 6.25))


# --- host


def test_planning_delays_the_launch():
    backend = SimBackend(Spec(blocks=9), rows((2.0,), host=0.5))
    backend.launch(step(0))
    (done,) = completions(backend)
    assert (done.host, done.launched, done.started, done.finished) == (0.5, 0.5, 0.5, 2.5)


def test_planning_a_step_while_another_runs_hides_it():
    backend = SimBackend(Spec(blocks=9), rows((2.0,), (2.0,), host=0.5))
    backend.launch(step(0))
    backend.launch(step(1))
    assert times(completions(backend)) == [(0.5, 2.5), (2.5, 4.5)]


@pytest.mark.parametrize("run_ahead, ends", [(1, 10.0), (2, 8.5)])
def test_run_ahead_hides_the_host(run_ahead, ends):
    """Four steps of 2 s, each planned in 0.5 s: 4 x 2.5, or 0.5 + 4 x 2."""
    spec = Spec(blocks=9, block_size=4, forwards_tokens=True)
    policy = Composed(ChunkedPrefill(), overlap=Overlap(run_ahead))
    log = serve_all([Request(0, 0.0, 4, 4)], policy, spec, Linear(2.0, host_base=0.5))
    assert log.dones[3].finished == ends


# --- lanes


@pytest.mark.parametrize(
    "gain, short, long",
    [
        (0.0, 4.0, 6.0),  # both at half speed until the short one has done 2; 2 are left of the long one
        (0.5, 8 / 3, 14 / 3),  # both at 3/4: 2 / 0.75, then 2 alone
        (1.0, 2.0, 4.0),  # neither feels the other
    ],
)
def test_two_lanes_share_a_device(gain, short, long):
    backend = SimBackend(Spec(blocks=9), Table((0.0, {"a": ((2.0,),), "b": ((4.0,),)})), law=Gain(gain))
    backend.launch(step(0, part(0, lane="a"), part(1, lane="b")))
    dones = completions(backend)
    assert [done.lane for done in dones] == ["a", "b"]
    assert [done.finished for done in dones] == pytest.approx([short, long], abs=1e-12)
    assert [list(done.tokens) for done in dones] == [[0], [1]]


def test_a_lane_that_starts_later_slows_what_runs():
    """a alone until 1, then both at half speed: b has done its 1 at 3, a goes on alone until 4."""
    rows = [(0.0, {"a": ((3.0,),)}), (0.0, {"b": ((1.0,),)})]
    backend = SimBackend(Spec(blocks=9), Table(*rows))
    backend.launch(step(0, part(0, lane="a")))
    assert backend.wait(1.0) is None
    backend.launch(step(1, part(1, lane="b")))
    assert times(completions(backend)) == [(1.0, 3.0), (0.0, 4.0)]


def test_one_lanes_steps_keep_their_order():
    rows = [(0.0, {"a": ((3.0,),)}), (0.0, {"a": ((1.0,),)})]
    backend = SimBackend(Spec(blocks=9), Table(*rows), law=APART)
    backend.launch(step(0, part(0, lane="a")))
    backend.launch(step(1, part(1, lane="a")))
    assert [(done.step, done.finished) for done in completions(backend)] == [(0, 3.0), (1, 4.0)]


@pytest.mark.parametrize("gain", [-0.1, 1.1])
def test_an_impossible_gain_names_itself(gain):
    with pytest.raises(ValueError, match=r"backend\.contention\.gain=.* must lie in"):
        Gain(gain)


# --- copies


def test_a_copy_runs_beside_the_computation():
    backend = modelled(Spec(blocks=9, host_blocks=9), base=2.0, per_block=0.5)
    backend.launch(step(0, part(0), copies=(Copy(1, 1, 0, (1, 2, 3), (0, 1, 2), COPY_OUT),)))
    assert [(done.lane, done.started, done.finished) for done in completions(backend)] == [
        (COPY_OUT, 0.0, 1.5),
        (MAIN, 0.0, 2.0),
    ]


def test_copies_of_one_direction_follow_one_another_and_the_other_runs_beside():
    backend = modelled(Spec(blocks=9, host_blocks=9), base=2.0, per_block=1.0)
    out = [Copy(id, 1, 0, (id, id + 1), (id, id + 1), COPY_OUT) for id in (0, 2)]
    backend.launch(Step(0, 0, 0.0, (), copies=(out[0], Copy(5, 1, 0, (5,), (5,), COPY_IN))))
    backend.launch(Step(1, 0, 0.0, (), copies=(out[1],)))
    assert [(done.step, done.lane, done.finished) for done in completions(backend)] == [
        (0, COPY_IN, 1.0),
        (0, COPY_OUT, 2.0),
        (1, COPY_OUT, 4.0),
    ]


def test_every_rank_of_a_group_copies_for_itself():
    backend = modelled(Spec(blocks=9, host_blocks=9, ranks=2, lockstep=True), base=1.0, per_block=1.0)
    copies = (Copy(0, 1, 0, (0, 1), (0, 1), COPY_OUT), Copy(1, 1, 1, (0, 1, 2), (0, 1, 2), COPY_OUT))
    backend.launch(Step(0, 0, 0.0, (), copies=copies))
    assert times(completions(backend)) == [(0.0, 3.0)]


# --- ends


def test_a_sequence_ends_with_the_token_that_its_request_says():
    backend = SimBackend(Spec(blocks=9), rows((1.0,), (1.0,), (1.0,)))
    backend.launch(step(0, part(0, 4), starts=(Request(0, 0.0, 4, 9, output_length=2),)))
    backend.launch(step(1, part(0, 1, 4)))
    backend.launch(step(2, part(0, 1, 5)))
    assert [done.ended for done in completions(backend)] == [(), (0,), ()]


def test_it_ends_at_max_tokens_where_nobody_knows():
    backend = SimBackend(Spec(blocks=9), rows((1.0,), (1.0,)))
    backend.launch(step(0, part(0, 4), starts=(Request(0, 0.0, 4, 2),)))
    backend.launch(step(1, part(0, 1, 4)))
    assert [done.ended for done in completions(backend)] == [(), (0,)]


def test_a_chunk_that_does_not_sample_ends_nothing():
    backend = SimBackend(Spec(blocks=9), rows((1.0,), (1.0,)))
    backend.launch(step(0, part(0, 3, samples=False), starts=(Request(0, 0.0, 4, 1),)))
    backend.launch(step(1, part(0, 1, 3)))
    dones = completions(backend)
    assert [done.tokens for done in dones] == [{}, {0: (0,)}] and dones[1].ended == (0,)


def test_what_another_group_forgets_goes_on_here():
    """A preempted sequence that was sent: its first group says goodbye after the second has begun with it."""
    backend = SimBackend(Spec(blocks=9, ranks=2), rows((1.0,), (1.0,), (1.0,), (1.0,)))
    request = Request(0, 0.0, 4, 9, output_length=3)
    backend.launch(step(0, part(0, 4), starts=(request,)))
    backend.launch(step(1, part(0, 5), group=1, starts=(request,)))
    backend.launch(step(2, part(1, 1), ends=(0,)))
    backend.launch(step(3, part(0, 1, 5), group=1))
    assert [done.ended for done in completions(backend) if done.step in (1, 3)] == [(), (0,)]


# --- waiting


def test_waiting_for_a_time_brings_the_clock_there():
    backend = SimBackend(Spec(blocks=9), rows((2.0,)))
    assert backend.wait(0.5) is None and backend.now() == 0.5
    backend.launch(step(0))
    assert backend.wait(1.5) is None and backend.now() == 1.5
    assert backend.wait(inf).finished == 2.5 and backend.now() == 2.5


def test_the_clock_comes_to_that_very_time_and_not_a_rounding_beside_it():
    assert 0.001 + (0.009 - 0.001) != 0.009
    backend = SimBackend(Spec(blocks=9), rows())
    for until in (0.001, 0.009):
        backend.wait(until)
        assert backend.now() == until


def test_a_completion_at_the_very_time_is_returned():
    backend = SimBackend(Spec(blocks=9), rows((2.0,)))
    backend.launch(step(0))
    assert backend.wait(2.0).step == 0


def test_a_time_that_has_passed_brings_nothing_and_moves_nothing():
    backend = SimBackend(Spec(blocks=9), rows((2.0,), host=1.0))
    backend.launch(step(0))
    assert backend.wait(0.25) is None and backend.now() == 1.0


def test_waiting_for_ever_for_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        SimBackend(Spec(blocks=9), rows()).wait()


# --- quiet stretches


def decode(repeat, prompt=4, output=9, per_context=0.0, host=0.0, **spec):
    """A backend on which one sequence has its prompt done, and a decode that may be repeated is launched."""
    backend = modelled(Spec(blocks=9, repeats=True, **spec), base=1.0, per_context=per_context, host_base=host)
    backend.launch(step(0, part(0, prompt), starts=(Request(0, 0.0, prompt, 99, output),)))
    backend.wait()
    backend.launch(step(1, part(0, 1, prompt), repeat=repeat))
    return backend


def test_a_stretch_goes_on_to_the_sequences_end():
    done = decode(repeat=99).wait()
    assert (done.count, done.ended, done.ticks) == (8, (0,), tuple(float(second) for second in range(2, 10)))
    assert done.tokens == {0: (0,) * 8}


def test_a_stretch_is_no_longer_than_allowed():
    done = decode(repeat=3).wait()
    assert (done.count, done.ended, done.finished) == (3, (), 4.0)


def test_a_stretch_stops_where_something_is_due():
    backend = decode(repeat=99)
    assert backend.wait(4.0).count == 3 and backend.now() == 4.0


def test_a_stretch_goes_on_after_something_that_does_not_concern_it():
    backend = decode(repeat=99)
    assert backend.wait(4.25) is None and backend.now() == 4.25
    assert backend.turns(0, stop=False) == [Turn(1, 4, 3)]
    assert (backend.wait().count, backend.now()) == (8, 9.0)


def test_a_stretch_that_is_stopped_comes_back_when_its_repetition_ends():
    backend = decode(repeat=99)
    assert backend.wait(4.25) is None
    assert backend.turns(0, stop=True) == [Turn(1, 4, 3)]
    assert backend.wait(4.5) is None and backend.now() == 4.5
    done = backend.wait(100.0)
    assert (done.count, done.finished, done.ended, backend.now()) == (4, 5.0, (), 5.0)
    assert backend.turns(0, stop=False) == []


def test_what_was_added_up_too_far_is_taken_back():
    backend = decode(repeat=99)
    assert backend.wait(6.5) is None  # up to 7.0
    backend._environment._now = 3.5  # as if another group had come back here
    assert backend.turns(0, stop=True) == [Turn(1, 3, 2)]
    assert (backend.wait().count, backend.now()) == (3, 4.0)


def test_a_stretch_is_not_begun_once_its_step_was_stopped():
    backend = decode(repeat=99)
    assert backend.wait(1.5) is None
    assert backend.turns(0, stop=True) == []
    assert backend.wait().count == 1


def test_a_stopped_step_comes_back_even_if_its_sequence_was_forgotten_meanwhile():
    """A client went away while the step was on the pipeline's second stage, and the next step said so."""
    backend = modelled(Spec(blocks=9, stages=2, repeats=True), base=1.0)
    backend.launch(step(0, part(0, 4), part(1, 4), starts=tuple(Request(id, 0.0, 4, 99) for id in (0, 1))))
    backend.wait()
    backend.launch(step(1, part(0, 1, 4), repeat=9))
    assert backend.wait(3.5) is None
    assert backend.turns(0, stop=True) == []
    backend.launch(step(2, part(1, 1, 4), ends=(0,)))
    done = backend.wait()
    assert (done.step, done.count, done.ended, done.finished) == (1, 1, (), 4.0)


def test_nobody_is_heard_while_the_lone_host_plans():
    """Planning takes 0.5 s: prompt 0.5 to 1.5, decodes planned at 1.5, 3, 4.5, which end 1.5 s later."""
    backend = decode(repeat=99, host=0.5)
    assert backend.wait(3.25) is None and backend.now() == 3.5
    assert backend.turns(0, stop=True) == [Turn(1, 2, 1)]
    assert (backend.wait().count, backend.now()) == (2, 4.5)


def test_in_a_pipeline_steps_take_turns():
    """Two sequences, two stages of 1 s: one step is in either stage, and each comes back every 2 s."""
    backend = modelled(Spec(blocks=9, stages=2, repeats=True), base=1.0)
    for id in (0, 1):
        backend.launch(step(id, part(id, 4), starts=(Request(id, 0.0, 4, 99, 4),)))
    for id in (0, 1):
        assert backend.wait().step == id
        backend.launch(step(2 + id, part(id, 1, 4), repeat=9))
    assert backend.wait(5.5) is None
    assert backend.turns(0, stop=False) == [Turn(2, 2, 1), Turn(3, 2, 1)]
    done = backend.wait()
    assert (done.step, done.count, done.ticks, done.ended) == (2, 3, (4.0, 6.0, 8.0), (0,))
    assert done.planned == (0.0, 4.0, 6.0)
    assert done.stages == ((2.0, 3.0), (3.0, 4.0), (4.0, 5.0), (5.0, 6.0), (6.0, 7.0), (7.0, 8.0))
    assert backend.turns(0, stop=True) == [Turn(3, 3, 2)]
    done = backend.wait()
    assert (done.step, done.count, done.ticks, done.ended) == (3, 3, (5.0, 7.0, 9.0), (1,))


def test_replicas_go_on_by_themselves():
    """One is stopped in the middle of a repetition, the other does not notice."""
    backend = modelled(Spec(blocks=9, ranks=2, repeats=True), base=1.0)
    for id in (0, 1):
        backend.launch(step(id, part(id, 4, rank=id), starts=(Request(id, 0.0, 4, 99, 9),), group=id))
    for id in (0, 1):
        backend.wait()
        backend.launch(step(2 + id, part(id, 1, 4, rank=id), repeat=99, group=id))
    assert backend.wait(4.25) is None
    assert backend.turns(0, stop=True) == [Turn(2, 4, 3)]
    done = backend.wait()
    assert (done.step, done.count, done.finished) == (2, 4, 5.0)
    done = backend.wait()
    assert (done.step, done.count, done.finished) == (3, 8, 9.0)


def test_what_ends_at_the_very_time_of_a_look_has_not_come_back_yet():
    """What arrives then comes before its next repetition, as in stepping."""
    backend = modelled(Spec(blocks=9, ranks=2, repeats=True), base=1.0)
    for id in (0, 1):
        backend.launch(step(id, part(id, 4, rank=id), starts=(Request(id, 0.0, 4, 99, (5, 4)[id]),), group=id))
    for id in (0, 1):
        backend.wait()
        backend.launch(step(2 + id, part(id, 1, 4, rank=id), repeat=99, group=id))
    done = backend.wait()
    assert (done.step, done.count, done.finished, done.ended) == (3, 3, 4.0, (1,))
    assert backend.turns(0, stop=True) == [Turn(2, 3, 2)]
    done = backend.wait()
    assert (done.step, done.count, done.finished) == (2, 3, 4.0)


def test_who_cannot_repeat_may_not_be_told_to():
    with pytest.raises(ValueError, match=r"Spec\.repeats"):
        SimBackend(Spec(blocks=9, repeats=True), rows())


def test_a_repetition_takes_what_its_context_takes():
    done = decode(repeat=3, per_context=0.5).wait()  # prompt 1 + 2; then 1 + half of 5, 6 and 7 keys
    assert done.ticks == (6.5, 10.5, 15.0)


# --- with the scheduler


def serve_all(requests, policy, spec, cost, aborts=()) -> Log:
    scheduler = Scheduler(spec, policy)
    log = Log(scheduler)
    serve(OpenLoop(requests, aborts), scheduler, SimBackend(spec, Modelled(cost, spec.stages)), log)
    assert not scheduler.live and scheduler.ranks[0].pool.free == spec.blocks
    return log


def test_two_lanes_of_one_policy():
    """Prompt of 4 and prompt of 2 on lanes that take turns: 2 are done at 4, the other 2 at 6."""

    def apart(draft):
        first, second = list(draft.waiting)
        draft.take(first, 4, "a")
        draft.take(second, 2, "b")

    requests = [Request(0, 0.0, 4, 1), Request(1, 0.0, 2, 1)]
    log = serve_all(requests, Greedy(apart), Spec(blocks=9), Linear(0.0, per_token=1.0))
    assert [(done.lane, done.finished) for done in log.dones] == [("b", 4.0), ("a", 6.0)]


def test_one_swap():
    """Two sequences of 2 blocks in a pool of 4, each about to need a third: the younger moves out and comes back."""
    spec = Spec(blocks=4, block_size=4, host_blocks=4)
    requests = [Request(0, 0.0, 8, 3), Request(1, 0.0, 8, 3)]
    policy = Composed(ChunkedPrefill(), victims=LastArrived("swap"))
    log = serve_all(requests, policy, spec, Linear(1.0, per_block=0.25))
    assert log.events == ["swap", "copy_out", "copy_in"]
    assert [(done.lane, done.started, done.finished) for done in log.dones] == [
        (MAIN, 0.0, 1.0),  # both prompts
        (COPY_OUT, 1.0, 1.5),  # 2 blocks of the younger; the elder waits for them
        (MAIN, 1.5, 2.5),
        (MAIN, 2.5, 3.5),  # the elder's last
        (COPY_IN, 3.5, 4.0),
        (MAIN, 4.0, 5.0),
        (MAIN, 5.0, 6.0),
    ]


def test_one_late_end():
    spec = Spec(blocks=9, block_size=4, forwards_tokens=True)
    requests = [Request(0, 0.0, 4, 9, output_length=2)]
    log = serve_all(requests, Composed(ChunkedPrefill(), overlap=Overlap(2)), spec, Linear(1.0))
    assert len(log.steps) == 3, "the third was planned before the end was known"
    assert log.tokens == {0: 2} and log.dones[1].ended == (0,) and log.dones[2].ended == ()


def test_one_abort():
    spec = Spec(blocks=9, block_size=4)
    requests = [Request(0, 0.0, 4, 9)]
    log = serve_all(requests, Composed(ChunkedPrefill()), spec, Linear(1.0), aborts=[(2.5, 0)])
    assert (log.outcomes, log.tokens) == ({0: "aborted"}, {0: 2})
    assert [done.finished for done in log.dones] == [1.0, 2.0, 3.0], "what is in flight is not called back"
