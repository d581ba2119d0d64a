"""Parts of a benchmark, as they are named on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def some_of(parts: Collection[str]) -> Callable[[str], list[str]]:
    """Reads `a,b`; one that is not among them is told with all that are."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in parts]:
            raise argparse.ArgumentTypeError(f"no part {unknown[0]}: choose from {', '.join(parts)}")
        return names

    return chosen
