"""The trace of a run: what was decided, when, and how long it took; the same tables from every backend.

Rows go to Arrow streams while the run lasts, so that a killed run is readable up to its last flush, and to Parquet
when it ends. Times are seconds since the run began, lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from playground.core import Columns, Done, Request, Step
from playground.scheduler import Ended, Event, Group

FLUSH_SECONDS, FLUSH_SHARE = 5.0, 0.2
"""Rows are flushed after so many seconds on the run's own clock, or that share of the run where it is more: of a killed
engine no more is lost, and a simulation, whose hours pass in seconds, does not spend them on tiny batches."""

VERSION = 1
"""Of the schemas below: raised when a column changes its meaning or goes."""

_F, _I, _L, _S, _B = pa.float64(), pa.int32(), pa.int64(), pa.string(), pa.bool_()

STEPS = pa.schema(
    {
        "step": _L,
        "group": _I,
        "lane": _S,
        "planned": _F,  # the clock that the decision saw
        "launched": _F,
        "started": _F,
        "finished": _F,
        "host": _F,  # host seconds spent on the launch
        "prefill_tokens": _L,
        "decode_tokens": _L,
        "context_tokens": _L,  # KV tokens before each slice, summed
        "sequences": _I,
        "sampled": _I,
        "copied_blocks": _I,
        "waiting": _I,  # after planning
        "running": _I,
        "blocks_free": _I,
        "preempted": _I,  # victims since the group's last step
        "count": _I,  # repetitions that this row stands for
        "ticks": pa.list_(_F),  # when each of them finished, if several
        "stage_started": pa.list_(_F),  # null with one stage, unless something is to be said of each repetition
        "stage_finished": pa.list_(_F),
        "decided": pa.list_(_F),  # when each repetition was; null where that was at the end of the one before
    }
)
SLICES = pa.schema(
    {
        "step": _L,
        "sequence": _L,
        "epoch": _I,
        "rank": _I,
        "start": _I,
        "length": _I,
        "samples": _B,
        "blocks": pa.list_(_I),
        "lane": _S,
        "drafted": _I,
    }
)
REQUESTS = pa.schema(
    {
        "id": _L,
        "arrival": _F,
        "rank": _I,
        "admitted": _F,
        "first_token": _F,
        "finished": _F,
        "prompt_length": _I,
        "output_length": _I,  # tokens returned
        "max_tokens": _I,
        "cached_tokens": _I,  # prefix found in the cache at first admission
        "preemptions": _I,
        "recomputed_tokens": _L,
        "outcome": _S,
        "why": _S,
        "priority": _I,
        "tenant": _S,
        "session": _S,
        "ttft_slo": _F,
        "tpot_slo": _F,
        "e2el_slo": _F,
    }
)
"""A row is written when a request ends."""
ARRIVALS = pa.schema(
    {
        "look": _L,  # at which look it was taken in
        "id": _L,
        "arrival": _F,
        "prompt_length": _I,
        "max_tokens": _I,
        "output_length": _I,  # what the workload says will come, if it does
        "priority": _I,
        "tenant": _S,
        "session": _S,
        "ttft_slo": _F,
        "tpot_slo": _F,
        "e2el_slo": _F,
        "hash_block": _I,
        "hashes": pa.list_(_L),
    }
)
"""A row is written when a request arrives: the workload as it happened."""
LOOKS = pa.schema({"now": _F, "commits": _L})
"""Every reading of the clock that a decision saw, and how many completions were known by then: with these, and the
order of `steps`, which is the order of commits, a run can be replayed decision by decision."""
EVENTS = pa.schema({"now": _F, "look": _L, "kind": _S, "sequence": _L, "rank": _I, "detail": _S})

SCHEMAS = {
    "steps": STEPS,
    "slices": SLICES,
    "requests": REQUESTS,
    "arrivals": ARRIVALS,
    "looks": LOOKS,
    "events": EVENTS,
}

MOST_SLICES = 1 << 14
"""Slices that wait to be written: more would take longer than the step that hides the writing (about 0.15 us each)."""

_BUFFER = 1 << 18
"""Bytes of a batch that go to the file at once."""


class _Table:
    """Rows of one schema on their way to a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.schema = SCHEMAS[name]
        self.rows: list[tuple[Any, ...]] = []
        self.stream = folder / f"{name}.arrows"
        self.file = folder / f"{name}.parquet"
        self._sink = pa.BufferedOutputStream(pa.OSFile(str(self.stream), "wb"), _BUFFER)
        # Batches are small: to write one with threads, or in a write for each buffer, takes longer than to make it.
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_stream(self._sink, self.schema, options=options)

    def flush(self) -> None:
        if not self.rows:
            return
        self._writer.write_batch(pa.record_batch(self._arrays(), schema=self.schema))
        self._sink.flush()
        self.rows.clear()

    def _arrays(self) -> list[pa.Array]:
        columns = zip(*self._values(), strict=True)
        return [array(column, field.type) for column, field in zip(columns, self.schema, strict=True)]

    def _values(self) -> Iterable[tuple[Any, ...]]:
        """Rows as the schema has them."""
        return self.rows

    def close(self) -> None:
        self.flush()
        self._writer.close()
        self._sink.close()
        part = self.file.with_suffix(".part")
        # Of floats, which mostly differ, a dictionary makes the file larger.
        few = [field.name for field in self.schema if _F not in (field.type, getattr(field.type, "value_type", None))]
        with pq.ParquetWriter(part, self.schema, compression="zstd", use_dictionary=few) as writer:
            for table in _row_groups(_batches(self.stream), self.schema):
                writer.write_table(table)
        part.rename(self.file)
        self.stream.unlink()


