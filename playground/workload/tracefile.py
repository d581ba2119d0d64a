"""A file of requests in one of the known formats. Adding a format is a reader and a line here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from playground.workload import readers, saved, tools
from playground.workload.errors import WorkloadError, check_choice
from playground.workload.fields import USUAL, Dropped, Reader, ReadOptions
from playground.workload.files import csv_records, json_records
from playground.workload.rows import Row

CSV_FORMATS: dict[str, Reader] = {
    "azure": readers.read_azure,
    "burstgpt": readers.read_burstgpt,
    "lengths": readers.read_lengths,
}
JSON_FORMATS: dict[str, Reader] = {
    "aiperf": tools.read_aiperf,
    "lmcache": readers.read_lmcache,
    "mooncake": readers.read_mooncake,
    "qwen": readers.read_qwen,
    "sharegpt_timed": readers.read_sharegpt_timed,
    "vllm": tools.read_vllm,
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
