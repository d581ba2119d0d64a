"""The fastest known config of each kernel on each device: shipped with the package, or found here and kept on disk.

A config changes speed, never results, so nothing here may stop a run: what is missing, stale or damaged is ignored,
with one warning a file, and a default serves. It knows no kernel; `kernels.triton.tuning` knows what to try.
"""

from __future__ import annotations

import ast
import fcntl
import io
import json
import os
import re
import tempfile
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from math import log2
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import torch

VERSION = 1
"""Of the files: others are not read."""

SHIPPED = Path(__file__).parent / "tuned"

TRIES, PAUSE = 200, 0.01
"""How often and after how many seconds a writer looks whether the others have done."""

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a config was found for: a kernel, its dtype, the sizes of the model, and about how much work."""

    kernel: str
    dtype: str
    shape: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: must be at least 1")

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
    """The entries of one device: those that tuning on this machine wrote, and those that were shipped."""

    def __init__(self, device: str, folder: Path | None = None, shipped: Path = SHIPPED) -> None:
        name = f"{slug(device)}.json"
        self.device = device
        self.shipped = shipped / name
        self.path = (folder or default_folder()) / name
        self._shipped, self._own = read(self.shipped), read(self.path)
        self._recorded: Entries = {}
        """By this process: written again each time, in case the file was replaced or removed."""
        self._warned = False

    def best(self, kind: Callable[..., Config], bucket: Bucket, source: str) -> Config | None:
        """The config of the bucket that is nearest in the amount of work, as `kind`; None if there is none."""
        # Of equals the first stays first: what was found on this very machine is nearer to the truth.
        known = [found for entries in (self._own, self._shipped) for found in entries.items() if found[0].like(bucket)]
        fresh = [found for found in known if found[1].source == source]
        if known and not fresh:
            self._warn_of_stale(bucket)
        for near, entry in sorted(fresh, key=lambda found: _distance(found[0], bucket)):
            try:
                return kind(**entry.config)
            except (TypeError, ValueError) as error:
                _warn(f"kernels.autotune: {near}: not a config ({error}); ignored")
        return None

    def record(self, bucket: Bucket, config: Any, us: float, source: str) -> None:
        """Keep a config, here and on disk; of entries for one bucket the last written stays."""
        entry = Entry(asdict(config), us, source)
        self._own[bucket] = self._recorded[bucket] = entry
        try:
            merge(self.path, self.device, self._recorded)
        except OSError as error:
            _warn(f"{self.path}: not written ({error.strerror}); what was tuned is lost when this process ends")

    def _warn_of_stale(self, bucket: Bucket) -> None:
        if not self._warned:
            self._warned = True
            _warn(f"kernels.autotune: {bucket}: tuned for another version of the kernel, not used; tune again")


def _distance(near: Bucket, wanted: Bucket) -> tuple[float, int]:
    return abs(log2(near.size) - log2(wanted.size)), -near.size


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
    """The entries of a file but those, with a warning, that are not what `merge` writes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _warn(f"{path}: not readable ({error}); ignored")
        return {}
    try:
        if content["version"] != VERSION:
            _warn(f"{path}: of version {content['version']}, not {VERSION}; ignored")
            return {}
        found = list(content["entries"].items())
    except (KeyError, TypeError, AttributeError) as error:
        _warn(f"{path}: not a file of tuned configs ({error!r}); ignored")
        return {}
    return _sound(path, found)


def _sound(path: Path, found: Sequence[tuple[str, Any]]) -> Entries:
    """The entries that are."""
    entries, problems = {}, []
    for key, value in found:
        try:
            entries[Bucket.parse(key)] = _entry(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{key}: {error!r}")
    if problems:
        _warn(f"{path}: {len(problems)} of {len(found)} entries are no tuned configs ({problems[0]}); ignored")
    return entries


def _entry(value: Any) -> Entry:
    config = {str(name): _plain_value(part) for name, part in value["config"].items()}
    return Entry(config, float(value["us"]), str(value["source"]))


def _plain_value(part: Any) -> int | str:
    if not isinstance(part, int | str):
        raise TypeError(f"{part!r} is neither a number nor a word")
    return part


def merge(path: Path, device: str, entries: Entries) -> None:
    """Add entries to a file that other processes may write at the same time.

    The file is replaced as a whole, so readers, who ask nobody, never see half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        merged = {**_quietly(path), **entries}
        _replace(path, {"version": VERSION, "device": device, "entries": _plain(merged)})


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process writes the file; without that certainty after a while, or where locks are not to be had.

    Two that write at once then cost one of them its entries, and a default serves: less than a run that waits for ever.
    """
    with path.with_name(f".{path.name}.lock").open("w") as lock:  # freed when closed, also by the end of a process
        for _ in range(TRIES):
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            sleep(PAUSE)
        yield


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
        try:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


def default_folder() -> Path:
    """Where what is tuned on this machine is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "serving-playground" / "kernels"


def _home() -> Path:
    """A container's user may have none."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"home-of-{os.getuid()}"


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