class _Slices(_Table):
    """Slices stay in the columns that their steps have: what is kept of a step until a flush is a reference."""

    rows: list[tuple[int, Columns]]  # type: ignore[assignment]
    """(step, its slices)"""

    def _arrays(self) -> list[pa.Array]:
        steps, slices = zip(*self.rows, strict=True)
        counts = [len(columns.sequence) for columns in slices]
        arrays = [array(np.repeat(np.array(steps, np.int64), counts), _L)]
        for parts, field in zip(zip(*slices, strict=True), list(self.schema)[1:], strict=True):
            arrays.append(array(_joined(parts, counts, field.type), field.type))
        return arrays


class _Steps(_Table):
    """Rows are made of what came back when they are written: then the device has work, and nobody waits for them."""

    def _values(self) -> Iterable[tuple[Any, ...]]:
        return starmap(_step_row, self.rows)


_KINDS = {"steps": _Steps, "slices": _Slices}


def _joined(parts: Sequence[tuple[Any, ...]], counts: list[int], kind: pa.DataType) -> Any:
    """One column of all steps. Mostly all slices of a step have the same rank, epoch and lane: one look each."""
    values = chain.from_iterable(parts)
    if isinstance(kind, pa.ListType):
        return list(values)
    total, alike = sum(counts), all(part.count(part[0]) == len(part) for part in parts)
    firsts = [part[0] for part in parts] if alike else []
    if kind == _S:
        return firsts[:1] * total if alike and firsts.count(firsts[0]) == len(firsts) else list(values)
    number = kind.to_pandas_dtype()
    return np.repeat(np.array(firsts, number), counts) if alike else np.fromiter(values, number, total)


