"""A worker whose backend computes nothing: real processes and lines, without torch and its seconds.

What it is to do wrong comes as JSON in the configuration's path: {"rank", "step", "act"}, and "delay" of every step.
"""

import json
import os
import signal
import sys
import time
from collections import deque
from math import inf

from engine.errors import EngineError, StepFailed
from engine.parallel.worker import main
from playground.core import Done, Spec

VOCABULARY = 1000


def token(position):
    """What is sampled for a position, whoever asks."""
    return position * 7 % VOCABULARY


class FakeBackend:
    def __init__(self, config, seat):
        self.asked = json.loads(config.path)
        self.spec = Spec(**config.sizes, forwards_tokens=config.layout.stages == 1)
        self.mine = self.asked.get("rank") == seat.rank
        layout = config.layout
        place = layout.place(seat.rank)
        self.last = place.stage == layout.stages - 1
        self.forwards = layout.stages == 1
        self.origin = time.perf_counter()
        self.queue = deque()
        self.known = {}
        self.ends = {}
        self.free = 0.0
        self.lacks = None
        if self.mine and self.asked.get("blocks"):
            self.spec = Spec(**{**config.sizes, "blocks": self.asked["blocks"]})
        if self.mine and self.asked.get("step") == "load":
            self.act()

    def act(self):
        {
            "raise": self.fail,
            "refuse": self.refuse,
            "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "leave": lambda: os._exit(3),
            "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "sleep": lambda: time.sleep(1000),
            "die_late": lambda: (time.sleep(0.1), os.kill(os.getpid(), signal.SIGKILL)),
        }[self.asked["act"]]()

    def fail(self):
        raise RuntimeError("all wrong")

    def refuse(self):
        raise EngineError("model.path=x: no such folder; give another")

    def start(self):
        self.origin = time.perf_counter()

    def now(self):
        return time.perf_counter() - self.origin

    def learn(self, tokens):
        for told in tokens:
            assert told.token == token(told.position)
            self.known[told.sequence] = told.position + 1

    def launch(self, step, pooled):
        for request in step.starts:
            self.known[request.id] = request.prompt_length
            self.ends[request.id] = request.prompt_length + (request.output_length or request.max_tokens) - 1
        for part in step.slices:
            if part.start + part.length > self.known[part.sequence]:
                self.lacks = f"step {step.id} failed: position {part.start} of {part.sequence} is not known"
            if self.forwards:
                self.known[part.sequence] = part.start + part.length + 1
        for lane in step.lanes:
            self.free = max(self.free, self.now()) + self.asked.get("delay", 0.0)
            self.queue.append((step, lane, self.free))

    def wait(self, until=inf):
        step, lane, due = self.queue[0]
        if due > until:
            time.sleep(max(until - self.now(), 0.0))
            return None
        time.sleep(max(due - self.now(), 0.0))
        self.queue.popleft()
        if self.lacks:
            raise StepFailed(self.lacks)
        if step.id >= self.asked.get("step", inf):
            if self.mine:
                self.act()
            elif self.asked["act"] == "die_late":
                raise StepFailed(f"step {step.id} failed: connection closed by peer")
        tokens = {
            part.sequence: (token(part.start + part.length),)
            for part in step.slices
            if part.samples and part.lane == lane and self.last
        }
        ended = tuple(
            part.sequence
            for part in step.slices
            if part.sequence in tokens and part.start + part.length >= self.ends[part.sequence]
        )
        return Done(step.id, lane, 0.0, due - self.asked.get("delay", 0.0), due, tokens, ended, 1e-4)

    def close(self):
        pass


if __name__ == "__main__":
    os._exit(main(sys.argv[1:], FakeBackend))
