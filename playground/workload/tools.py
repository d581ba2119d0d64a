"""JSONL formats of benchmark tools: vLLM's and AIPerf's. Prompts may be texts, and ids name contents, not prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from playground.workload.errors import WorkloadError
from playground.workload.fields import Dropped, ReadOptions, checked, listed, timed
from playground.workload.files import Record
from playground.workload.rows import Row


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
            row = timed(record, options.time_unit or 1.0, options.hash_block or 16)
            yield chain.link(checked(record, row))


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
    if listed(record, "messages"):
        length = round(_characters(record) / options.characters_per_token)
        return Row(None, max(1, length), _output(record, "output_length", options))
    block, length = options.hash_block or 512, record.integer("input_length")
    ids = record.integers("hash_ids") if listed(record, "hash_ids") else ()
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