def array(values: Any, kind: pa.DataType) -> pa.Array:
    """A sequence as an Arrow array of one of the schemas' kinds; None is null where that is a number or a list.

    `pa.array` makes the same, but loads pandas, which takes as long as a small run.
    """
    count = len(values)
    if kind == _S:
        if count and values.count(values[0]) == count:  # lanes mostly are
            text = values[0].encode()
            ends = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * len(text))
            return pa.Array.from_buffers(kind, count, [None, ends, pa.py_buffer(text * count)])
        texts = [text.encode() for text in values]
        return pa.Array.from_buffers(kind, count, [None, _ends(texts), pa.py_buffer(b"".join(texts))])
    known, nulls = _known(values)
    if isinstance(kind, pa.ListType):
        parts = [() if part is None else part for part in values] if nulls else values
        ends = _ends(parts)
        items = np.array(list(chain.from_iterable(filter(None, parts))), kind.value_type.to_pandas_dtype())
        return pa.Array.from_buffers(kind, count, [known, ends], nulls, 0, [array(items, kind.value_type)])
    if nulls:
        values = [0 if value is None else value for value in values]
    numbers = np.array(values, kind.to_pandas_dtype())
    buffer = pa.py_buffer(np.packbits(numbers, bitorder="little") if kind == _B else numbers)
    return pa.Array.from_buffers(kind, count, [known, buffer], nulls)


def _known(values: Sequence[Any]) -> tuple[pa.Buffer | None, int]:
    """Which values are not None, as bits, and how many are."""
    if isinstance(values, np.ndarray) or None not in values:
        return None, 0
    known = np.array([value is not None for value in values])
    return pa.py_buffer(np.packbits(known, bitorder="little")), int(len(known) - known.sum())


def _ends(parts: Sequence[Sized]) -> pa.Buffer:
    """Where each part begins, and the last one ends."""
    ends = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, parts), np.int32, len(parts)), out=ends[1:])
    return pa.py_buffer(ends)


def _row_groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema, rows: int = 1 << 17) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield pa.Table.from_batches(held, schema)
            held, count = [], 0
    yield pa.Table.from_batches(held, schema)


def _batches(stream: Path) -> Iterator[pa.RecordBatch]:
    """The whole batches of a stream; a killed run's last one may be cut off."""
    with pa.OSFile(str(stream), "rb") as source:
        try:
            reader = pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False))
            yield from reader
        except (pa.ArrowInvalid, OSError):
            return


class Trace:
    """Writes a run's tables into a folder. Close it, or use it as a context: then the files are Parquet."""

    def __init__(self, folder: Path | str, flush_every: int = 512) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tables = {name: _KINDS.get(name, _Table)(self.folder, name) for name in SCHEMAS}
        self._flush_every = flush_every
        self._slices = 0
        self._open: dict[int, tuple[Any, ...]] = {}
        self._lanes_left: dict[int, int] = {}
        self._preempted: dict[int, int] = {}
        self._looks = 0
        self._now, self._flush_at = 0.0, FLUSH_SECONDS
        self._closed = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for table in self._tables.values():
            table.close()

    def flush(self) -> None:
        """Everything seen so far is readable by others."""
        for table in self._tables.values():
            table.flush()
        self._slices = 0

    # --- what the loop says

    def arrived(self, request: Request) -> None:
        # The look that is being taken is counted when it is over.
        self._tables["arrivals"].rows.append(_arrival_row(request, self._looks))

    def looked(self, now: float, commits: int) -> None:
        self._looks += 1
        self._tables["looks"].rows.append((now, commits))

    def launched(self, step: Step, group: Group) -> None:
        ranks, preempted = group.ranks, self._preempted
        self._open[step.id] = (
            sum([len(rank.waiting) for rank in ranks]),
            sum([len(rank.running) for rank in ranks]),
            sum([rank.pool.free for rank in ranks]),
            sum([preempted.pop(rank.index, 0) for rank in ranks]) if preempted else 0,
        )
        self._lanes_left[step.id] = len(step.lanes)
        if step.repeat == 1:
            self._add_slices(step)

    def _add_slices(self, step: Step) -> None:
        if count := len(step.columns.sequence):
            self._tables["slices"].rows.append((step.id, step.columns))
            self._slices += count

    def committed(self, done: Done, step: Step) -> None:
        if step.repeat > 1:
            self._add_slices(step)
        queues = self._open[step.id]
        self._lanes_left[step.id] -= 1
        if not self._lanes_left[step.id]:  # lanes come back in any order
            del self._open[step.id], self._lanes_left[step.id]
        self._tables["steps"].rows.append((done, step, queues))
        self._now = done.finished

    def happened(self, event: Event) -> None:
        if event.kind in ("recompute", "swap"):
            self._preempted[event.rank] = self._preempted.get(event.rank, 0) + 1
        self._tables["events"].rows.append(
            (event.now, self._looks, event.kind, event.sequence, event.rank, event.detail)
        )

    def ended(self, ended: Ended) -> None:
        self._tables["requests"].rows.append(_request_row(ended))

    def waits(self) -> None:
        steps, requests = len(self._tables["steps"].rows), len(self._tables["requests"].rows)
        if (
            steps >= self._flush_every
            or self._slices >= MOST_SLICES
            or self._now >= self._flush_at
            or requests >= 8 * self._flush_every
        ):
            self.flush()
            self._flush_at = self._now + max(FLUSH_SECONDS, FLUSH_SHARE * self._now)


