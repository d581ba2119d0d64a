"""Hidden states between stages, in any order that their streams allow: nothing is overtaken, nothing waits in vain."""

from random import Random

import pytest
import torch

from engine.cuda.passage import TURNS, Inlet, Outlet
from tests.engine.streams import Lazy, Streams, Wire, carry_out

STEPS = 12


class Stages:
    """Two of them: the first computes [step + 1] * tokens, the second notes what it is given and spoils it."""

    def __init__(self):
        self.first, self.second = Streams(), Streams()
        wire = Wire(self.first, self.second)
        self.hidden = Lazy(torch.zeros(5, 1), self.first)
        self.outlet = Outlet(wire, self.hidden, self.first)
        self.inlet = Inlet(wire, Lazy(torch.zeros(5, 1), self.second), self.second)
        self.computed, self.seen = [], []

    def send(self, step, tokens):
        def compute():
            self.computed.append(step)
            self.hidden.tensor.fill_(step + 1)

        self.first.queue(compute)
        self.outlet.send(self.hidden[:tokens])

    def receive(self, tokens):
        def compute():
            self.seen.append(self.inlet.hidden.tensor[:tokens].flatten().tolist())
            self.inlet.hidden.tensor.fill_(-1)

        self.inlet.receive(tokens)
        self.second.queue(compute)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_sent_is_what_is_seen(seed):
    stages, random = Stages(), Random(seed)
    sizes = [random.randint(1, 5) for _ in range(STEPS)]
    for step, tokens in enumerate(sizes):
        stages.send(step, tokens)
        stages.receive(tokens)
    carry_out(random, stages.first, stages.second)
    assert stages.seen == [[step + 1.0] * tokens for step, tokens in enumerate(sizes)]
    assert not any(queue for each in (stages.first, stages.second) for queue in each.queues.values())


def test_a_stage_does_not_wait_for_the_next_until_all_buffers_are_on_their_way():
    stages = Stages()
    for step in range(STEPS):
        stages.send(step, 3)
    carry_out(Random(0), stages.first, stages.second)
    assert stages.computed == list(range(TURNS + 1))


def test_hidden_states_are_received_while_the_step_before_is_computed():
    stages = Stages()
    stages.second.queue(lambda: None, lambda: False)  # computes for ever
    for step in range(STEPS):
        stages.send(step, 3)
        stages.receive(3)
    carry_out(Random(0), stages.first, stages.second)
    assert stages.seen == []
    assert stages.computed == list(range(2 * TURNS + 1))
