"""Trace formats: one function each, from the records of a file to rows.

A reader knows its format's field names, units and quirks, and nothing else: not where the file lies, not what is done
with its rows. Rows that are no requests (failures, empty prompts) are dropped and counted by reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from numpy import datetime64, timedelta64

from playground.workload.fields import Dropped, ReadOptions, checked, timed
from playground.workload.files import Record
from playground.workload.rows import Row

RECORDING_CAP = 10_000


def read_azure(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """Azure LLM inference traces 2023 and 2024: TIMESTAMP (with or without `+00:00`), ContextTokens, GeneratedTokens.

    https://github.com/Azure/AzurePublicDataset, CC-BY-4.0.
    """
    first: datetime64 | None = None
    for record in records:
        stamp = _stamp(record, "TIMESTAMP")
        first = stamp if first is None else first
        arrival = float((stamp - first) / timedelta64(1, "s"))
        yield Row(arrival, record.integer("ContextTokens"), record.integer("GeneratedTokens"))


def read_mooncake(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """Mooncake traces (FAST'25 and arXiv): timestamp (ms), input_length, output_length, hash_ids (512 tokens each).

    https://github.com/kvcache-ai/Mooncake, Apache-2.0. The last id of a row may stand for a partial block.
    """
    for record in records:
        yield checked(record, timed(record, options.time_unit or 0.001, options.hash_block or 512))


def read_qwen(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """Qwen-Bailian usage traces: as Mooncake's, but seconds, 16-token blocks, and chats by chat_id/parent_chat_id.

    https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0. A chat's session is its root's id. `type`
    becomes the tenant, so that text, search, image and file requests can be told apart.
    """
    roots: dict[str, str] = {}
    for record in records:
        row = timed(record, options.time_unit or 1.0, options.hash_block or 16)
        tenant = record.text("type") if record.has("type") else ""
        yield row._replace(session=_root(record, roots), tenant=tenant)


def read_lmcache(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """LMCache agent traces as reduced in `data/lmcache_agent`: session_id, turn, timestamp (s), lengths, hash_ids (16).

    Outputs of 10000 tokens (one was counted as 9999) are a cap of the recording, not a length: they are dropped.
    """
    for record in records:
        row = timed(record, options.time_unit or 1.0, options.hash_block or 16)
        if (row.output_length or 0) >= RECORDING_CAP - 1:
            dropped["an output as long as the recording allowed"] += 1
            continue
        yield row._replace(session=record.text("session_id"))


def read_sharegpt_timed(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """LLMServingSim's ShareGPT workloads: input_toks, output_toks, arrival_time_ns, hash_ids of 16 tokens (ours)."""
    for record in records:
        yield Row(
            arrival=record.number("arrival_time_ns") * (options.time_unit or 1e-9),
            prompt_length=record.integer("input_toks"),
            output_length=record.integer("output_toks"),
            hashes=record.integers("hash_ids") if record.has("hash_ids") else (),
            hash_block=options.hash_block or 16,
        )


def read_burstgpt(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """BurstGPT, by column name, so that both schemas fit (v2.0 inserts Session ID and Elapsed time).

    https://github.com/HPMLL/BurstGPT, CC-BY-4.0. Seconds from midnight of day 1. A response of 0 tokens is a failed
    request and dropped. The tenant is the model (ChatGPT, GPT-4).
    """
    for record in records:
        yield Row(
            arrival=record.number("Timestamp") * (options.time_unit or 1.0),
            prompt_length=record.integer("Request tokens"),
            output_length=record.integer("Response tokens"),
            session=record.text("Session ID") if record.has("Session ID") else "",
            tenant=record.text("Model"),
        )


def read_lengths(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """Vidur's and Etalon's processed traces: num_prefill_tokens, num_decode_tokens; arrived_at (s), if any."""
    for record in records:
        yield Row(
            arrival=record.number("arrived_at") if record.has("arrived_at") else None,
            prompt_length=record.integer("num_prefill_tokens"),
            output_length=record.integer("num_decode_tokens"),
        )


def _stamp(record: Record, name: str) -> datetime64:
    """A UTC stamp to the nanosecond. numpy's, since the core may not import a module that has a clock."""
    text = record.text(name).removesuffix("+00:00").removesuffix("Z")
    try:
        stamp = datetime64(text, "ns")
    except ValueError:
        raise record.error(name, "must be a UTC time like 2023-11-16 18:15:46.6805900") from None
    # "NaT" parses.
    if stamp != stamp:
        raise record.error(name, "must be a UTC time like 2023-11-16 18:15:46.6805900")
    return stamp


def _root(record: Record, roots: dict[str, str]) -> str:
    """The id of the first chat of a chain; a parent outside the file is a root."""
    chat = record.text("chat_id")
    parent = record.text("parent_chat_id") if record.has("parent_chat_id") else "-1"
    roots[chat] = chat if parent == "-1" else roots.get(parent, parent)
    return roots[chat]
