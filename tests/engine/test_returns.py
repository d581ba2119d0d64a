"""Tokens on their way from the last stage of a pipeline to the first: who waits for which."""

import torch

from engine.returns import DEPTH, Returns
from engine.sampler import Row
from engine.sequence import Sequence
from playground.core import Request

EOS = (7,)


class Back:
    """The last stage: it has sent 100, 101, ... so far."""

    def __init__(self):
        self.received = 0

    def receive(self, like):
        ids = torch.arange(100 + self.received, 100 + self.received + len(like))
        self.received += len(like)
        return like.copy_(ids)

    def send(self, x):
        raise AssertionError("the first stage sends nothing")


def sequence(id, prompt=3):
    return Sequence(Request(id, 0.0, prompt, 500, prompt=(1,) * prompt), 1000)


def test_what_is_needed_and_what_came_before_is_received_and_nothing_else():
    back, (one, two, three) = Back(), map(sequence, range(3))
    returns = Returns(back, EOS)
    returns.expect([Row(one, 3)])
    returns.expect([])  # a chunk that samples nothing: nothing is sent
    returns.expect([Row(two, 3), Row(three, 3)])
    returns.expect([Row(one, 4)])
    returns.call({})
    returns.call({sequence(0): 500})  # it has one's number, and is another one
    assert back.received == 0
    returns.call({two: 3})  # its prompt again: that token is no input
    assert back.received == 0
    returns.call({three: 4})
    assert back.received == 3
    assert (one.tokens[3], two.tokens[3], three.tokens[3]) == (100, 101, 102)
    assert (one.known, two.known, three.known) == (4, 4, 4)
    returns.call({one: 4})
    assert back.received == 3
    returns.call({one: 5, two: 4})
    assert (one.tokens[4], one.known) == (103, 5)


def test_a_position_that_is_sampled_again_is_waited_for():
    back, one = Back(), sequence(0)
    returns = Returns(back, EOS)
    returns.expect([Row(one, 3)])
    returns.call({one: 4})
    returns.expect([Row(one, 3)])
    returns.call({one: 4})
    assert one.tokens[3] == 101


def test_what_nobody_asks_for_is_received_in_the_end():
    back = Back()
    returns = Returns(back, EOS)
    for id in range(DEPTH + 5):
        returns.expect([Row(sequence(id), 3)])
    returns.call({})
    assert back.received == 5
