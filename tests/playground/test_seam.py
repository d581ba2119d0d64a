"""The seam carries what later backends and policies need: shown with fakes, without SimPy and without torch."""

from dataclasses import replace

import pytest

from playground.core import COPY_IN, COPY_OUT, MAIN, Request, Spec, Turn
from playground.draft import How
from playground.loop import Stuck, serve
from playground.scheduler import Scheduler
from playground.sequence import State
from playground.workload.source import OpenLoop
from tests.playground.fakes import FakeBackend, Greedy, Log, done, everything, nothing

CHAIN = dict(hashes=(7, 8, 9), hash_block=4)


def request(id=0, prompt=4, output=3, arrival=0.0, **more) -> Request:
    return Request(id, arrival, prompt, more.pop("max_tokens", output), output, **more)


def play(requests, policy, spec, seconds=lambda step, lane: 1.0, aborts=(), **options) -> Log:
    """Serve on the fake; nothing may be left behind."""
    scheduler = Scheduler(spec, policy, **options)
    log = Log(scheduler)
    serve(
        OpenLoop(sorted(requests, key=lambda r: (r.arrival, r.id)), aborts), scheduler, FakeBackend(spec, seconds), log
    )
    settled(scheduler)
    return log


def settled(scheduler) -> None:
    scheduler.check()
    for rank in scheduler.ranks:
        assert rank.pool.free == rank.spec.blocks and rank.host.free == rank.spec.host_blocks
        assert not rank.live and not rank.freeing


def driven(spec=None, policy=None, requests=1, **options) -> Scheduler:
    """A scheduler to be driven by hand, with so many requests of 4 tokens waiting."""
    scheduler = Scheduler(spec or Spec(blocks=20, block_size=4, forwards_tokens=True), policy or Greedy(), **options)
    for id in range(requests):
        scheduler.arrive(request(id), 0.0)
    return scheduler


def first(view):
    return next(iter(view))


def step_of(scheduler, group=0, now=0.0):
    return scheduler.next_step(scheduler.groups[group], now)


# --- ranks, groups, stages


def test_replicas_have_steps_of_their_own():
    spec = Spec(blocks=20, block_size=4, ranks=3)
    log = play([request(id, output=id + 1) for id in range(3)], Greedy(), spec)
    assert {(step.group, part.rank, part.sequence) for step in log.steps for part in step.slices} == {
        (rank, rank, rank) for rank in range(3)
    }
    assert not any(step.dummies for step in log.steps)


def test_a_lockstep_group_steps_together_and_names_who_idles():
    spec = Spec(blocks=20, block_size=4, ranks=3, lockstep=True)
    log = play([request(0, output=2), request(1, output=3)], Greedy(), spec)
    assert [({part.rank for part in step.slices}, step.dummies) for step in log.steps] == [
        ({0, 1}, (2,)),
        ({0, 1}, (2,)),
        ({1}, (0, 2)),
    ]


def test_a_rank_that_only_copies_takes_part_in_the_groups_step():
    spec = Spec(blocks=20, block_size=4, host_blocks=9, ranks=2, lockstep=True)

    def swap(draft):
        draft.preempt(draft.decoding[0], How.SWAP)

    log = play([request(0), request(1)], Greedy(everything, everything, swap), spec)
    assert log.steps[1].copies and log.steps[1].dummies == (0,)


def test_a_step_of_copies_alone_needs_nobody_else():
    spec = Spec(blocks=20, block_size=4, host_blocks=9, ranks=2, lockstep=True)

    def swap(draft):
        draft.preempt(draft.decoding[0], How.SWAP)

    log = play([request(0), request(1, output=1)], Greedy(everything, everything, swap, nothing), spec)
    assert log.steps[1].copies and not log.steps[1].slices and log.steps[1].dummies == ()


def test_a_pipeline_has_a_step_in_flight_on_every_stage():
    spec = Spec(blocks=40, block_size=4, stages=3)
    first_waiting = lambda draft: [draft.take(sequence, 4) for sequence in list(draft.waiting)[:1]]  # noqa: E731
    log = play([request(id, output=2) for id in range(3)], Greedy(*[first_waiting] * 3), spec)
    assert [step.planned for step in log.steps[:3]] == [0.0, 0.0, 0.0]
    assert [part.sequence for step in log.steps[:3] for part in step.slices] == [0, 1, 2]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_no_more_steps_are_in_flight_than_stages_times_run_ahead(stages, run_ahead):
    spec = Spec(blocks=40, block_size=4, stages=stages, forwards_tokens=True)
    scheduler = driven(spec, Greedy(lambda draft: None, run_ahead=run_ahead), 0)
    scheduler.policy.moves = [lambda draft: draft.take(first(draft.waiting), 9)] * 99
    for id in range(12):
        scheduler.arrive(request(id), 0.0)
    launched = 0
    while step_of(scheduler):
        launched += 1
    assert launched == stages * run_ahead


# --- lanes


def two_lanes(draft):
    first, second = list(draft.waiting)
    draft.take(first, 4, "a")
    draft.take(second, 4, "b")


