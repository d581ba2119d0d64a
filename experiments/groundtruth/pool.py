"""Many predictions at once, over all cores, with progress on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import monotonic
from typing import TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")
LINE_EVERY = 5.0
"""Seconds."""


class Pool:
    """Processes that answer questions. A context; `workers` 0 answers in this process."""

    def __init__(self, workers: int | None = None) -> None:
        count = (os.cpu_count() or 1) if workers is None else workers
        self._executor = ProcessPoolExecutor(count, mp_context=get_context("spawn")) if count else None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor:
            self._executor.shutdown(cancel_futures=True)

    def map(self, title: str, ask: Callable[[Question], Answer], questions: Sequence[Question]) -> list[Answer]:
        """Answers in order of the questions."""
        answers = self._executor.map(ask, questions) if self._executor else map(ask, questions)
        return list(_told(title, answers, len(questions)))


def _told(title: str, answers: Iterator[Answer], total: int) -> Iterator[Answer]:
    due = monotonic() + LINE_EVERY
    for done, answer in enumerate(answers, start=1):
        if monotonic() >= due:
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)
            due = monotonic() + LINE_EVERY
        yield answer
