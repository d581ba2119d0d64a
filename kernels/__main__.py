"""`python -m kernels list`: which implementation of each operation would run here, and why the others would not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from kernels.registry import IMPLEMENTATIONS, Need, survey


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="implementations of every operation and what becomes of them")
    listing.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    listing.add_argument("--dtype", default=None, help="float32, float16 or bfloat16")
    for name in ("heads", "kv-heads", "head-dim", "hidden"):
        listing.add_argument(f"--{name}", type=int, default=None)
    listing.add_argument("choices", nargs="*", metavar="kernels.OP=NAME", help="choices to try")
    options = parser.parse_args(arguments)
    try:
        rows = list(survey(options.device, _choices(options.choices), _need(options)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"on {options.device}:")
    print("\n".join(f"{op:14s} {name:10s} {verdict}" for op, name, verdict in rows))
    return 0


def _choices(given: Sequence[str]) -> dict[str, str]:
    choices = {}
    for choice in given:
        key, equals, name = choice.partition("=")
        op = key.removeprefix("kernels.")
        if not equals or op not in IMPLEMENTATIONS:
            raise ValueError(f"{choice}: not kernels.OP=NAME with OP one of {', '.join(IMPLEMENTATIONS)}")
        choices[op] = name
    return choices


def _need(options: argparse.Namespace) -> Need:
    dtype = None if options.dtype is None else getattr(torch, options.dtype, None)
    if options.dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype={options.dtype}: torch has no such dtype")
    return Need(dtype, options.heads, options.kv_heads, options.head_dim, options.hidden)


if __name__ == "__main__":
    sys.exit(main())
