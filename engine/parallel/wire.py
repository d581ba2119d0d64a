"""What driver and workers say to each other, as bytes: columns of packed integers, little by little.

A step carries what is new: requests once, the blocks that are appended, tokens that another stage sampled. Nothing is
pickled, so a peer can send nonsense but no code. Both ends must run the same version on the same kind of machine.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from engine.pooled import ALONE, Pooled
from playground.core import Columns, Copy, Done, LayerMove, Logprob, Request, Sampling, Step

VERSION = 3
"""Raise it when anything here changes."""

DIALECT = f"{VERSION}-{sys.byteorder}"
"""What two ends compare before they say anything else: columns are packed as the machine has them."""


class Kind(Enum):
    """A message's first byte."""

    # driver to worker
    CONFIG = b"c"
    START = b"s"
    STEP = b"x"
    STOP = b"q"
    PING = b"?"
    # worker to driver
    HELLO = b"h"
    READY = b"r"
    STARTED = b"b"
    REPORT = b"d"
    FAILED = b"f"
    PONG = b"!"


class Token(NamedTuple):
    """A token that was sampled for a sequence's position."""

    sequence: int
    position: int
    token: int


class Pong(NamedTuple):
    """A worker's clock in seconds, and the steps that it began and finished last (-1: none)."""

    clock: float
    begun: int
    finished: int


class WireError(RuntimeError):
    """A peer says what this version does not understand."""


def kind(message: bytes) -> Kind:
    """What a message is."""
    try:
        return Kind(message[:1])
    except ValueError as error:
        raise WireError(f"a message begins with {message[:1]!r}: no such kind; run one version everywhere") from error


def plain(kind: Kind, value: Any = None) -> bytes:
    """A message of anything that JSON can say: for what is said once."""
    return kind.value + (b"" if value is None else json.dumps(value).encode())


def value(message: bytes) -> Any:
    """What `plain` was given."""
    return json.loads(message[1:])


def encode_pong(pong: Pong) -> bytes:
    return Kind.PONG.value + _packed("d", [pong.clock]) + _packed("q", pong[1:])


def decode_pong(message: bytes) -> Pong:
    columns = _Columns(message)
    return Pong(columns.take("d")[0], *columns.take("q"))


# --- steps


def encode_step(step: Step, known: Sequence[Token] = (), pooled: Pooled = ALONE) -> bytes:
    """A step for the workers of one replica, tokens that they may not know yet, and how many tokens others compute.

    Ranks and groups are left out: who gets the message is meant.
    """
    part, copies = step.columns, step.copies
    lanes = dict.fromkeys(chain(part.lane, (copy.lane for copy in copies)))
    places = {lane: place for place, lane in enumerate(lanes)}
    return b"".join(
        [
            Kind.STEP.value,
            *[_packed("q", column) for column in (zip(*known, strict=True) if known else ((), (), ()))],
            _packed("B", "\n".join(pooled).encode()),
            _packed("B", map(len, pooled.values())),
            *_ragged("i", list(chain.from_iterable(pooled.values()))),
            _packed("q", [step.id]),
            _packed("d", [step.planned]),
            _packed("B", "\n".join(lanes).encode()),
            _packed("q", part.sequence),
            *[_packed("i", column) for column in (part.epoch, part.start, part.length, part.drafted)],
            _packed("B", part.samples),
            _packed("B", bytes(len(part.lane)) if len(lanes) == 1 else map(places.__getitem__, part.lane)),
            *_ragged("i", part.blocks),
            _packed("q", (copy.sequence for copy in copies)),
            _packed("i", (copy.epoch for copy in copies)),
            _packed("B", (places[copy.lane] for copy in copies)),
            *_ragged("i", [copy.source for copy in copies]),
            *_ragged("i", [copy.target for copy in copies]),
            _packed("q", step.ends),
            _packed("i", () if step.move is None else (step.move.blocks, *step.move.layers)),
            _packed("B", json.dumps([_told(request) for request in step.starts]).encode() if step.starts else b""),
            *_ragged("i", [request.prompt or () for request in step.starts]),
        ]
    )


def decode_step(message: bytes) -> tuple[Step, list[Token], Pooled]:
    """What `encode_step` was given, as the only rank of the only group sees it."""
    columns = _Columns(message)
    known = list(map(Token, *[columns.take("q") for _ in Token._fields]))
    pooled = _pooled(columns)
    id, planned = columns.take("q")[0], columns.take("d")[0]
    lanes = columns.take("B").tobytes().decode().split("\n")
    part = _slices(columns, lanes)
    copies = _copies(columns, lanes)
    ends = tuple(columns.take("q"))
    move = columns.take("i")
    starts = json.loads(columns.take("B").tobytes() or b"[]")
    prompts = columns.ragged("i")
    return (
        Step(
            id,
            0,
            planned,
            part,
            copies,
            tuple(map(_request, starts, prompts)),
            ends,
            move=LayerMove(tuple(move[1:]), move[0]) if move else None,
        ),
        known,
        pooled,
    )