def _step_row(done: Done, step: Step, queues: tuple[Any, ...]) -> tuple[Any, ...]:
    slices = step.columns_of(done.lane)
    tokens, decodes = sum(slices.length), _decodes(slices)
    return (
        step.id,
        step.group,
        done.lane,
        step.planned,
        done.launched,
        done.started,
        done.finished,
        done.host,
        tokens - decodes,
        decodes,
        sum(slices.start),
        len(slices.sequence),
        slices.samples.count(True),
        sum([len(copy.source) for copy in step.copies if copy.lane == done.lane]) if step.copies else 0,
        *queues,
        done.count,
        done.ticks or None,
        [started for started, _ in done.stages] or None,
        [finished for _, finished in done.stages] or None,
        done.planned or None,
    )


def _decodes(slices: Columns) -> int:
    """A slice of one sampled token with KV before it is a decode (or the last token of a recomputation: the same)."""
    ones = slices.length.count(1)
    if ones == len(slices.length) and min(slices.start, default=0) > 0 and all(slices.samples):
        return ones
    parts = zip(slices.length, slices.samples, slices.start, strict=True)
    return sum([length == 1 and samples and start > 0 for length, samples, start in parts])


def _request_row(ended: Ended) -> tuple[Any, ...]:
    request, sequence = ended.request, ended.sequence
    return (
        request.id,
        request.arrival,
        sequence.rank,
        sequence.admitted,
        sequence.first_token,
        ended.finished,
        request.prompt_length,
        sequence.returned,
        request.max_tokens,
        sequence.cached_tokens,
        sequence.preemptions,
        sequence.recomputed,
        ended.outcome,
        ended.why,
        request.priority,
        request.tenant,
        request.session,
        request.slo.ttft,
        request.slo.tpot,
        request.slo.e2el,
    )


def _arrival_row(request: Request, look: int) -> tuple[Any, ...]:
    return (
        look,
        request.id,
        request.arrival,
        request.prompt_length,
        request.max_tokens,
        request.output_length,
        request.priority,
        request.tenant,
        request.session,
        request.slo.ttft,
        request.slo.tpot,
        request.slo.e2el,
        request.hash_block,
        request.hashes,
    )


def read(run: Path | str, table: str, columns: list[str] | None = None) -> pa.Table:
    """One table of a run, finished or killed. `FileNotFoundError` says which file is missing."""
    folder = Path(run)
    file, stream = folder / f"{table}.parquet", folder / f"{table}.arrows"
    if file.exists():
        return pq.read_table(file, columns=columns)
    if not stream.exists():
        raise FileNotFoundError(f"{file} does not exist: {folder} is not the folder of a run")
    whole = pa.Table.from_batches(list(_batches(stream)), SCHEMAS[table])
    return whole.select(columns) if columns else whole


