"""One policy under examination in a process of its own, with one module's source exchanged: JSON in, JSON out."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

SECONDS = 120
"""Of CPU time. An examination takes a tenth of that."""


class Exchanged(MetaPathFinder, Loader):
    """Finds one module, with this source."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        # Under the file's own name, which the kit goes by: what the pool of blocks raises is about blocks.
        exec(compile(self.source, f"{self.module.replace('.', '/')}.py", "exec"), vars(module))


def main() -> None:
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    sys.meta_path.insert(0, Exchanged(asked["module"], asked["source"]))
    json.dump(_examined(asked["words"], asked["each"], asked["seed"]), sys.stdout)


def _examined(words: Sequence[str], each: int, seed: int) -> dict[str, Any]:
    """What fails, and a digest of every decision. `dead`: the policy cannot even be made, or will have no case."""
    from experiments.conformance import factory
    from playground.check.examination import examine
    from playground.check.serving import Refused

    try:
        make = factory(words)
        report = examine(make, each, seed, patience=0)
    except Refused as error:
        return {"dead": f"refused: {error}"}
    except Exception as error:  # noqa: BLE001  (whatever the change made of it)
        return {"dead": f"{type(error).__name__}: {error}"}
    failed = {verdict.property.name: verdict.problem for verdict in report.failed}
    return {"failed": failed, "refused": sorted(report.refused), "digest": _digest(make, each, seed)}


def _digest(make: Any, each: int, seed: int) -> str:
    """Of all that was decided in all cases."""
    from playground.check.adversaries import FAMILIES, cases
    from playground.check.serving import Refused, attend

    whole = sha256()
    for family in FAMILIES:
        for case in cases(family, each, seed):
            try:
                outcome = attend(case, make)
            except Refused:
                continue
            decided = [(s.planned, s.columns, s.copies, s.dummies, s.repeat, s.move) for s in outcome.steps]
            whole.update(repr((decided, outcome.events)).encode())
    return whole.hexdigest()[:16]


if __name__ == "__main__":
    main()
