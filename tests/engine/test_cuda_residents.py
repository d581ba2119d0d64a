"""What the host tells the device of slots, under every kind of schedule: each slice finds its tokens and its blocks."""

from collections import defaultdict
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.forward import least_shape, pack
from engine.cuda.residents import Residents
from engine.cuda.state import SlotState
from engine.errors import EngineError
from playground.core import COPY_IN, COPY_OUT, Columns, Request, Slice, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.durations import Modelled
from playground.trace import NoTrace
from tests.playground.strategies import scenarios

VOCABULARY = 1000


class Told:
    """A simulated backend beside the residents, and the device's memory as they keep it."""

    def __init__(self, scenario, forgetful):
        self.spec = scenario.spec
        self._sim = SimBackend(self.spec, Modelled(scenario.cost))
        self._state = SlotState(replace(self.spec, max_length=512), 2 * self.spec.max_seqs, torch.device("cpu"))
        self._residents = Residents(self._state, VOCABULARY, eos=())
        self._forgetful = forgetful
        self._tables = defaultdict(list)
        self._epochs = {}
        self._flights = {}
        self._ended = set()
        self.now, self.close = self._sim.now, self._sim.close

    def launch(self, step):
        self._sim.launch(step)
        self._residents.start(step.starts)
        for lane in step.lanes:
            if lane in (COPY_IN, COPY_OUT):
                self._move([copy for copy in step.copies if copy.lane == lane])
            else:
                self._compute(step, lane)
        self._residents.end(step.ends)

    def wait(self, until=inf):
        done = self._sim.wait(until)
        if done and (flight := self._flights.pop((done.step, done.lane), None)):
            order, sampled = flight
            self._residents.completed = order
            tokens, ended = self._residents.take_back(sampled, [answer(*row) for row in known(sampled)])
            assert tokens.keys() == done.tokens.keys() - self._ended
            assert set(ended) == set(done.ended)
            self._ended.update(ended)
        return done

    def _move(self, copies):
        for copy in copies:
            self._residents.move(copy)
            self._epochs[copy.sequence] = copy.epoch
            self._tables[copy.sequence] = list(copy.target) if copy.lane == COPY_IN else []

    def _compute(self, step, lane):
        parts = [part for part in step.slices if part.lane == lane]
        if self._forgetful:
            self._residents._rows = None
        batch = self._residents.place(step.columns_of(lane))
        places, words = map(torch.from_numpy, self._residents.news())
        assert len(places) == len(set(places.tolist()))
        self._state.write(places, words)
        for part, resident, slot in zip(parts, batch.rows.residents, batch.rows.slots.tolist(), strict=True):
            assert resident.slot == slot and resident.text.request.id == part.sequence
            self._check(part, slot)
        packed, sampled = pack(batch, least_shape(batch), self._state.scratch)
        assert sorted(known(sampled)) == sorted((p.sequence, p.start + p.length) for p in parts if p.samples)
        assert set(packed[: len(parts)].tolist()) <= {*batch.rows.slots.tolist(), self._state.scratch}
        for resident, position in zip(*sampled, strict=True):  # as the device does
            token = torch.tensor([answer(resident.text.request.id, position)])
            self._state.store(torch.tensor([resident.slot]), torch.tensor([position]), token)
        self._flights[step.id, lane] = self._residents.order, sampled

    def _check(self, part, slot):
        if self._epochs.get(part.sequence) != part.epoch:
            self._epochs[part.sequence], self._tables[part.sequence] = part.epoch, []
        table, end = self._tables[part.sequence], part.start + part.length
        table.extend(part.blocks)
        held = self.spec.blocks_for(end)
        assert self._state.tables[slot, :held].tolist() == table[:held] and len(table) >= held
        text = self._residents._known[part.sequence].text
        prompt = text.tokens[: text.request.prompt_length].tolist()
        positions = torch.arange(part.start, end)
        expected = [prompt[p] if p < len(prompt) else answer(part.sequence, p) for p in positions.tolist()]
        assert self._state.tokens(torch.full_like(positions, slot), positions).tolist() == expected


def known(sampled):
    return [(resident.text.request.id, position) for resident, position in zip(*sampled, strict=True)]


def answer(id, position):
    """The token that a sequence gets for a position, however often it is sampled."""
    return VOCABULARY + 512 * id + position


@settings(max_examples=4 * settings.default.max_examples)
@given(scenarios(ranks=1, stages=1, lockstep=False, forwards_tokens=True), st.booleans())
def test_every_slice_finds_its_tokens_and_its_blocks(scenario, forgetful):
    """With preemptions, swaps, aborts, shared prefixes and steps planned ahead; `forgetful`: no slot is remembered."""
    backend = Told(scenario, forgetful)
    scheduler = Scheduler(scenario.spec, scenario.composition.policy(), 0, scenario.prefix_cache, scenario.requeue)
    serve(scenario.source(), scheduler, backend, NoTrace())
    assert not backend._flights


def test_who_was_idle_for_longest_loses_its_slot_and_is_told_anew():
    state = SlotState(Spec(blocks=9, max_length=64), 2, torch.device("cpu"))
    residents = Residents(state, VOCABULARY, eos=())
    residents.start(Request(id, 0.0, 3, 9) for id in range(3))

    def compute(id, start, length, blocks=()):
        batch = residents.place(Columns.of([Slice(id, 0, 0, start, length, True, blocks)]))
        state.write(*map(torch.from_numpy, residents.news()))
        residents.completed = residents.order
        residents.take_back(pack(batch, least_shape(batch), state.scratch)[1], [7])
        return batch.rows.slots.item()

    first, second = compute(0, 0, 3, (4,)), compute(1, 0, 3, (5,))
    assert compute(0, 3, 1) == first
    assert compute(2, 0, 3, (6,)) == second
    assert compute(1, 3, 1) == first  # neither a block nor a token of it is new
    assert state.tables[first, 0] == 5
    assert state.tokens(torch.tensor([first]), torch.tensor([3])) == 7


def test_nobody_in_flight_loses_its_slot():
    residents = Residents(SlotState(Spec(blocks=9, max_length=64), 2, torch.device("cpu")), VOCABULARY, eos=())
    residents.start(Request(id, 0.0, 3, 9) for id in range(5))

    def prefill(*ids):
        return residents.place(Columns.of([Slice(id, 0, 0, 0, 3, True, (id,)) for id in ids]))

    prefill(0, 1)
    residents.completed = residents.order
    assert sorted(prefill(2, 3).rows.slots.tolist()) == [0, 1]
    residents.completed = residents.order
    residents.place(Columns.of([Slice(id, 0, 0, 3, 1, True, ()) for id in (2, 3)]))
    with pytest.raises(EngineError, match="all 2 slots are in flight"):
        prefill(4)
