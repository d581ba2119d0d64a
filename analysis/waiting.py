"""How long something has taken that cannot tell how far it is: on stderr, for whoever waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Signal
from threading import Thread
from time import monotonic

PATIENCE = 2.0
"""Seconds after which people want to know; anything shorter stays silent."""
LINE_EVERY = 10.0


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """A line after a while, and one every ten seconds then."""
    over = Signal()
    teller = Thread(target=_tell_time, args=(title, over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell_time(title: str, over: Signal) -> None:
    began, pause = monotonic(), PATIENCE
    while not over.wait(pause):
        print(f"{title}, {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        pause = LINE_EVERY
