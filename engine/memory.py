"""When memory runs out or loading fails: one line that says what to change, and nothing half-made left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

import torch

from engine.errors import EngineError


@contextmanager
def enough_memory(otherwise: str) -> Iterator[None]:
    """A shortage of memory inside is an `EngineError` that says `otherwise`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_shortage(error):
            raise EngineError(otherwise) from error
        raise


@contextmanager
def whole_or_nothing() -> Iterator[None]:
    """What fails inside leaves no tensor behind: not in the frames that its traceback keeps, not in torch's cache."""
    try:
        yield
    except BaseException as error:
        for link in _links(error):
            clear_frames(link.__traceback__)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise


def is_shortage(error: BaseException) -> bool:
    """Whether an error, or one that it hides, says that memory ran out, of a GPU or of the host."""
    return any(
        isinstance(link, torch.OutOfMemoryError | MemoryError)
        or any(words in str(link) for words in ("out of memory", "can't allocate memory", "ALLOC_FAILED"))
        for link in _links(error)
    )


def room(device: torch.device) -> int:
    """Bytes that a device has for a model at best: what is free on a GPU, all there is on a host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and what it came up while handling."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
