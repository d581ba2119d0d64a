"""Fields that many trace formats have, and what a reader needs to be told of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from playground.workload.errors import WorkloadError, check_count, check_positive
from playground.workload.files import Record
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


USUAL = ReadOptions()
Reader = Callable[[Iterator[Record], ReadOptions, Dropped], Iterator[Row]]


def timed(record: Record, unit: float, hash_block: int) -> Row:
    """The row that Mooncake's fields make."""
    return Row(
        arrival=record.number("timestamp") * unit,
        prompt_length=record.integer("input_length"),
        output_length=record.integer("output_length"),
        hashes=record.integers("hash_ids") if listed(record, "hash_ids") else (),
        hash_block=hash_block,
    )


def checked(record: Record, row: Row) -> Row:
    """Refuse ids that do not cover the prompt: the block size is wrong, and every prefix with it."""
    blocks = row.prompt_length / row.hash_block
    if row.hashes and not int(blocks) <= len(row.hashes) <= ceil(blocks):
        raise WorkloadError(
            f"{record.file}, line {record.line}: hash_ids has {len(row.hashes)} ids, input_length={row.prompt_length} "
            f"takes {ceil(blocks)} of {row.hash_block} tokens; set workload.hash_block"
        )
    return row


def listed(record: Record, name: str) -> bool:
    return record.has(name) and record.values[name] != []
