"""A run in memory: what a comparison needs of it, without a run folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from playground.core import Done, Request, Step
from playground.scheduler import Ended, Event, Group

Array = np.ndarray[Any, Any]


class InMemory:
    """Requests as they ended, tokens as they came, queues as they stood. Times in seconds."""

    def __init__(self) -> None:
        self._ended: list[Ended] = []
        self._sampled: list[tuple[float, int]] = []
        self._queues: list[tuple[float, int, int]] = []
        self.unserved: list[Ended] = []
        """Rejected or aborted: in no number below."""
        self.waited: dict[int, float] = {}
        """Seconds that requests spent in a front end before they arrived; clients count them."""

    # --- what the loop says

    def arrived(self, request: Request) -> None:
        """Told again when it ends."""

    def looked(self, now: float, commits: int) -> None:
        """Nothing is replayed from memory."""

    def waits(self) -> None: ...

    def launched(self, step: Step, group: Group) -> None:
        running = sum(len(rank.running) for rank in group.ranks)
        waiting = sum(len(rank.waiting) for rank in group.ranks)
        self._queues.append((step.planned, running, waiting))

    def committed(self, done: Done, step: Step) -> None:
        each = len(done.tokens)
        self._sampled += [(finish, each) for finish in done.ticks or (done.finished,)]

    def happened(self, event: Event) -> None:
        """Preemptions are counted by sequence."""

    def ended(self, ended: Ended) -> None:
        (self._ended if ended.outcome == "finished" else self.unserved).append(ended)

    # --- what came of it, by request, as its client sees it

    def means(self) -> dict[str, float]:
        """Mean latencies in seconds, the makespan in seconds, tokens a second."""
        return {
            "ttft": float(self.ttft.mean()),
            "tpot": float(np.nanmean(self.tpot)),
            "e2el": float(self.e2el.mean()),
            "makespan": self.makespan,
            "throughput": float(self.outputs.sum() / self.makespan),
        }

    @property
    def ids(self) -> Array:
        return np.array([ended.request.id for ended in self._ended])

    @property
    def prompts(self) -> Array:
        return np.array([ended.request.prompt_length for ended in self._ended])

    @property
    def outputs(self) -> Array:
        return np.array([ended.sequence.returned for ended in self._ended])

    @property
    def ttft(self) -> Array:
        return np.asarray(self._first - self._arrival)

    @property
    def tpot(self) -> Array:
        """NaN where there is but one token."""
        later = np.where(self.outputs > 1, self.outputs - 1.0, np.nan)
        return np.asarray((self._finished - self._first) / later)

    @property
    def e2el(self) -> Array:
        return np.asarray(self._finished - self._arrival)

    @property
    def preemptions(self) -> int:
        return sum(ended.sequence.preemptions for ended in self._ended)

    @property
    def cached(self) -> float:
        """Share of all prompt tokens that the prefix cache had."""
        return sum(ended.sequence.cached_tokens for ended in self._ended) / int(self.prompts.sum())

    @property
    def makespan(self) -> float:
        """From the first arrival to the last token."""
        return float(self._finished.max() - self._arrival.min())

    # --- what came of it, by second

    def tokens_by_second(self, seconds: int) -> Array:
        """Tokens sampled in each of the first so many seconds."""
        times, counts = np.array(self._sampled).T
        edges = np.arange(seconds + 1)
        return np.histogram(times, bins=edges, weights=counts)[0]

    def queues_at(self, times: Array) -> tuple[Array, Array]:
        """Sequences that ran and that waited at these times, as the last step before saw them."""
        seen, running, waiting = np.array(self._queues).T
        at = np.clip(np.searchsorted(seen, times, side="right") - 1, 0, None)
        return running[at], waiting[at]

    @property
    def _arrival(self) -> Array:
        waited = self.waited
        return np.array([ended.request.arrival - waited.get(ended.request.id, 0.0) for ended in self._ended])

    @property
    def _first(self) -> Array:
        return np.array([ended.sequence.first_token for ended in self._ended], dtype=float)

    @property
    def _finished(self) -> Array:
        return np.array([ended.finished for ended in self._ended])
