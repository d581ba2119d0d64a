"""The fastest known config of each kernel on each device: shipped with the package, or found here and kept on disk.

A config changes speed, never results, so nothing here may stop a run: what is missing, stale or damaged is ignored,
with one warning a file, and a default serves. It knows no kernel; `kernels.triton.tuning` knows what to try.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tempfile
import tokenize
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from math import log2
from pathlib import Path
from typing import Any, TypeVar

import torch

VERSION = 1
"""Of the files: others are not read."""

SHIPPED = Path(__file__).parent / "tuned"
Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a config was found for: a kernel, its dtype, the sizes of the model, and about how much work."""

    kernel: str
    dtype: str
    shape: str
    size: int

    def __str__(self) -> str:
        return f"{self.kernel}|{self.dtype}|{self.shape}|{self.size}"

    @classmethod
    def parse(cls, text: str) -> Bucket:
        kernel, dtype, shape, size = text.split("|")
        return cls(kernel, dtype, shape, int(size))

    def like(self, other: Bucket) -> bool:
        """Whether they differ in the amount of work at most."""
        return (self.kernel, self.dtype, self.shape) == (other.kernel, other.dtype, other.shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """A config, how long it took, and the fingerprint of the kernel it was found for."""

    config: Mapping[str, int | str]
    us: float
    source: str


Entries = dict[Bucket, Entry]


class Store:
    """The entries of one device: its shipped file first, then the one that tuning on this machine writes."""

    def __init__(self, device: str, folder: Path | None = None, shipped: Path = SHIPPED) -> None:
        name = f"{slug(device)}.json"
        self.device = device
        self.shipped = shipped / name
        self.path = (folder or default_folder()) / name
        # What was found on this very machine is nearer to the truth than what was shipped.
        self._entries: Entries = {**read(self.shipped), **read(self.path)}
        self._recorded: Entries = {}
        """By this process: written again each time, in case another's write took no notice of it."""
        self._warned = False

    def best(self, kind: Callable[..., Config], bucket: Bucket, source: str) -> Config | None:
        """The config of the bucket that is nearest in the amount of work, as `kind`; None if there is none."""
        fresh = [near for near in self._entries if near.like(bucket) and self._entries[near].source == source]
        if not fresh:
            self._warn_if_stale(bucket)
            return None
        nearest = min(fresh, key=lambda near: (abs(log2(near.size / bucket.size)), -near.size))
        try:
            return kind(**self._entries[nearest].config)
        except (TypeError, ValueError) as error:
            _warn(f"kernels.autotune: {nearest}: not a config ({error}); a default serves")
            return None

    def record(self, bucket: Bucket, config: Any, us: float, source: str) -> None:
        """Keep a config, here and on disk; of entries for one bucket the last written stays."""
        entry = Entry(asdict(config), us, source)
        self._entries[bucket] = self._recorded[bucket] = entry
        try:
            merge(self.path, self.device, self._recorded)
        except OSError as error:
            _warn(f"{self.path}: not written ({error.strerror}); what was tuned is lost when this process ends")

    def _warn_if_stale(self, bucket: Bucket) -> None:
        if not self._warned and any(near.like(bucket) for near in self._entries):
            self._warned = True
            _warn(f"kernels.autotune: {bucket}: tuned for another version of the kernel, not used; tune again")


def tune(
    store: Store,
    bucket: Bucket,
    candidates: Sequence[Config],
    measure: Callable[[Config], float],
    source: str,
    failed: Callable[[Config, Exception], None] = lambda config, error: None,
) -> Config | None:
    """The fastest of `candidates` by `measure` (in us), kept in the store; those that raise are told to `failed`.

    None if all raised. While a graph is captured nothing can be timed: that is an error of the caller.
    """
    if capturing():
        raise RuntimeError(f"{bucket}: tuning inside a graph capture; tune before, or run with a default")
    timed: list[tuple[float, int]] = []
    for index, config in enumerate(candidates):
        try:
            timed.append((measure(config), index))
        except Exception as error:  # noqa: BLE001 - a config that does not compile or fit is no reason to stop
            failed(config, error)
    if not timed:
        return None
    us, index = min(timed)
    store.record(bucket, candidates[index], us, source)
    return candidates[index]


def capturing() -> bool:
    """Whether the current stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# --- files


def read(path: Path) -> Entries:
    """The entries of a file; none, with a warning, if it is not what `merge` writes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(f"{path}: not readable ({error}); ignored")
        return {}
    try:
        if content["version"] != VERSION:
            _warn(f"{path}: of version {content['version']}, not {VERSION}; ignored")
            return {}
        return {Bucket.parse(key): _entry(value) for key, value in content["entries"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _warn(f"{path}: not a file of tuned configs ({error!r}); ignored")
        return {}


def _entry(value: Any) -> Entry:
    config = {str(name): _plain_value(part) for name, part in value["config"].items()}
    return Entry(config, float(value["us"]), str(value["source"]))


def _plain_value(part: Any) -> int | str:
    if not isinstance(part, int | str):
        raise TypeError(f"{part!r} is neither a number nor a word")
    return part


def merge(path: Path, device: str, entries: Entries) -> None:
    """Add entries to a file that other processes may write at the same time.

    Without a lock: a file is replaced as a whole, so readers never see half of one, and what others have written is
    read just before. Of two that do so within the same millisecond the later wins, and the other's entries are lost
    until it writes again: a default serves in their place, no more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**_quietly(path), **entries}
    _replace(path, {"version": VERSION, "device": device, "entries": _plain(merged)})


def _quietly(path: Path) -> Entries:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read(path)


def _plain(entries: Entries) -> dict[str, Any]:
    ordered = sorted(entries, key=lambda bucket: (bucket.kernel, bucket.dtype, bucket.shape, bucket.size))
    return {str(bucket): {**asdict(entries[bucket]), "us": round(entries[bucket].us, 2)} for bucket in ordered}


def _replace(path: Path, content: Any) -> None:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    Path(file.name).replace(path)


def default_folder() -> Path:
    """Where what is tuned on this machine is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "serving-playground" / "kernels"


def slug(device: str) -> str:
    """A device's name as a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


# --- fingerprints


@cache
def fingerprint(path: Path) -> str:
    """Of the Triton kernels in a source file: it changes with their code, not with comments, docstrings or layout."""
    source = path.read_text(encoding="utf-8")
    kernels = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and _is_kernel(node)]
    segments = (ast.get_source_segment(source, node) or "" for node in sorted(kernels, key=lambda node: node.lineno))
    return sha256("\n".join(" ".join(_words(segment)) for segment in segments).encode()).hexdigest()[:12]


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _words(source: str) -> Iterable[str]:
    """Tokens that mean something: the interpreter's version does not change them, as it does the syntax tree."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    starts = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in layout:
            starts = starts or token.type == tokenize.NEWLINE
            continue
        if not (starts and token.type == tokenize.STRING):
            yield token.string
        starts = False
