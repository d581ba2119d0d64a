"""Operations from the command line.

`python -m kernels list`: which implementation of each operation would run here, and why the others would not.
`python -m kernels tune`: finds the fastest configs for a model's sizes on this GPU and keeps them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch

from kernels.autotune import Store, default_folder
from kernels.registry import IMPLEMENTATIONS, Need, survey


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_list(commands.add_parser("list", help="implementations of every operation and what becomes of them"))
    _add_tune(commands.add_parser("tune", help="find the fastest configs for a model on this GPU (some minutes)"))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default=None, help="float32, float16 or bfloat16")
    for name in ("heads", "kv-heads", "head-dim", "hidden", "experts"):
        parser.add_argument(f"--{name}", type=_size, default=None)
    parser.add_argument("choices", nargs="*", metavar="kernels.OP=NAME", help="choices to try")
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> None:
    rows = list(survey(options.device, _choices(options.choices), _need(options)))
    print(f"on {_place(options.device)}:")
    print("\n".join(f"{op:14s} {name:10s} {verdict}" for op, name, verdict in rows))


def _place(device: str) -> str:
    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        return f"{device} (there is none here, so a run would refuse)"
    return f"{device} ({torch.cuda.get_device_name()})"


def _add_tune(parser: argparse.ArgumentParser) -> None:
    for name in ("heads", "kv-heads", "head-dim", "hidden", "intermediate", "vocabulary"):
        parser.add_argument(f"--{name}", type=_size, required=True)
    for name, meaning in (
        ("experts", "of a layer"),
        ("active", "of a token"),
        ("expert-intermediate", "width of each"),
    ):
        parser.add_argument(f"--{name}", type=_size, default=None, help=f"experts, {meaning}; give all three or none")
    parser.add_argument("--dtype", default="bfloat16", help="float32, float16 or bfloat16")
    parser.add_argument("--block-size", type=_size, default=16)
    parser.add_argument("--folder", type=Path, default=None, help="default: the user's cache")
    parser.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> None:
    if (reason := IMPLEMENTATIONS["attention"]["triton"].objection("cuda")) is not None:
        raise ValueError(f"tune: {reason}; tuning needs a GPU and Triton")
    folder = options.folder or default_folder()
    _check_writable(folder)
    from kernels.triton import tuning

    names = ("heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocabulary", "block_size")
    mixture = _mixture(options)
    experts = None if mixture is None else tuning.Mixture(*mixture)
    stated = {name: getattr(options, name) for name in names}
    sizes = tuning.Sizes(dtype=_dtype(options.dtype), experts=experts, **stated)
    store = Store(torch.cuda.get_device_name(), folder)
    tuning.tune_all(store, sizes, partial(print, flush=True))
    print(f"kept in {store.path}")


def _mixture(options: argparse.Namespace) -> tuple[int, int, int] | None:
    """(count, active, width) of the experts."""
    parts = (options.experts, options.active, options.expert_intermediate)
    if None not in parts:
        return parts
    if any(part is not None for part in parts):
        raise ValueError("tune: give --experts, --active and --expert-intermediate together, or none of them")
    return None


def _check_writable(folder: Path) -> None:
    """Before minutes are spent on what could not be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"tune: {folder}: {error.strerror}; give a --folder that you may write to") from error


def _choices(given: Sequence[str]) -> dict[str, str]:
    choices = {}
    for choice in given:
        key, equals, name = choice.partition("=")
        op = key.removeprefix("kernels.")
        if not equals or op not in IMPLEMENTATIONS:
            raise ValueError(f"{choice}: not kernels.OP=NAME with OP one of {', '.join(IMPLEMENTATIONS)}")
        if op in choices:
            raise ValueError(f"{choice}: kernels.{op} is chosen twice")
        choices[op] = name
    return choices


def _need(options: argparse.Namespace) -> Need:
    dtype = None if options.dtype is None else _dtype(options.dtype)
    return Need(dtype, options.heads, options.kv_heads, options.head_dim, options.hidden, options.experts)


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype={name}: torch has no such dtype")
    return dtype


if __name__ == "__main__":
    sys.exit(main())
