"""Who is next among the waiting?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from playground.draft import Draft
from playground.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served; preempted sequences come before all others.

    Stops at the first that is not admitted: nobody overtakes (head-of-line blocking included).
    Source: vLLM (SOSP'23) and every engine since.
    """

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        served = None
        while (head := next(iter(draft.waiting), None)) is not None and head is not served:
            yield head
            served = head
