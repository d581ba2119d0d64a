"""Replay what others measured and say how far off the predictions are.

python -m experiments.groundtruth                                    every source, both splits; records the results
python -m experiments.groundtruth --source vllm019 --split test      some of them
python -m experiments.groundtruth --fit                              fit the unknowns anew first, on `fit` rows only
python -m experiments.groundtruth --tables                           only rewrite docs/groundtruth.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments.groundtruth import results, tables
from experiments.groundtruth.calibration import Calibration
from experiments.groundtruth.case import Metrics
from experiments.groundtruth.costs import COSTS
from experiments.groundtruth.fitting import Ask, fit
from experiments.groundtruth.pool import Pool
from experiments.groundtruth.replay import Question, Row, ask, replay
from experiments.groundtruth.sources import SOURCES

SPLITS = ("fit", "test")
FITTED = "roofline"
"""No profile is of what rows marked `fit` ran on."""


def main() -> None:
    """Print errors by group, write the results and the page's tables."""
    wanted = _parser().parse_args()
    if not wanted.tables:
        with Pool(wanted.workers) as pool:
            if wanted.fit:
                results.write_unknowns({FITTED: _fit(pool)})
            rows = [row for source in wanted.source for row in _record(source, wanted.split, wanted.cost, pool)]
        print(tables.overview(rows))
        print()
        print(tables.targets([row for row in rows if row.split == "test"]))
    tables.write()


def _record(source: str, splits: Sequence[str], costs: Sequence[str], pool: Pool) -> list[Row]:
    one, fits = SOURCES[source], results.read_unknowns()
    rows = replay([case for case in one.cases() if case.split in splits], costs, fits, pool)
    for split in splits:
        if mine := [row for row in rows if row.split == split]:
            results.write(mine, one.skipped(), source, split)
    return rows


def _fit(pool: Pool) -> Calibration:
    def predict(asks: Sequence[Ask]) -> list[Metrics]:
        questions = [Question(case.trial, FITTED, unknowns) for case, unknowns in asks]
        return [told for told in ask("fitting", questions, pool) if told is not None]

    return fit([case for source in SOURCES.values() for case in source.cases()], predict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.groundtruth",
        description="Replay what others measured and say how far off the predictions are.",
    )
    parser.add_argument("--source", nargs="+", choices=[*SOURCES], default=[*SOURCES], help="all by default")
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=SPLITS, help="both by default")
    parser.add_argument("--cost", nargs="+", choices=[*COSTS], default=[*COSTS], help="cost models; all by default")
    parser.add_argument("--fit", action="store_true", help="fit the unknowns anew, on rows marked fit")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables of docs/groundtruth.md")
    parser.add_argument("--workers", type=int, default=None, help="processes; one a core by default, 0: none")
    return parser


if __name__ == "__main__":
    main()
