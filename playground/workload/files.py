"""Opening trace files and reading typed fields out of their rows. Knows no format.

Whatever is wrong with a file is one line that names the file, the line, the field, its value and what was expected.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import IO, Any, cast

from playground.workload.errors import WorkloadError

GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ"
READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error, csv.Error)


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file and where it stands. Getters raise a `WorkloadError` that says which field is wrong."""

    file: str
    line: int
    values: Mapping[str, Any]

    def has(self, name: str) -> bool:
        return self.values.get(name) not in (None, "")

    def integer(self, name: str, least: int = 0) -> int:
        """A whole number of at least so much; `472.0` passes, since some tools write integers that way."""
        value = self._value(name)
        try:
            number = _whole(value)
        except (TypeError, ValueError, OverflowError):
            raise self.error(name, "must be a whole number") from None
        if number < least:
            raise self.error(name, f"must be at least {least}")
        return number

    def number(self, name: str, least: float = 0.0) -> float:
        """A finite number of at least so much."""
        value = self._value(name)
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.error(name, "must be a number") from None
        if not isfinite(number) or number < least:
            raise self.error(name, f"must be a finite number of at least {least:g}")
        return number

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise self.error(name, "must be a text or a whole number")
        return str(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._value(name)
        if not isinstance(value, list):
            raise self.error(name, "must be a list of whole numbers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.error(name, f"must hold whole numbers only, not {item!r}")
        return tuple(value)

    def error(self, name: str, expected: str) -> WorkloadError:
        return WorkloadError(f"{self.file}, line {self.line}: {name}={_shown(self.values.get(name))} {expected}")

    def _value(self, name: str) -> Any:
        if not self.has(name):
            fields = ", ".join(str(field) for field in self.values) or "none"
            raise WorkloadError(f"{self.file}, line {self.line}: {name} is missing; the fields here are: {fields}")
        return self.values[name]


def csv_records(file: Traversable) -> Iterator[Record]:
    """Rows of a CSV file with a header line, by column name."""
    with _open(file) as stream:
        reader = csv.DictReader(stream)
        for values in reader:
            if None in values:
                raise WorkloadError(f"{file}, line {reader.line_num}: has more values than the header has columns")
            yield Record(str(file), reader.line_num, values)


def json_records(file: Traversable) -> Iterator[Record]:
    """Objects of a JSON Lines file; blank lines are passed over."""
    with _open(file) as stream:
        for line, text in enumerate(stream, 1):
            if text.strip():
                yield Record(str(file), line, _parse(f"{file}, line {line}", text))


@contextmanager
def _open(file: Traversable) -> Iterator[TextIOWrapper]:
    """The text of a plain, gzip or xz file, told apart by content; faults while it is read name the file."""
    try:
        with file.open("rb") as raw, TextIOWrapper(_decompressed(raw), encoding="utf-8", newline="") as stream:
            yield stream
    except READ_ERRORS as fault:
        raise WorkloadError(f"{file}: cannot be read: {fault}") from None


def _decompressed(raw: IO[bytes]) -> IO[bytes]:
    start = raw.read(len(XZ_MAGIC))
    raw.seek(0)
    if start.startswith(GZIP_MAGIC):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    return lzma.LZMAFile(raw) if start == XZ_MAGIC else raw


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as fault:
        raise WorkloadError(f"{where}: is not JSON: {fault}") from None
    if not isinstance(values, dict):
        raise WorkloadError(f"{where}: must be a JSON object, not {_shown(values)}")
    return values


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return int(value)
    if isinstance(value, int):
        return value
    number = float(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def existing(option: str, path: str, instead: str = "") -> Path:
    """The file at a path that a user gave, or an error that names the option."""
    if not (file := Path(path).expanduser()).is_file():
        raise WorkloadError(f"{option}={path}: there is no such file{instead}")
    return file