def expand(run: Path | str, block_size: int) -> tuple[pa.Table, pa.Table]:
    """Steps and slices of a run with rows for every repetition, numbered as if each had been a step of its own.

    In the order in which they were decided, by group where that was at the same time.
    """
    slices: dict[int, list[dict[str, Any]]] = {}
    for part in read(run, "slices").to_pylist():
        slices.setdefault(part["step"], []).append(part)
    steps: dict[int, list[dict[str, Any]]] = {}  # each with its lanes in order of commits
    for row in read(run, "steps").to_pylist():
        steps.setdefault(row["step"], []).append(row)
    ticks = [(*_decided(rows[0], tick), id, tick) for id, rows in steps.items() for tick in range(rows[0]["count"])]
    step_rows: list[dict[str, Any]] = []
    slice_rows: list[dict[str, Any]] = []
    before: dict[int, dict[str, Any]] = {}
    for number, (_, group, id, tick) in enumerate(sorted(ticks)):
        count = steps[id][0]["count"]
        parts = [_slice_at(part, tick, count, block_size) | {"step": number} for part in slices.get(id, [])]
        rows = [_step_at(row, tick, before.get(group), parts) | {"step": number} for row in steps[id]]
        before[group] = rows[-1]
        step_rows += rows
        slice_rows += parts
    return pa.Table.from_pylist(step_rows, STEPS), pa.Table.from_pylist(slice_rows, SLICES)


def _decided(row: dict[str, Any], tick: int) -> tuple[float, int]:
    """When a repetition of a row was, and of which group."""
    if row["decided"]:
        return row["decided"][tick], row["group"]
    return row["ticks"][tick - 1] if tick else row["planned"], row["group"]


def _slice_at(part: dict[str, Any], tick: int, count: int, block_size: int) -> dict[str, Any]:
    """A decode's slice in one repetition: a block is taken where its position begins one."""
    positions = range(part["start"] + 1, part["start"] + count)
    later = [position for position in positions if position % block_size == 0]
    first = len(part["blocks"]) - len(later)
    position = part["start"] + tick
    if tick == 0:
        blocks = part["blocks"][:first]
    else:
        blocks = part["blocks"][first + later.index(position) :][:1] if position in later else []
    return part | {"start": position, "blocks": blocks}


def _step_at(
    row: dict[str, Any], tick: int, before: dict[str, Any] | None, slices: list[dict[str, Any]]
) -> dict[str, Any]:
    """`before`: the group's last step. A host plans one step after another."""
    if row["count"] == 1:
        return row
    stages = len(row["stage_started"] or ()) // row["count"]
    window = slice(tick * stages, (tick + 1) * stages)
    started, finished = (row[name] and row[name][window] for name in ("stage_started", "stage_finished"))
    once = row | {
        "finished": row["ticks"][tick],
        "count": 1,
        "ticks": None,
        "stage_started": started if stages > 1 else None,
        "stage_finished": finished if stages > 1 else None,
        "decided": None,
    }
    if tick == 0:
        return once
    assert before is not None
    planned, _ = _decided(row, tick)
    launched = max(planned, before["launched"]) + row["host"]
    return once | {
        "planned": planned,
        "launched": launched,
        "started": started[0] if started else launched,
        "prefill_tokens": 0,
        "decode_tokens": len(slices),
        "context_tokens": sum(part["start"] for part in slices),
        "blocks_free": before["blocks_free"] - sum(len(part["blocks"]) for part in slices),
        "preempted": 0,
    }


class NoTrace:
    """Keeps nothing."""

    def arrived(self, request: Request) -> None: ...
    def looked(self, now: float, commits: int) -> None: ...
    def launched(self, step: Step, group: Group) -> None: ...
    def committed(self, done: Done, step: Step) -> None: ...
    def happened(self, event: Event) -> None: ...
    def ended(self, ended: Ended) -> None: ...
    def waits(self) -> None: ...
