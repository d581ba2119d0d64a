"""Workloads that a run saves and another replays: JSON Lines (plain or .gz) or Parquet, one request a row.

Everything that a `Request` holds survives the round trip. JSON rows leave out what has its default value, so a row may
be written by hand: `{"arrival": 0.5, "prompt_length": 100, "max_tokens": 20, "output_length": 20}`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.resources.abc import Traversable
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from playground.core import Request, Sampling, Slo
from playground.workload.errors import WorkloadError
from playground.workload.files import Record, json_records
from playground.workload.rows import Row, to_request, to_row

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
BATCH = 4096
SLO, SAMPLING = asdict(Slo()), asdict(Sampling())
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("arrival", pa.float64(), nullable=False),
        pa.field("prompt_length", pa.int64(), nullable=False),
        pa.field("max_tokens", pa.int64(), nullable=False),
        pa.field("output_length", pa.int64()),
        pa.field("prompt", pa.list_(pa.int32())),
        pa.field("hashes", pa.list_(pa.int64())),
        pa.field("hash_block", pa.int64()),
        pa.field("priority", pa.int64()),
        pa.field("tenant", pa.string()),
        pa.field("session", pa.string()),
        pa.field("slo", pa.struct([(name, pa.float64()) for name in SLO])),
        pa.field(
            "sampling",
            pa.struct(
                [
                    ("temperature", pa.float64()),
                    ("top_k", pa.int64()),
                    ("top_p", pa.float64()),
                    ("seed", pa.int64()),
                    ("ignore_eos", pa.bool_()),
                    ("stop_token_ids", pa.list_(pa.int64())),
                    ("min_p", pa.float64()),
                    ("repetition_penalty", pa.float64()),
                    ("presence_penalty", pa.float64()),
                    ("frequency_penalty", pa.float64()),
                    ("logprobs", pa.int64()),
                ]
            ),
        ),
    ]
)
DEFAULTS: dict[str, Any] = {
    "prompt": None,
    "hashes": (),
    "hash_block": 16,
    "priority": 0,
    "tenant": "",
    "session": "",
    "slo": SLO,
    "sampling": SAMPLING,
}


def write(path: str | Path, requests: Iterable[Request]) -> None:
    """Save requests; the suffix of the path (.jsonl, .jsonl.gz or .parquet) says how."""
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise WorkloadError(f"workload.path={path}: a saved workload must end in one of {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        _write_parquet(path, requests)
    elif path.suffix == ".gz":
        # No time stamp in the header: equal workloads give equal bytes.
        with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as stream:
            stream.writelines(line.encode() for line in _lines(requests))
    else:
        with path.open("w", encoding="utf-8") as text:
            text.writelines(_lines(requests))


def read(path: str | Path) -> Iterator[Request]:
    """The requests that `write` saved, one at a time."""
    for number, row in enumerate(read_rows(Path(path))):
        yield to_request(row, number)


def read_rows(file: Traversable) -> Iterator[Row]:
    """The rows of a saved workload."""
    records = _parquet_records(file) if str(file).endswith(".parquet") else json_records(file)
    return (_row(record) for record in records)


def _fields(request: Request) -> dict[str, Any]:
    row = to_row(request)
    return {name: getattr(row, name) for name in SCHEMA.names} | {
        "slo": asdict(row.slo),
        "sampling": asdict(row.sampling),
    }


def _lines(requests: Iterable[Request]) -> Iterator[str]:
    for request in requests:
        values = {name: value for name, value in _fields(request).items() if value != DEFAULTS.get(name, ...)}
        # JSON has no infinity: an objective that is not set is not written.
        if "slo" in values:
            values["slo"] = {name: limit for name, limit in values["slo"].items() if isfinite(limit)}
        yield json.dumps(values, separators=(",", ":")) + "\n"


def _write_parquet(path: Path, requests: Iterable[Request]) -> None:
    rows = iter(requests)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        while batch := [_fields(request) for request in islice(rows, BATCH)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=SCHEMA))


def _parquet_records(file: Traversable) -> Iterator[Record]:
    """Rows by number, since Parquet has no lines."""
    try:
        with file.open("rb") as stream:
            number = 0
            for batch in pq.ParquetFile(stream).iter_batches(BATCH):
                for values in cast("list[dict[str, Any]]", batch.to_pylist()):
                    number += 1
                    yield Record(str(file), number, values)
    except (OSError, pa.ArrowException) as fault:
        raise WorkloadError(f"{file}: cannot be read: {fault}") from None


def _row(record: Record) -> Row:
    prompt = record.integers("prompt") if _given(record, "prompt") else None
    row = Row(
        arrival=record.number("arrival"),
        prompt_length=record.integer("prompt_length", least=1),
        output_length=record.integer("output_length", least=1) if record.has("output_length") else None,
        hashes=record.integers("hashes") if _given(record, "hashes") else (),
        hash_block=record.integer("hash_block", least=1) if record.has("hash_block") else 16,
        session=record.text("session") if record.has("session") else "",
        tenant=record.text("tenant") if record.has("tenant") else "",
        prompt=prompt,
        id=record.integer("id") if record.has("id") else None,
        max_tokens=record.integer("max_tokens", least=1),
        priority=record.integer("priority", least=-(1 << 63)) if record.has("priority") else 0,
        slo=_slo(record),
        sampling=_sampling(record),
    )
    return _consistent(record, row)


def _consistent(record: Record, row: Row) -> Row:
    """The laws of `Request`, said with the place in the file."""
    if row.prompt is not None and len(row.prompt) != row.prompt_length:
        raise record.error("prompt_length", f"must equal the number of tokens in prompt, {len(row.prompt)}")
    if row.output_length is not None and row.max_tokens is not None and row.output_length > row.max_tokens:
        raise record.error("output_length", f"must not exceed max_tokens={row.max_tokens}")
    return row


def _given(record: Record, name: str) -> bool:
    return record.has(name) and record.values[name] != []


def _slo(record: Record) -> Slo:
    values = _part(record, "slo", SLO) if record.has("slo") else {}
    if not all(isinstance(limit, int | float) for limit in values.values()):
        raise record.error("slo", "must hold numbers of seconds")
    return Slo(**values)


def _sampling(record: Record) -> Sampling:
    if not record.has("sampling"):
        return Sampling()
    values = _part(record, "sampling", SAMPLING)
    values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
    try:
        return Sampling(**values)
    except (TypeError, ValueError) as fault:
        raise record.error("sampling", f"is not valid: {fault}") from None


def _part(record: Record, name: str, known: dict[str, Any]) -> dict[str, Any]:
    values = record.values[name]
    if not isinstance(values, dict) or (set(values) - set(known)):
        raise record.error(name, f"must be an object with some of {', '.join(known)}")
    return dict(values)
