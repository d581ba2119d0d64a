"""A hand-driven scheduler for engine tests: it builds the steps that a test asks for, and nothing by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.runner import in_order
from playground.core import COPY_IN, COPY_OUT, MAIN, Copy, Logprob, Request, Sampling, Slice, Step


@dataclass
class Live:
    """One sequence as the driver sees it."""

    request: Request
    epoch: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    ended: bool = False

    @property
    def length(self) -> int:
        return self.request.prompt_length + len(self.output)


class Driver:
    """Runs steps on a runner at once. `blocks`: the order in which free blocks are handed out."""

    def __init__(self, runner, blocks, block_size, host_blocks=()):
        self.runner = runner
        self.free = list(blocks)
        self.host_free = list(host_blocks)
        self.block_size = block_size
        self.live: dict[int, Live] = {}
        self.fresh: list[Request] = []
        self.steps = 0

    def add(self, id, prompt, max_tokens, sampling=None, output_length=None):
        sampling = sampling or Sampling(ignore_eos=True)
        request = Request(
            id, 0.0, len(prompt), max_tokens, prompt=tuple(prompt), sampling=sampling, output_length=output_length
        )
        self.live[id] = Live(request)
        self.fresh.append(request)
        return self.live[id]

    def slice(self, id, tokens=None, lane=MAIN):
        """The sequence's next tokens (all that remain, if not said how many)."""
        live = self.live[id]
        tokens = live.length - live.computed if tokens is None else tokens
        end = live.computed + tokens
        needed = -(-end // self.block_size) - len(live.blocks)
        taken = [self.free.pop(0) for _ in range(max(needed, 0))]
        brought = taken if live.computed or not live.blocks else live.blocks + taken
        part = Slice(id, live.epoch, 0, live.computed, tokens, end == live.length, tuple(brought), lane)
        live.blocks = live.blocks + taken
        live.computed = end
        return part

    def share(self, id, other, tokens):
        """Begin a sequence with the first blocks of another."""
        live = self.live[id]
        live.blocks = self.live[other].blocks[: tokens // self.block_size]
        live.computed = tokens
        part = self.slice(id)
        return part._replace(blocks=tuple(live.blocks))

    def preempt(self, id):
        """Lose the KV; the blocks go to the end of the free list."""
        live = self.live[id]
        self.free += live.blocks
        live.blocks, live.computed, live.epoch = [], 0, live.epoch + 1

    def swap_out(self, id):
        live = self.live[id]
        live.epoch += 1
        live.host_blocks = [self.host_free.pop(0) for _ in live.blocks]
        copy = Copy(id, live.epoch, 0, tuple(live.blocks), tuple(live.host_blocks), COPY_OUT)
        self.free += live.blocks
        live.blocks = []
        return copy

    def swap_in(self, id):
        live = self.live[id]
        live.epoch += 1
        live.blocks = [self.free.pop(0) for _ in live.host_blocks]
        copy = Copy(id, live.epoch, 0, tuple(live.host_blocks), tuple(live.blocks), COPY_IN)
        self.host_free += live.host_blocks
        live.host_blocks = []
        return copy

    def step(self, *parts):
        """The step made of these slices and copies."""
        slices = tuple(part for part in parts if isinstance(part, Slice))
        copies = tuple(part for part in parts if isinstance(part, Copy))
        starts, self.fresh = tuple(self.fresh), []
        self.steps += 1
        return Step(self.steps - 1, 0, 0.0, slices, copies, starts)

    def run(self, *parts):
        """Carry a step out and take its tokens back."""
        step = self.step(*parts)
        self.runner.begin(step)
        for lane in in_order(step.lanes):
            outcome = self.runner.prepare(step, lane)()
            self.take_back(outcome)
        self.runner.end(step)

    def take_back(self, outcome):
        for id, tokens in outcome.tokens.items():
            self.live[id].output += tokens
            self.live[id].logprobs += outcome.logprobs.get(id, ())
        for id in outcome.ended:
            self.live[id].ended = True

    def decode(self, *ids):
        """Step all these sequences together until each has ended."""
        while going := [id for id in ids if not self.live[id].ended]:
            self.run(*(self.slice(id) for id in going))
        return [self.live[id].output for id in ids]
