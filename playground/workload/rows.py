"""One row of a workload before it is a request: what every format has in common. Knows no file and no format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from playground.core import Request, Sampling, Slo


class Row(NamedTuple):
    """What a trace says of one request. Seconds and tokens.

    `arrival` is None where the data has no time, `output_length` where nobody knows it. `hashes` are prefix ids as in
    `Request`. `gap` is the client's own time since the session's call before ended, where the data states it. The
    fields after it are those that only a saved workload has.
    """

    arrival: float | None
    prompt_length: int
    output_length: int | None
    hashes: tuple[int, ...] = ()
    hash_block: int = 16
    session: str = ""
    tenant: str = ""
    prompt: tuple[int, ...] | None = None
    gap: float | None = None
    id: int | None = None
    max_tokens: int | None = None
    priority: int = 0
    slo: Slo = Slo()
    sampling: Sampling = Sampling()


def to_request(row: Row, number: int, max_tokens: int | None = None, max_length: int | None = None) -> Request:
    """The request of a row; `number` is its id unless the row has one of its own.

    `max_tokens` is what the client allows: by default exactly what will come. A policy that looks at `max_tokens`
    then knows the future, so give a constant cap (4096, say) to compare policies fairly: outputs longer than the cap
    end there, and it never reaches beyond `max_length`, as a server would have it.
    """
    output, allowed = row.output_length, _allowed(row, max_tokens, max_length)
    return Request(
        id=number if row.id is None else row.id,
        arrival=row.arrival or 0.0,
        prompt_length=row.prompt_length,
        max_tokens=allowed,
        output_length=None if output is None else min(output, allowed),
        prompt=row.prompt,
        hashes=row.hashes,
        hash_block=row.hash_block,
        priority=row.priority,
        tenant=row.tenant,
        session=row.session,
        slo=row.slo,
        sampling=row.sampling,
    )


def to_requests(rows: Iterable[Row], max_tokens: int | None = None, max_length: int | None = None) -> Iterator[Request]:
    """The requests of rows, numbered from 0 in their order."""
    for number, row in enumerate(rows):
        yield to_request(row, number, max_tokens, max_length)


def to_row(request: Request) -> Row:
    """The row that becomes this request again."""
    return Row(
        arrival=request.arrival,
        prompt_length=request.prompt_length,
        output_length=request.output_length,
        hashes=request.hashes,
        hash_block=request.hash_block,
        session=request.session,
        tenant=request.tenant,
        prompt=request.prompt,
        id=request.id,
        max_tokens=request.max_tokens,
        priority=request.priority,
        slo=request.slo,
        sampling=request.sampling,
    )


def _allowed(row: Row, max_tokens: int | None, max_length: int | None) -> int:
    wanted = max_tokens or row.max_tokens or row.output_length or 1
    return wanted if max_length is None else max(1, min(wanted, max_length - row.prompt_length))