def _pooled(columns: _Columns) -> Pooled:
    names, counts, tokens = columns.take("B").tobytes().decode(), columns.take("B"), iter(columns.ragged("i"))
    if not names:
        return ALONE
    return {lane: tuple(islice(tokens, count)) for lane, count in zip(names.split("\n"), counts, strict=True)}


def _slices(columns: _Columns, lanes: list[str]) -> Columns:
    sequence = tuple(columns.take("q"))
    epoch, start, length, drafted = (tuple(columns.take("i")) for _ in range(4))
    samples = tuple(map(bool, columns.take("B")))
    lane = tuple(map(lanes.__getitem__, columns.take("B")))
    return Columns(
        sequence, epoch, (0,) * len(sequence), start, length, samples, tuple(columns.ragged("i")), lane, drafted
    )


def _copies(columns: _Columns, lanes: list[str]) -> tuple[Copy, ...]:
    sequences, epochs, places = columns.take("q"), columns.take("i"), columns.take("B")
    rows = zip(sequences, epochs, columns.ragged("i"), columns.ragged("i"), places, strict=True)
    return tuple([Copy(id, epoch, 0, source, target, lanes[place]) for id, epoch, source, target, place in rows])


def _told(request: Request) -> dict[str, Any]:
    """What a device must know of a request, but for its prompt: prompts are long."""
    told = {name: getattr(request, name) for name in ("id", "prompt_length", "max_tokens", "output_length")}
    if request.prompt is None:  # else nobody asks for hashes
        told |= {"hashes": request.hashes, "hash_block": request.hash_block, "made_up": True}
    if request.sampling != Sampling():
        told["sampling"] = asdict(request.sampling)
    return told


def _request(told: dict[str, Any], prompt: tuple[int, ...]) -> Request:
    """Of the arrival, tenants and objectives no device hears."""
    sampling = dict(told.pop("sampling", {}))
    if "stop_token_ids" in sampling:
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    hashes = tuple(told.pop("hashes", ()))
    made_up = told.pop("made_up", False)
    return Request(
        arrival=0.0, hashes=hashes, prompt=None if made_up else prompt, sampling=Sampling(**sampling), **told
    )


# --- reports


def encode_report(done: Done, base: float) -> bytes:
    """What became of one lane of a step; `base` is the worker's clock, in seconds, at the backend's second 0."""
    told = [logprob for shares in done.logprobs.values() for logprob in shares]
    return b"".join(
        [
            Kind.REPORT.value,
            _packed("q", [done.step]),
            _packed("d", [base + done.started, base + done.finished, done.host]),
            _packed("B", done.lane.encode()),
            _packed("q", done.tokens),
            *_ragged("i", list(done.tokens.values())),
            _packed("q", done.ended),
            _packed("q", done.logprobs),
            _packed("i", map(len, done.logprobs.values())),
            _packed("d", (logprob.value for logprob in told)),
            *_ragged("i", [[id for id, _ in logprob.top] for logprob in told]),
            _packed("d", (share for logprob in told for _, share in logprob.top)),
        ]
    )


def decode_report(message: bytes) -> Done:
    """What `encode_report` was given, its times on the worker's clock; `launched` is the driver's to say."""
    columns = _Columns(message)
    step = columns.take("q")[0]
    started, finished, host = columns.take("d")
    lane = columns.take("B").tobytes().decode()
    tokens = dict(zip(columns.take("q"), columns.ragged("i"), strict=True))
    ended = tuple(columns.take("q"))
    return Done(step, lane, started, started, finished, tokens, ended, host, logprobs=_logprobs(columns))


def _logprobs(columns: _Columns) -> dict[int, tuple[Logprob, ...]]:
    sequences, counts, values, tops = columns.take("q"), columns.take("i"), columns.take("d"), columns.ragged("i")
    shares = iter(columns.take("d"))
    told = (
        Logprob(own, tuple(zip(ids, islice(shares, len(ids)), strict=True)))
        for own, ids in zip(values, tops, strict=True)
    )
    return {id: tuple(islice(told, count)) for id, count in zip(sequences, counts, strict=True)}


# --- columns


def _packed(code: str, values: Iterable[Any]) -> bytes:
    """Their number, and the values as `array` packs them."""
    column = array(code, values)
    return len(column).to_bytes(4, "little") + column.tobytes()


def _ragged(code: str, rows: Sequence[Sequence[int]]) -> Iterator[bytes]:
    """Two columns: how long each row is, and all rows after one another."""
    yield _packed("i", map(len, rows))
    yield _packed(code, chain.from_iterable(rows))


class _Columns:
    """A message's columns, taken in the order in which they were packed."""

    def __init__(self, message: bytes) -> None:
        self._message = memoryview(message)
        self._at = 1

    def take(self, code: str) -> array[Any]:
        begin = self._at + 4
        column = array(code)
        self._at = begin + int.from_bytes(self._message[self._at : begin], "little") * column.itemsize
        if self._at > len(self._message):
            raise WireError("a message is shorter than it says; run one version everywhere")
        column.frombytes(self._message[begin : self._at])
        return column

    def ragged(self, code: str) -> list[tuple[int, ...]]:
        lengths, values = self.take("i"), tuple(self.take(code))
        return [values[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