@pytest.mark.parametrize("first, last", [("a", "b"), ("b", "a")])
def test_lanes_of_one_step_come_back_in_any_order(first, last):
    scheduler = driven(policy=Greedy(two_lanes), requests=2)
    step = step_of(scheduler)
    assert step.lanes == ("a", "b")
    scheduler.commit(done(step, first))
    assert scheduler.in_flight
    assert sorted(sequence.returned for sequence in scheduler.sequences.values()) == [0, 1]
    scheduler.commit(done(step, last))
    assert not scheduler.in_flight
    assert [sequence.returned for sequence in scheduler.sequences.values()] == [1, 1]
    scheduler.check()


def test_one_prompt_can_be_cut_over_two_lanes():
    def cut(draft):
        (sequence,) = draft.waiting
        draft.take(sequence, 3, "a")
        draft.take(sequence, 1, "b")

    log = play([request(output=2)], Greedy(cut), Spec(blocks=20, block_size=4))
    assert [(part.start, part.length, part.samples, part.lane) for part in log.steps[0].slices] == [
        (0, 3, False, "a"),
        (3, 1, True, "b"),
    ]


# --- verbs that refuse


def drafted(scheduler, move) -> Scheduler:
    """Make one draft, by one move, and see that all accounts are right afterwards."""
    scheduler.policy.moves = [move]
    step_of(scheduler)
    scheduler.check()
    return scheduler


def started(**options) -> Scheduler:
    """One sequence of 4 tokens that decodes, one that waits."""
    scheduler = driven(**options)
    scheduler.commit(done(step_of(scheduler)))
    scheduler.arrive(request(1), 0.0)
    return scheduler


def test_a_victims_tokens_are_given_back():
    spec = Spec(blocks=20, block_size=4, max_tokens=6)

    def change_of_mind(draft):
        draft.take(first(draft.running), 1)
        draft.take(first(draft.waiting), 4)
        assert (draft.tokens, draft.tokens_left) == (5, 1)
        draft.preempt(list(draft.running)[1])
        assert (draft.tokens, draft.tokens_left) == (1, 5)
        draft.preempt(first(draft.running))
        assert (draft.tokens, draft.tokens_left, draft.empty) == (0, 6, True)

    scheduler = drafted(started(spec=spec), change_of_mind)
    assert [(sequence.launched, sequence.promised) for sequence in scheduler.sequences.values()] == [(0, 1), (0, 0)]


def test_a_sequence_decodes_once_in_a_step():
    def twice(draft):
        assert draft.take_decodes([first(draft.running)] * 2) == 1
        assert draft.take(first(draft.running), 1) == 0

    drafted(started(), twice)


def test_a_sequence_whose_input_is_not_known_is_not_placed():
    def too_soon(draft):
        assert draft.take_decodes([first(draft.running)]) == draft.take(first(draft.running), 1) == 0

    scheduler = driven(Spec(blocks=20, block_size=4), Greedy(run_ahead=2))
    step_of(scheduler)
    drafted(scheduler, too_soon)


def test_no_more_tokens_are_placed_than_a_step_may_have():
    def too_many(draft):
        assert draft.take(first(draft.waiting), 99) == 4
        assert draft.take_decodes(draft.decoding) == 0

    scheduler = started(spec=Spec(blocks=20, block_size=4, max_tokens=4))
    scheduler.arrive(request(2, prompt=9), 0.0)
    drafted(scheduler, too_many)


def test_a_prefix_that_nobody_holds_takes_free_blocks_too():
    """Three blocks known and free, one free besides: prompt 12 + 5 needs two besides the three."""
    scheduler = driven(Spec(blocks=4, block_size=4), requests=0)
    scheduler.arrive(request(0, prompt=12, output=1, **CHAIN), 0.0)
    scheduler.commit(done(step_of(scheduler), ending={0: 12}))
    scheduler.arrive(request(1, prompt=15, output=1, **CHAIN), 0.0)
    holder = request(2, prompt=5, output=4)
    scheduler.arrive(holder, 0.0)

    def squeeze(draft):
        known, other = list(draft.waiting)
        assert draft.take(other, 4) == 4
        assert draft.prefix_hit(known) == 12
        assert draft.blocks_needed(known, 15) == 4 > draft.blocks_free
        assert draft.take(known, 15) == 0 and known.state is State.WAITING

    drafted(scheduler, squeeze)


@pytest.mark.parametrize(
    "verb, message",
    [
        (lambda draft, runs, waits: draft.preempt(waits), "1 is waiting: only a running one can be preempted"),
        (lambda draft, runs, waits: draft.swap_in(waits), "1 is waiting: only a swapped one can be swapped in"),
        (lambda draft, runs, waits: draft.reject(runs, ""), "0 is running: only a waiting one can be rejected"),
        (lambda draft, runs, waits: draft.send(runs, 0), "0 is running: only a waiting one can be sent"),
        (lambda draft, runs, waits: draft.send(waits, 7), "rank 7 does not exist: there are 1"),
    ],
)
def test_a_verb_on_the_wrong_sequence_says_so(verb, message):
    with pytest.raises(ValueError, match=message):
        drafted(started(), lambda draft: verb(draft, first(draft.running), first(draft.waiting)))


# --- shared prefixes


