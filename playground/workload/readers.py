"""Trace formats: one function each, from the records of a file to rows.

A reader knows its format's field names, units and quirks, and nothing else: not where the file lies, not what is done
with its rows. Rows that are no requests (failures, empty prompts) are dropped and counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from math import ceil
from typing import Any

from numpy import datetime64, timedelta64

from playground.workload import saved
from playground.workload.errors import WorkloadError, check_choice, check_count, check_positive
from playground.workload.files import Record, csv_records, json_records
from playground.workload.rows import Row

Dropped = Counter[str]
"""How many rows were left out, by reason."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a file does not say of itself. None takes what is usual for its format.

    `hash_block`: tokens that one hash id stands for (Mooncake 512, Qwen and vLLM 16). `time_unit`: seconds of one
    unit of its time stamps (vLLM's --timed-trace-sec-multiplier; Mooncake and AIPerf 0.001, Qwen and vLLM 1).
    `output_length`: tokens, for rows that name none (vLLM's --custom-output-len). `characters_per_token`: prompts
    that are given as text are counted with it, since the playground has no tokenizer: an estimate, 4 for English.
    """

    hash_block: int | None = None
    time_unit: float | None = None
    output_length: int | None = None
    characters_per_token: float = 4.0

    def __post_init__(self) -> None:
        check_count("workload.hash_block", self.hash_block)
        check_positive("workload.time_unit", self.time_unit)
        check_count("workload.output_length", self.output_length)
        check_positive("workload.characters_per_token", self.characters_per_token)


RECORDING_CAP = 10_000
USUAL = ReadOptions()
Reader = Callable[[Iterator[Record], ReadOptions, Dropped], Iterator[Row]]


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
        yield _checked(record, _timed(record, options.time_unit or 0.001, options.hash_block or 512))


def read_qwen(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """Qwen-Bailian usage traces: as Mooncake's, but seconds, 16-token blocks, and chats by chat_id/parent_chat_id.

    https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0. A chat's session is its root's id. `type`
    becomes the tenant, so that text, search, image and file requests can be told apart.
    """
    roots: dict[str, str] = {}
    for record in records:
        row = _timed(record, options.time_unit or 1.0, options.hash_block or 16)
        tenant = record.text("type") if record.has("type") else ""
        yield row._replace(session=_root(record, roots), tenant=tenant)


def read_lmcache(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """LMCache agent traces as reduced in `data/lmcache_agent`: session_id, turn, timestamp (s), lengths, hash_ids (16).

    Outputs of 10000 tokens (one was counted as 9999) are a cap of the recording, not a length: they are dropped.
    """
    for record in records:
        row = _timed(record, options.time_unit or 1.0, options.hash_block or 16)
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


def read_vllm(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """vLLM's JSONL data sets: `custom` (prompt, output_tokens) and `timed_trace` (as Mooncake's, seconds, 16 tokens).

    https://docs.vllm.ai/en/latest/benchmarking/cli/ and vllm-project/vllm pull request 39795. A timed_trace of
    Mooncake's needs `hash_block` 512 and `time_unit` 0.001, as it does there. Ids name contents, not prefixes, so
    they are chained here.
    """
    chain = _Chain()
    for record in records:
        if record.has("prompt"):
            yield _prompted(record, "prompt", "output_tokens", options)
        else:
            row = _timed(record, options.time_unit or 1.0, options.hash_block or 16)
            yield chain.link(_checked(record, row))


def read_aiperf(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """AIPerf's JSONL (single_turn and mooncake_trace): timestamp or delay (ms), input_length or a text, and so on.

    https://docs.nvidia.com/aiperf/benchmark-modes/trace-replay-with-mooncake-traces. `delay` is the client's time
    after the session's turn before; such files are played by a session workload. Ids name contents and are chained.
    """
    chain, unit = _Chain(), options.time_unit or 0.001
    for record in records:
        row = chain.link(_aiperf_prompt(record, options))
        yield row._replace(
            arrival=record.number("timestamp") * unit if record.has("timestamp") else None,
            gap=record.number("delay") * unit if record.has("delay") else None,
            session=record.text("session_id") if record.has("session_id") else "",
        )


def read_lengths(records: Iterator[Record], options: ReadOptions, dropped: Dropped) -> Iterator[Row]:
    """Vidur's and Etalon's processed traces: num_prefill_tokens, num_decode_tokens; arrived_at (s), if any."""
    for record in records:
        yield Row(
            arrival=record.number("arrived_at") if record.has("arrived_at") else None,
            prompt_length=record.integer("num_prefill_tokens"),
            output_length=record.integer("num_decode_tokens"),
        )


CSV_FORMATS: dict[str, Reader] = {"azure": read_azure, "burstgpt": read_burstgpt, "lengths": read_lengths}
JSON_FORMATS: dict[str, Reader] = {
    "aiperf": read_aiperf,
    "lmcache": read_lmcache,
    "mooncake": read_mooncake,
    "qwen": read_qwen,
    "sharegpt_timed": read_sharegpt_timed,
    "vllm": read_vllm,
}
SAVED = "playground"
FORMATS = (*CSV_FORMATS, *JSON_FORMATS, SAVED)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file and its format; every call of `rows` reads it anew, row by row."""

    file: Traversable
    format: str
    options: ReadOptions = USUAL

    def __post_init__(self) -> None:
        check_choice("workload.format", self.format, FORMATS)

    def rows(self, dropped: Dropped | None = None) -> Iterator[Row]:
        """The requests of the file, in its order; `dropped` counts the rows that are none."""
        dropped = Counter() if dropped is None else dropped
        count = 0
        for row in _kept(self._read(dropped), dropped):
            count += 1
            yield row
        if not count:
            reasons = ", ".join(f"{number} with {reason}" for reason, number in dropped.items())
            raise WorkloadError(f"{self.file}: holds no request; dropped: {reasons or 'nothing'}")

    def _read(self, dropped: Dropped) -> Iterator[Row]:
        if self.format == SAVED:
            return saved.read_rows(self.file)
        if self.format in CSV_FORMATS:
            return CSV_FORMATS[self.format](csv_records(self.file), self.options, dropped)
        return JSON_FORMATS[self.format](json_records(self.file), self.options, dropped)


def _kept(rows: Iterable[Row], dropped: Dropped) -> Iterator[Row]:
    """Rows that are requests: with a prompt, and with an output (a failed request has none)."""
    for row in rows:
        if row.output_length == 0:
            dropped["no output token"] += 1
        elif row.prompt_length == 0:
            dropped["an empty prompt"] += 1
        else:
            yield row


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


def _timed(record: Record, unit: float, hash_block: int) -> Row:
    """The row that Mooncake's fields make."""
    return Row(
        arrival=record.number("timestamp") * unit,
        prompt_length=record.integer("input_length"),
        output_length=record.integer("output_length"),
        hashes=record.integers("hash_ids") if _listed(record, "hash_ids") else (),
        hash_block=hash_block,
    )


def _checked(record: Record, row: Row) -> Row:
    """Refuse ids that do not cover the prompt: the block size is wrong, and every prefix with it."""
    blocks = row.prompt_length / row.hash_block
    if row.hashes and not int(blocks) <= len(row.hashes) <= ceil(blocks):
        raise WorkloadError(
            f"{record.file}, line {record.line}: hash_ids has {len(row.hashes)} ids, input_length={row.prompt_length} "
            f"takes {ceil(blocks)} of {row.hash_block} tokens; set workload.hash_block"
        )
    return row


def _listed(record: Record, name: str) -> bool:
    return record.has(name) and record.values[name] != []


def _root(record: Record, roots: dict[str, str]) -> str:
    """The id of the first chat of a chain; a parent outside the file is a root."""
    chat = record.text("chat_id")
    parent = record.text("parent_chat_id") if record.has("parent_chat_id") else "-1"
    roots[chat] = chat if parent == "-1" else roots.get(parent, parent)
    return roots[chat]


def _prompted(record: Record, prompt: str, output: str, options: ReadOptions) -> Row:
    """A row whose prompt is a text, or a list of token ids."""
    length = _output(record, output, options)
    if isinstance(record.values[prompt], list):
        tokens = record.integers(prompt)
        return Row(None, len(tokens), length, prompt=tokens)
    characters = len(record.text(prompt))
    return Row(None, max(1, round(characters / options.characters_per_token)), length)


def _output(record: Record, name: str, options: ReadOptions) -> int:
    if record.has(name):
        return record.integer(name)
    if options.output_length is None:
        raise WorkloadError(
            f"{record.file}, line {record.line}: {name} is missing; add it, or set workload.output_length"
        )
    return options.output_length


def _aiperf_prompt(record: Record, options: ReadOptions) -> Row:
    for name in ("text_input", "text"):
        if record.has(name):
            return _prompted(record, name, "output_length", options)
    if _listed(record, "messages"):
        length = round(_characters(record) / options.characters_per_token)
        return Row(None, max(1, length), _output(record, "output_length", options))
    block, length = options.hash_block or 512, record.integer("input_length")
    ids = record.integers("hash_ids") if _listed(record, "hash_ids") else ()
    # AIPerf's own examples give more ids than the length takes.
    ids = ids[: -(-length // block)]
    return Row(None, length, _output(record, "output_length", options), ids, block)


def _characters(record: Record) -> int:
    """Characters of all messages that are plain texts."""
    messages: Any = record.values["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise record.error("messages", "must be a list of objects")
    return sum(len(message["content"]) for message in messages if isinstance(message.get("content"), str))


class _Chain:
    """Turns ids of block contents into ids of prefixes: equal only if all blocks before are equal too."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def link(self, row: Row) -> Row:
        prefix, chained = -1, []
        for block in row.hashes:
            prefix = self._ids.setdefault((prefix, block), len(self._ids))
            chained.append(prefix)
        return row._replace(hashes=tuple(chained))
