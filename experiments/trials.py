"""Runs that a program wants the figures of: several at a time, each once, kept in a file so that a stop loses little.

A trial is its overrides. What is kept of it are its summary and whether its queue grew; its trace is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from analysis import lint
from experiments import run
from experiments.composing import composed
from experiments.errors import tell
from experiments.settings import SettingError
from experiments.workers import Ended, Line, Pool, Told, cores, method

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experiments.progress import Meter

Overrides = tuple[str, ...]
Progress = Callable[[int, int], None]
"""Told (trials done, trials in all) of a batch."""
FILE = "trials.jsonl"


@dataclass(frozen=True, slots=True)
class Trial:
    """`grows`: its queue did (`analysis.lint`, saturated). `problem`: why there are no figures."""

    overrides: Overrides
    summary: dict[str, Any]
    grows: bool
    problem: str = ""


class Trials:
    """Made in this folder before or now; equal overrides are one trial."""

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.folder = folder
        self.workers = workers or cores()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / FILE
        self._known = {trial.overrides: trial for trial in _read(self._file)}

    def __len__(self) -> int:
        return len(self._known)

    def run(self, wanted: Sequence[Overrides], progress: Progress = lambda done, total: None) -> list[Trial]:
        """In the order of `wanted`. One that fails has its `problem`; overrides that do not compose are an error."""
        new = [one for one in dict.fromkeys(wanted) if one not in self._known]
        if new:
            self._make(new, progress)
        return [self._known[one] for one in wanted]

    def _make(self, new: Sequence[Overrides], progress: Progress) -> None:
        pool = Pool(partial(_measure, tuple(new)), self.workers, method())
        done = 0
        with self._file.open("a", encoding="utf-8") as file, closing(pool.run(range(len(new)))) as events:
            for event in events:
                if isinstance(event, Told):
                    trial = Trial(**event.word)
                    self._known[trial.overrides] = trial
                    file.write(_line(trial))
                    file.flush()
                elif isinstance(event, Ended):
                    done += 1
                    progress(done, len(new))
                    if event.died and new[event.number] not in self._known:
                        raise SettingError(f"{' '.join(new[event.number])}: {event.died}")


def _line(trial: Trial) -> str:
    fields = {"overrides": trial.overrides, "summary": trial.summary, "grows": trial.grows, "problem": trial.problem}
    return json.dumps(fields) + "\n"


def _read(file: Path) -> Iterator[Trial]:
    """The whole lines of a file; a killed program's last one may be cut off."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            kept = json.loads(line)
        except ValueError:
            continue
        yield Trial(tuple(kept["overrides"]), kept["summary"], kept["grows"], kept["problem"])


def _measure(all_of_them: Sequence[Overrides], number: int, line: Line) -> None:
    """In a process of its own."""
    overrides = all_of_them[number]
    try:
        line.tell(_figures(overrides))
    except Exception as error:  # noqa: BLE001
        line.tell({"overrides": overrides, "summary": {}, "grows": False, "problem": str(tell(error))})


def _figures(overrides: Overrides) -> dict[str, Any]:
    config = composed(list(overrides))
    with TemporaryDirectory() as place:
        config.run_dir = str(Path(place) / "run")
        config.plots = False
        summary = run.execute(config, "", _silent)
        findings = lint.lint(lint.read(Path(config.run_dir)))
    grows = any(finding.code == "saturated" for finding in findings)
    return {"overrides": overrides, "summary": summary, "grows": grows}


class _Silence:
    def update(self, done: int, total: int | None, now: float) -> None: ...


@contextmanager
def _silent(_title: str) -> Iterator[Meter]:
    yield _Silence()
