"""`python -m analysis`: what run folders and studies say. Each command has a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from analysis import compare, lint, perfetto
from analysis.blame import command as blame
from analysis.fidelity import command as fidelity
from analysis.report import command as report
from analysis.waiting import waiting

COMMANDS = (blame, compare, fidelity, lint, perfetto, report)


def main(words: Sequence[str] | None = None) -> int:
    """0: done. 2: something to mend, in one line. `words`: of the command line, by default this process's."""
    parser = argparse.ArgumentParser(prog="python -m analysis", description="What run folders and studies say.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    given = parser.parse_args(words)
    try:
        with waiting(f"{given.command}: reading"):
            return int(given.do(given))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