def first_chunks(draft):
    """Four tokens of the first that runs or waits."""
    draft.take([*draft.partial, *draft.waiting][0], 4)


def hits(scheduler, prompt=12) -> int:
    """Tokens of the chain that a newcomer would find now."""
    scheduler.arrive(request(9, prompt=prompt, **CHAIN), 0.0)
    found = []
    scheduler.policy.moves = [lambda draft: found.append(draft.prefix_hit(first(draft.waiting)))]
    step_of(scheduler)
    scheduler.abort(9, 0.0)
    return found[0]


def test_a_prefix_can_be_shared_when_the_slice_that_filled_it_commits():
    spec = Spec(blocks=20, block_size=4, stages=3)
    scheduler = driven(spec, Greedy(first_chunks, first_chunks), requests=0)
    scheduler.arrive(request(0, prompt=12, **CHAIN), 0.0)
    first, second = step_of(scheduler), step_of(scheduler)
    assert hits(scheduler) == 0
    scheduler.commit(done(first))
    assert hits(scheduler) == 4
    scheduler.commit(done(second))
    assert hits(scheduler) == 8


def test_a_block_that_is_not_full_is_not_shared():
    scheduler = driven(policy=Greedy(lambda draft: draft.take(first(draft.waiting), 7)), requests=0)
    scheduler.arrive(request(0, prompt=12, **CHAIN), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    assert hits(scheduler) == 4


def test_one_token_of_a_known_prompt_is_computed_again():
    """Its logits are wanted."""
    scheduler = driven(requests=0)
    scheduler.arrive(request(0, prompt=12, **CHAIN), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    assert hits(scheduler, prompt=12) == 8
    assert hits(scheduler, prompt=13) == 12


def test_a_shared_prefix_is_held_by_all_that_use_it():
    scheduler = driven(requests=0)
    scheduler.arrive(request(0, prompt=12, output=9, **CHAIN), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    scheduler.arrive(request(1, prompt=12, output=9, **CHAIN), 0.0)
    step = step_of(scheduler)
    (_, second) = step.slices
    assert (second.start, second.length, second.blocks[:2]) == (8, 4, tuple(scheduler.sequences[0].blocks[:2]))
    assert scheduler.sequences[1].cached_tokens == 8
    scheduler.commit(done(step))
    scheduler.abort(0, 1.0)
    scheduler.check()
    assert scheduler.ranks[0].pool.used == 3


def test_without_a_prefix_cache_nothing_is_shared():
    scheduler = driven(requests=0, prefix_cache=False)
    scheduler.arrive(request(0, prompt=12, **CHAIN), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    assert hits(scheduler) == 0


# --- swapping


def swap_first(draft):
    draft.preempt(draft.decoding[0], How.SWAP)


def swap_in_first(draft):
    assert draft.swap_in(first(draft.waiting))


def test_a_sequence_goes_to_the_host_and_comes_back_where_it_was():
    spec = Spec(blocks=20, block_size=4, host_blocks=5)
    log = play([request(prompt=6, output=4)], Greedy(everything, swap_first, swap_in_first), spec)
    prompt, out, back, decode, *_ = log.steps
    assert (out.copies[0].lane, out.copies[0].source) == (COPY_OUT, prompt.slices[0].blocks)
    assert (back.copies[0].lane, back.copies[0].source) == (COPY_IN, out.copies[0].target)
    assert (decode.slices[0].start, decode.slices[0].blocks) == (6, ()), "the copy named the blocks"
    assert log.events == ["swap", "copy_out", "copy_in"]


def test_blocks_on_their_way_to_the_host_are_held_until_they_are_there():
    scheduler = driven(Spec(blocks=20, block_size=4, host_blocks=5), Greedy(everything, swap_first))
    scheduler.commit(done(step_of(scheduler)))
    step = step_of(scheduler)
    assert scheduler.ranks[0].pool.free == 19
    scheduler.commit(done(step, COPY_OUT))
    assert scheduler.ranks[0].pool.free == 20 and scheduler.ranks[0].host.free == 4


def test_a_full_host_refuses_a_victim_and_it_runs_on():
    scheduler = driven(Spec(blocks=20, block_size=4, host_blocks=0), Greedy(everything, swap_first))
    scheduler.commit(done(step_of(scheduler)))
    assert step_of(scheduler) is None
    assert scheduler.sequences[0].state is State.RUNNING


def test_a_sequence_on_its_way_takes_a_seat():
    spec = Spec(blocks=20, block_size=4, host_blocks=5, max_seqs=1)
    seats = []
    watch = lambda draft: seats.append((draft.seats, draft.take(first(draft.waiting), 4)))  # noqa: E731
    scheduler = driven(spec, Greedy(everything, swap_first, watch, run_ahead=2))
    scheduler.arrive(request(1), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    step_of(scheduler)
    assert step_of(scheduler) is None and seats == [(0, 0)]


def test_what_this_draft_admitted_has_no_kv_to_save():
    """Else the copy would name blocks, or even a request, that no backend has heard of."""
    asked = []

    def admit_and_swap(draft):
        (sequence,) = draft.waiting
        draft.take(sequence, 2)
        asked.append((draft.can_swap(sequence), draft.preempt(sequence, How.SWAP)))

    step = step_of(driven(Spec(blocks=20, block_size=4, host_blocks=5), Greedy(admit_and_swap)))
    assert asked == [(False, 0)]
    assert step.slices and not step.copies


# --- run-ahead


@pytest.mark.parametrize("run_ahead", [2, 3])
def test_a_late_end_drops_the_tokens_that_came_after_it(run_ahead):
    """The backend ends the sequence at its second token while later slices of it are in flight."""
    spec = Spec(blocks=20, block_size=4, forwards_tokens=True)
    log = play([request(prompt=4, output=2, max_tokens=9)], Greedy(run_ahead=run_ahead), spec)
    assert log.tokens == {0: 2}
    assert len(log.steps) == 1 + run_ahead, "run-ahead costs slices after the end"


def test_blocks_of_an_ended_sequence_are_held_until_its_last_slice_commits():
    scheduler = driven(policy=Greedy(run_ahead=2))
    first, second = step_of(scheduler), step_of(scheduler)
    scheduler.commit(done(first, ending={0: 4}))
    assert scheduler.ended[0].outcome == "finished" and not scheduler.sequences
    assert scheduler.ranks[0].pool.free == 18 and scheduler.ranks[0].freeing == 2
    scheduler.commit(done(second))
    settled(scheduler)


def test_without_forwarding_a_sequence_waits_for_its_token():
    spec = Spec(blocks=20, block_size=4)
    scheduler = driven(spec, Greedy(run_ahead=2))
    step = step_of(scheduler)
    assert step_of(scheduler) is None
    scheduler.commit(done(step))
    assert step_of(scheduler).slices[0].start == 4


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_forwarded_token_is_planned_no_sooner_than_it_leaves_the_last_stage(stages):
    def decode_and_start_one(draft):
        draft.take_decodes(draft.decoding)
        draft.take(first(draft.waiting), 4)

    spec = Spec(blocks=40, block_size=4, stages=stages, forwards_tokens=True)
    scheduler = driven(spec, Greedy(*[decode_and_start_one] * 6, run_ahead=3), requests=9)
    steps = [step_of(scheduler) for _ in range(3 * stages)]
    mine = [step.id for step in steps for part in step.slices if part.sequence == 0]
    assert mine == [0, stages, 2 * stages]


def test_promises_never_exceed_max_tokens():
    scheduler = driven(policy=Greedy(run_ahead=3), requests=0)
    scheduler.arrive(request(output=2), 0.0)
    assert step_of(scheduler) and step_of(scheduler)
    assert step_of(scheduler) is None
    assert scheduler.sequences[0].promised == 2


# --- guesses


def guess_two(draft):
    """What a speculative policy will do: a decode with two guesses behind it."""
    (sequence,) = draft.decoding
    draft.take_decodes([sequence])
    draft._placed.length, draft._placed.drafted = [3], [2]
    sequence.launched += 2
    sequence.promised += 2
    sequence.length += 2


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_guesses_that_were_wrong_are_taken_off_the_promise(accepted):
    scheduler = driven(policy=Greedy(everything, guess_two), requests=0)
    scheduler.arrive(request(prompt=4, output=9), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    scheduler.commit(done(step_of(scheduler), tokens=accepted))
    sequence = scheduler.sequences[0]
    assert sequence.promised == sequence.returned == 1 + accepted
    assert step_of(scheduler).slices[0].start == 4 + accepted


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_backend_cannot_return_more_tokens_than_asked_for_or_none(tokens):
    scheduler = driven(policy=Greedy(everything, guess_two), requests=0)
    scheduler.arrive(request(prompt=4, output=9), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    step = step_of(scheduler)
    with pytest.raises(ValueError, match=f"step 1: {tokens} tokens for sequence 0, 1 to 3 due"):
        scheduler.commit(done(step, tokens=tokens))


# --- quiet stretches


def decoding(*moves, spec=None, requests=1, steady=1 << 40, **options) -> int:
    """How often the step after the prompts may be repeated. Each has 4 tokens, and 5 to come."""
    policy = Greedy(everything, *moves, **options)
    policy.steady = lambda draft: steady
    scheduler = driven(spec or Spec(blocks=20, block_size=4, repeats=True), policy, 0)
    for id in range(requests):
        scheduler.arrive(request(id, output=5), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    return step_of(scheduler).repeat


def test_decodes_may_be_repeated_as_long_as_the_policy_promises():
    assert decoding(steady=2) == 3
    assert decoding(steady=0) == 1


def test_but_never_beyond_max_tokens():
    assert decoding() == 4


def test_nor_beyond_the_free_blocks():
    """Two blocks of 3 for each, and none is free: there is room for positions 4 and 5."""
    assert decoding(spec=Spec(blocks=4, block_size=3, repeats=True), requests=2) == 2


def test_nor_where_the_backend_knows_no_repetition():
    assert decoding(spec=Spec(blocks=20, block_size=4)) == 1


def apart(draft):
    draft.take_decodes(draft.decoding[:1], "a")
    draft.take_decodes(draft.decoding[1:], "b")


def with_wake(draft):
    everything(draft)
    draft.wake(draft.now + 1)


def with_victim(draft):
    draft.preempt(draft.decoding[0])
    draft.take_decodes(draft.decoding[1:])


@pytest.mark.parametrize("move", [apart, with_wake, with_victim])
def test_nor_where_more_than_decodes_is_going_on(move):
    assert decoding(move, requests=2) == 1


def test_nor_where_steps_are_planned_ahead():
    assert decoding(run_ahead=2) == 1


def test_other_replicas_hinder_nobody():
    assert decoding(spec=Spec(blocks=20, block_size=4, ranks=2, repeats=True)) == 4


def test_in_a_pipeline_there_must_be_memory_for_all_that_take_turns():
    """Each holds 2 of 5 blocks and fills them with position 7; those in flight may be one ahead of these."""
    assert decoding(spec=Spec(blocks=5, block_size=4, stages=2, repeats=True), requests=2) == 3


def test_repetitions_are_accounted_for_whenever_somebody_looks():
    """A backend that has done 3 of 4 repetitions says so, and is told to stop because somebody arrived."""
    asked = []

    def turns(group, stop):
        asked.append((group, stop))
        return [Turn(1, 4, 3)]

    scheduler = driven(Spec(blocks=20, block_size=4, repeats=True), Greedy(everything), 0)
    scheduler.policy.steady = lambda draft: 9
    scheduler.arrive(request(0, output=9), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    step = step_of(scheduler)
    scheduler.turns = turns
    scheduler.arrive(request(1), 4.5)
    assert asked == [(0, True)]
    sequence = scheduler.sequences[0]
    assert (sequence.launched, sequence.promised, sequence.returned, len(sequence.blocks)) == (8, 5, 4, 2)
    scheduler.check()
    scheduler.turns = None
    committed = scheduler.commit(replace(done(step, tokens=4), count=4, ticks=(2.0, 3.0, 4.0, 5.0)))
    assert sequence.returned == 5 and committed.slices[0].blocks == (1,)


def test_sequences_end_in_the_order_of_their_slices_whatever_the_backends():
    scheduler = driven(requests=2)
    step = step_of(scheduler)
    scheduler.commit(replace(done(step), ended=(1, 0)))
    assert [ended.request.id for ended in scheduler.ended] == [0, 1]


def test_blocks_are_taken_in_the_order_of_turns():
    """Two steps of one sequence each in turns: both need a block at their third repetition, the first one first."""
    spec = Spec(blocks=20, block_size=4, stages=2, repeats=True)
    scheduler = driven(spec, Greedy(everything), 0)
    scheduler.policy.steady = lambda draft: 9
    for id in (0, 1):
        scheduler.arrive(request(id, prompt=5, output=9), 0.0)
        step_of(scheduler)
    for id in (0, 1):
        scheduler.commit(done(scheduler.groups[0].flights[id].step))
        step_of(scheduler)
    scheduler.turns = lambda group, stop: [Turn(2, 3, 2), Turn(3, 3, 2)]
    scheduler.arrive(request(2), 4.5)
    blocks = [scheduler.sequences[id].blocks for id in (0, 1)]
    assert blocks == [[0, 1], [2, 3]]
    scheduler.turns = lambda group, stop: [Turn(2, 4, 3), Turn(3, 4, 3)]
    scheduler.arrive(request(3), 5.5)
    assert [list(held) for held in blocks] == [[0, 1, 4], [2, 3, 5]] and list(scheduler.groups[0].flights) == [2, 3]


def repeating(*moves, **spec) -> tuple[Scheduler, list[tuple[int, bool]]]:
    """Two stages, and the decode of sequence 0 is repeated on them; the second slot is free. Who asks how far it is?"""
    spec = Spec(blocks=20, block_size=4, stages=2, repeats=True, forwards_tokens=True, **spec)
    scheduler = driven(spec, Greedy(everything, everything, *moves), 0)
    scheduler.policy.steady = lambda draft: 9
    scheduler.arrive(request(0, output=9), 0.0)
    scheduler.commit(done(step_of(scheduler)))
    assert step_of(scheduler).repeat == 8
    asked: list[tuple[int, bool]] = []
    scheduler.turns = lambda group, stop: asked.append((group, stop)) or [Turn(1, 4, 3)]
    return scheduler, asked


def test_a_policy_is_asked_when_accounts_are_those_of_the_present():
    seen = []
    scheduler, asked = repeating(lambda draft: seen.append((draft.blocks_free, first(draft.running).launched)))
    assert step_of(scheduler, now=4.5) is None
    assert seen == [(18, 8)] and asked == [(0, False)]


@pytest.mark.parametrize(
    "move",
    [
        lambda draft: draft.preempt(first(draft.running)),
        lambda draft: draft.reject(first(draft.waiting), "unwanted"),
        lambda draft: draft.send(first(draft.waiting), 1),
    ],
)
def test_who_gives_something_up_and_places_nothing_ends_the_stretch(move):
    scheduler, asked = repeating(move, ranks=2)
    scheduler.arrive(request(2), 4.0)
    scheduler.arrive(request(3), 4.0)  # the fewest are on rank 1, then all have as many
    asked.clear()
    assert step_of(scheduler, now=4.5) is None
    assert asked[:2] == [(0, False), (0, True)]


def test_a_step_of_another_kind_ends_the_stretch():
    scheduler, asked = repeating()
    scheduler.arrive(request(2), 4.0)
    asked.clear()
    assert step_of(scheduler, now=4.5).repeat == 1
    assert asked == [(0, False), (0, True)]


@pytest.mark.parametrize("lane, stop", [(COPY_OUT, True), (MAIN, False)])
def test_a_copy_that_ends_ends_the_stretch(lane, stop):
    """A completion that changes nothing does not."""
    scheduler = driven(Spec(blocks=20, block_size=4, host_blocks=5), Greedy(everything, swap_first), 2)
    asked: list[bool] = []
    scheduler.turns = lambda group, stop: asked.append(stop) or []
    step = step_of(scheduler)
    if lane == COPY_OUT:
        scheduler.commit(done(step))
        step = step_of(scheduler)
        asked.clear()
    scheduler.commit(done(step, lane))
    assert asked == [stop]


def test_blocks_that_come_free_end_the_stretch():
    scheduler = driven(Spec(blocks=20, block_size=4, repeats=True), Greedy(everything), 1)
    step = step_of(scheduler)
    scheduler.abort(0, 0.5)
    asked: list[bool] = []
    scheduler.turns = lambda group, stop: asked.append(stop) or []
    scheduler.commit(done(step))
    assert asked == [True]


# --- completions that make no sense


def test_a_step_that_is_not_in_flight_cannot_be_committed():
    scheduler = driven()
    step = step_of(scheduler)
    scheduler.commit(done(step))
    with pytest.raises(ValueError, match="step 0 is not in flight"):
        scheduler.commit(done(step))


def test_a_lane_comes_back_once():
    scheduler = driven(policy=Greedy(two_lanes), requests=2)
    step = step_of(scheduler)
    scheduler.commit(done(step, "a"))
    with pytest.raises(ValueError, match="step 0 has no lane a in flight"):
        scheduler.commit(done(step, "a"))


def test_a_lanes_steps_come_back_in_the_order_of_their_launch():
    scheduler = driven(policy=Greedy(run_ahead=2))
    _, second = step_of(scheduler), step_of(scheduler)
    with pytest.raises(ValueError, match="step 1 came back before step 0"):
        scheduler.commit(done(second))


def test_steps_of_different_lanes_overtake_one_another():
    spec = Spec(blocks=20, block_size=4, host_blocks=5)
    log = play(
        [request(0, output=4), request(1, output=4, arrival=1.0)],
        Greedy(everything, nothing, swap_first, run_ahead=2),
        spec,
        seconds=lambda step, lane: 5.0 if lane == COPY_OUT else 1.0,
    )
    order = [(record.step, record.lane) for record in log.dones]
    assert order.index((1, COPY_OUT)) > order.index((2, MAIN))


def test_a_completion_without_a_sequences_token_names_it():
    scheduler = driven(requests=2)
    step = step_of(scheduler)
    broken = done(step)
    del broken.tokens[1]
    with pytest.raises(ValueError, match="step 0: 0 tokens for sequence 1"):
        scheduler.commit(broken)


# --- aborts, in every state


def leave(scheduler, id=0):
    scheduler.abort(id, 1.0)
    scheduler.check()
    assert scheduler.ended[-1].outcome == "aborted" and scheduler.ended[-1].why


def test_abort_of_a_waiting_sequence():
    scheduler = driven()
    leave(scheduler)
    settled(scheduler)
    assert step_of(scheduler) is None


def test_abort_of_a_running_sequence():
    scheduler = driven()
    scheduler.commit(done(step_of(scheduler)))
    leave(scheduler)
    settled(scheduler)


def test_abort_of_a_sequence_in_flight_frees_its_blocks_at_the_last_commit():
    scheduler = driven(policy=Greedy(run_ahead=2))
    first, second = step_of(scheduler), step_of(scheduler)
    leave(scheduler)
    scheduler.commit(done(first))
    assert scheduler.ranks[0].pool.used == 2
    scheduler.commit(done(second))
    settled(scheduler)


def test_abort_of_a_draining_sequence():
    scheduler = driven(policy=Greedy(everything, lambda draft: draft.preempt(first(draft.running)), run_ahead=2))
    step = step_of(scheduler)
    assert step_of(scheduler) is None
    assert scheduler.sequences[0].state is State.DRAINING
    leave(scheduler)
    scheduler.commit(done(step))
    settled(scheduler)


def swapped_scheduler(*moves):
    scheduler = driven(Spec(blocks=20, block_size=4, host_blocks=5), Greedy(everything, swap_first, *moves))
    scheduler.commit(done(step_of(scheduler)))
    return scheduler, step_of(scheduler)


def test_abort_of_a_sequence_that_is_copied_out():
    scheduler, step = swapped_scheduler()
    leave(scheduler)
    assert scheduler.ranks[0].pool.used == 1, "the copy still reads it"
    scheduler.commit(done(step, COPY_OUT))
    settled(scheduler)


def test_abort_of_a_swapped_sequence():
    scheduler, step = swapped_scheduler()
    scheduler.commit(done(step, COPY_OUT))
    assert scheduler.sequences[0].state is State.SWAPPED
    leave(scheduler)
    settled(scheduler)


def test_abort_of_a_sequence_that_is_copied_in():
    scheduler, step = swapped_scheduler(swap_in_first)
    scheduler.commit(done(step, COPY_OUT))
    step = step_of(scheduler)
    leave(scheduler)
    assert scheduler.ranks[0].pool.used == 1, "the copy still writes it"
    scheduler.commit(done(step, COPY_IN))
    settled(scheduler)


def test_abort_of_a_held_request():
    policy = Greedy()
    policy.place = lambda request, view: None
    scheduler = driven(Spec(blocks=20, ranks=2), policy)
    assert scheduler.waiting == 1
    leave(scheduler)
    settled(scheduler)
    assert scheduler.waiting == 0


def test_abort_after_the_end_is_no_error():
    scheduler = driven()
    scheduler.commit(done(step_of(scheduler), ending={0: 4}))
    scheduler.abort(0, 1.0)
    scheduler.abort(99, 1.0)
    assert [ended.outcome for ended in scheduler.ended] == ["finished"]


def test_an_aborted_request_is_named_as_ended_in_the_next_step():
    scheduler = driven(requests=2)
    scheduler.commit(done(step_of(scheduler)))
    scheduler.abort(0, 1.0)
    assert step_of(scheduler).ends == (0,)


def test_a_request_that_no_step_named_is_not_named_at_its_end():
    scheduler = driven(policy=Greedy(lambda draft: draft.take(list(draft.waiting)[-1], 4)), requests=2)
    scheduler.abort(0, 1.0)
    step = step_of(scheduler)
    assert [started.id for started in step.starts] == [1] and step.ends == ()


def test_an_id_comes_back_only_when_the_device_is_done_with_it():
    scheduler = driven()
    step = step_of(scheduler)
    scheduler.abort(0, 1.0)
    with pytest.raises(ValueError, match="request 0 arrived twice"):
        scheduler.arrive(request(0), 1.0)
    scheduler.commit(done(step))
    scheduler.arrive(request(0), 1.0)
    step = step_of(scheduler)
    assert (step.ends, [started.id for started in step.starts]) == ((0,), [0])


# --- routing


def send_to(rank):
    return lambda draft: [draft.send(sequence, rank) for sequence in list(draft.waiting)]


def test_a_sent_sequence_is_served_where_it_went():
    policy = Greedy(send_to(1))
    policy.place = lambda request, view: 0
    log = play([request()], policy, Spec(blocks=20, block_size=4, ranks=2))
    assert {part.rank for step in log.steps for part in step.slices} == {1}
    assert log.steps[0].starts[0].id == 0
    assert log.events == ["send"]


def test_a_sent_sequence_does_not_wait_for_another_groups_step():
    """Rank 1 has nothing else to do, and rank 0 is busy for long: nobody would look again for a while."""
    policy = Greedy(everything, lambda draft: None, everything, lambda draft: None)
    policy.place = lambda request, view: 0
    policy.fill = lambda draft: everything(draft) if draft.rank == 1 or not draft.in_flight else send_to(1)(draft)
    policy.depth = 2
    log = play(
        [request(0, output=9), request(1, arrival=0.5)],
        policy,
        Spec(blocks=20, block_size=4, ranks=2),
        seconds=lambda step, lane: 10.0,
    )
    first = next(step for step in log.steps if step.group == 1)
    assert first.planned == 0.5


def test_a_preempted_sequence_can_go_to_another_replica():
    policy = Greedy(everything, lambda draft: draft.preempt(first(draft.running)), send_to(1))
    policy.place = lambda request, view: 0
    log = play([request(output=3), request(1, arrival=9.0, output=1)], policy, Spec(blocks=20, block_size=4, ranks=2))
    assert log.tokens[0] == 3
    ends = {step.group: step.ends for step in log.steps if 0 in step.ends}
    assert ends[0] == (0,), "its first backend may forget it"


def test_sending_for_ever_is_an_error_that_names_the_policy():
    policy = Greedy()
    policy.place = lambda request, view: 0
    policy.fill = lambda draft: send_to(1 - draft.rank)(draft)
    with pytest.raises(Stuck, match="Greedy"):
        play([request()], policy, Spec(blocks=20, block_size=4, ranks=2))


def test_a_request_is_held_until_the_policy_has_a_rank_for_it():
    """At most one request a rank: the second of two for one rank waits outside."""
    policy = Greedy()
    policy.place = lambda request, view: next(
        (load.rank for load in view.loads if not load.running + load.waiting), None
    )
    log = play([request(id, output=2) for id in range(3)], policy, Spec(blocks=20, block_size=4, ranks=2))
    assert set(log.outcomes.values()) == {"finished"}
    assert log.steps[-1].planned == 3.0 and [part.sequence for part in log.steps[-1].slices] == [2]


def test_a_rank_that_does_not_exist_is_an_error_that_names_the_policy():
    policy = Greedy()
    policy.place = lambda request, view: 7
    with pytest.raises(ValueError, match=r"Greedy\.place answered rank 7: there are 2"):
        driven(Spec(blocks=20, ranks=2), policy)


def test_a_router_sees_loads_as_stale_as_configured():
    seen = []
    policy = Greedy()
    policy.place = lambda request, view: seen.append((view.now, view.taken, view.loads[0].waiting)) or 0
    scheduler = driven(Spec(blocks=20, ranks=2), policy, 0, report_interval=1.0)
    for id, now in enumerate((0.0, 0.5, 0.9, 1.0, 1.5)):
        scheduler.arrive(request(id), now)
    assert seen == [(0.0, 0.0, 0), (0.5, 0.0, 0), (0.9, 0.0, 0), (1.0, 1.0, 3), (1.5, 1.0, 3)]


def test_a_router_sees_present_loads_by_default():
    seen = []
    policy = Greedy()
    policy.place = lambda request, view: seen.append(view.loads[0].waiting) or 0
    driven(Spec(blocks=20, ranks=2), policy, 3)
    assert seen == [0, 1, 2]


# --- nothing to do


def test_a_policy_that_waits_on_purpose_is_asked_again_when_it_wishes():
    log = play([request(output=1)], Greedy(lambda draft: draft.wake(2.5)), Spec(blocks=20, block_size=4))
    assert log.steps[0].planned == 2.5


def test_a_wake_lies_in_the_future():
    with pytest.raises(ValueError, match=r"wake\(0.0\) is not after now=0.0"):
        step_of(driven(policy=Greedy(lambda draft: draft.wake(0.0))))


def test_a_policy_that_does_nothing_is_an_error_that_names_it():
    policy = Greedy()
    policy.fill = nothing
    with pytest.raises(Stuck, match=r"Greedy placed nothing: 1 requests wait, 0 run, 20 KV blocks are free"):
        play([request()], policy, Spec(blocks=20, block_size=4))


def test_a_policy_that_holds_a_request_for_ever_is_an_error():
    policy = Greedy()
    policy.place = lambda request, view: None
    with pytest.raises(Stuck, match="1 requests wait"):
        play([request()], policy, Spec(blocks=20, ranks=2))


def test_any_number_of_requests_may_be_rejected_one_after_another():
    log = play([request(id, prompt=999, arrival=float(id)) for id in range(20)], Greedy(), Spec(blocks=2))
    assert set(log.outcomes.values()) == {"rejected"}


def test_a_run_without_requests_ends():
    assert not play([], Greedy(), Spec(blocks=2)).looks[1:]


# --- requests that cannot be served


def test_what_can_never_fit_is_rejected_with_the_reason():
    scheduler = driven(requests=0, spec=Spec(blocks=2, block_size=4, max_length=100))
    scheduler.arrive(request(0, prompt=8, output=1), 0.0)
    scheduler.arrive(request(1, prompt=8, output=2), 0.0)
    scheduler.arrive(request(2, prompt=90, output=12), 0.0)
    assert [(ended.request.id, ended.outcome, ended.why) for ended in scheduler.ended] == [
        (1, "rejected", "prompt 8 + max_tokens 2 needs 3 KV blocks, the pool has 2"),
        (2, "rejected", "prompt 90 + max_tokens 12 exceeds 100 tokens"),
    ]


def test_a_policy_may_turn_a_request_away():
    log = play([request()], Greedy(lambda draft: draft.reject(first(draft.waiting), "too dear")), Spec(blocks=9))
    assert log.outcomes == {0: "rejected"} and log.events == ["reject"]


def test_a_request_cannot_arrive_twice():
    with pytest.raises(ValueError, match="request 0 arrived twice"):
        driven().arrive(request(), 0.0)


# --- options


@pytest.mark.parametrize("options", [{"requeue": "middle"}, {"report_interval": -1.0}])
def test_impossible_options_name_themselves(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        driven(**options)


def test_no_run_ahead_at_all_is_impossible():
    with pytest.raises(ValueError, match="run_ahead=0 must be"):
        driven(policy=Greedy(run_ahead=0))


@pytest.mark.parametrize("requeue, order", [("front", [0, 1]), ("back", [1, 0])])
def test_where_a_preempted_sequence_waits_is_a_parameter(requeue, order):
    def give_up(draft):
        draft.preempt(first(draft.running))

    scheduler = driven(
        policy=Greedy(lambda draft: draft.take(first(draft.waiting), 4), give_up), requests=2, requeue=requeue
    )
    scheduler.commit(done(step_of(scheduler)))
    step_of(scheduler)
    assert list(scheduler.ranks[0].waiting) == order


def test_a_preempted_sequence_keeps_its_tokens():
    log = play(
        [request(output=5)],
        Greedy(everything, everything, lambda d: d.preempt(first(d.running))),
        Spec(blocks=20, block_size=4),
    )
    assert log.tokens == {0: 5}
    assert [(part.start, part.length) for step in log.steps for part in step.slices] == [
        (0, 4),
        (4, 1),
        (0, 6),
        (6, 1),
        (7, 1),
    ]


def only_wakes(draft):
    draft.wake(draft.now + 1.0)


def test_a_policy_that_only_wakes_is_told_so():
    with pytest.raises(Stuck, match=r"Greedy placed nothing: 1 requests wait.* after 10,000 wakes in a row"):
        play([request()], Greedy(*[only_wakes] * 10_010), Spec(blocks=20, block_size=4))
