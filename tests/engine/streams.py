"""Streams of a device whose work is carried out in any order that their marks allow, on tensors of the host."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager

import torch


class Point:
    """A mark."""

    def __init__(self):
        self.passed = False


class Streams:
    """A timeline that queues. A piece of work is (whether it can begin, what it does)."""

    def __init__(self):
        self.queues = {name: deque() for name in ("computing", "receiving", "sending")}
        self._current = "computing"

    def queue(self, work, ready=lambda: True):
        self.queues[self._current].append((ready, work))

    @contextmanager
    def _on(self, name):
        before, self._current = self._current, name
        yield
        self._current = before

    def receiving(self):
        return self._on("receiving")

    def sending(self):
        return self._on("sending")

    def mark(self):
        point = Point()
        self.queue(lambda: setattr(point, "passed", True))
        return point

    def after(self, point):
        self.queue(lambda: None, lambda: point.passed)

    def able(self):
        """Queues whose next piece of work can begin."""
        return [queue for queue in self.queues.values() if queue and queue[0][0]()]


class Lazy:
    """A tensor that is written when its stream gets there."""

    def __init__(self, tensor, streams):
        self.tensor, self.streams = tensor, streams

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is torch.zeros_like
        return cls(torch.zeros_like(args[0].tensor), args[0].streams)

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, rows):
        return Lazy(self.tensor[rows], self.streams)

    def copy_(self, other):
        self.streams.queue(lambda: self.tensor.copy_(other.tensor))
        return self


class Wire:
    """As NCCL sends: the sender's buffer is read when the receiver is there, and both are held up until then."""

    def __init__(self, streams, other):
        self.streams, self.other, self.offered = streams, other, None

    def send(self, x):
        self.streams.queue(lambda: setattr(self, "offered", x), lambda: self.offered is None)
        self.streams.queue(lambda: None, lambda: self.offered is not x)

    def receive(self, like):
        def take():
            like.tensor.copy_(self.offered.tensor)
            self.offered = None

        self.other.queue(take, lambda: self.offered is not None)
        return like


def carry_out(random, *streams):
    """All that is queued, in an order drawn by `random`; whatever cannot begin is left."""
    while able := [queue for each in streams for queue in each.able()]:
        random.choice(able).popleft()[1]()
