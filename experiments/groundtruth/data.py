"""Files of measurements that come with the package."""

from __future__ import annotations

import csv
import json
import lzma
from importlib.resources import files
from typing import Any


def text(path: str) -> str:
    """Content of a file below `data/`; `.xz` is unpacked."""
    file = files("experiments.groundtruth").joinpath("data", *path.split("/"))
    content = file.read_bytes()
    return (lzma.decompress(content) if path.endswith(".xz") else content).decode("utf-8")


def table(path: str) -> list[dict[str, str]]:
    """Rows of a CSV or TSV file."""
    separator = "\t" if ".tsv" in path else ","
    return list(csv.DictReader(text(path).splitlines(), delimiter=separator))


def lines(path: str) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file."""
    return [json.loads(line) for line in text(path).splitlines()]
