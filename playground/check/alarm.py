"""A bound on how long one call may compute: what goes round in circles ends in an error instead of never."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from playground.check.laws import Broken

SECONDS = 5.0
"""Of CPU time, which a busy machine does not change. A decision takes a thousandth."""


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Raises `Broken("returns")` inside of a block that computes for longer than `SECONDS`.

    By the timer of the process's own CPU time, which neither pytest's timeouts nor anybody's alarms use. Where there is
    none (Windows), outside of the main thread, or where the timer is taken, the block has no bound.
    """
    if not _free():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise Broken("returns", f"{what} has computed for {SECONDS:g} s and does not return")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _free() -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
