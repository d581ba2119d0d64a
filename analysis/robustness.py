"""Does a ranking of policies survive the errors of the simulation that it came from?

Reads numbers: a metric of every policy under every perturbation. It does not know how they were made. The statement is
"the conclusion holds up to ±x %": at no error of at most x, of any kind and sign that was tried, is another policy the
best, or (the whole ranking) are two policies that differed exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Scores = Mapping[str, float]
"""The metric of each policy; the lower the better."""

TIE = 0.01
"""Policies that lie closer than this share of the better one are not told apart."""


@dataclass(frozen=True, slots=True)
class Trial:
    """All policies under one error: of which `kind` (step times, predictions, staleness, ...), how `large` (0.1: 10 %,
    whatever its sign), and what exactly it was."""

    kind: str
    size: float
    what: str
    scores: Scores


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one kind of error: up to which size the conclusion holds, and what the first size to break it did.

    `holds_up_to` is the largest size tried below the first that breaks; `broken_by` None: nothing tried did.
    """

    kind: str
    holds_up_to: float
    broken_by: str | None
    tau: float
    """The least Kendall rank correlation with the undisturbed ranking."""
    regret: float
    """The most that the undisturbed winner loses to the best under an error: 0.1 is 10 % worse."""


def ranking(scores: Scores) -> tuple[str, ...]:
    """Best first; ties by name."""
    return tuple(sorted(scores, key=lambda name: (scores[name], name)))


def kendall(one: Scores, other: Scores, tie: float = TIE) -> float:
    """Rank correlation over the pairs that `one` tells apart: 1 all in the same order, -1 all reversed.

    A pair that `other` does not tell apart counts 0; 1 where `one` tells none apart.
    """
    signs = [_order(one, a, b, tie) * _order(other, a, b, tie) for a, b in _told_apart(one, tie)]
    return sum(signs) / len(signs) if signs else 1.0


def winner_survives(baseline: Scores, scores: Scores, tie: float = TIE) -> bool:
    """Whether no policy is better than the undisturbed best, by more than a tie."""
    best = ranking(baseline)[0]
    return all(_order(scores, best, other, tie) <= 0 for other in scores)


def ranking_survives(baseline: Scores, scores: Scores, tie: float = TIE) -> bool:
    """Whether no two policies that differed have changed places."""
    return all(_order(baseline, a, b, tie) * _order(scores, a, b, tie) >= 0 for a, b in _told_apart(baseline, tie))


def regret(baseline: Scores, scores: Scores) -> float:
    """How much worse than the best the undisturbed winner is: 0.1 is 10 %."""
    best = min(scores.values())
    return scores[ranking(baseline)[0]] / best - 1 if best else 0.0


def findings(baseline: Scores, trials: Iterable[Trial], whole: bool = False) -> list[Finding]:
    """One for each kind of error, in order of first appearance. `whole`: of the whole ranking, else of the winner."""
    survives = ranking_survives if whole else winner_survives
    kinds: dict[str, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(trial.kind, []).append(trial)
    return [_finding(kind, baseline, tried, survives) for kind, tried in kinds.items()]


def _finding(
    kind: str, baseline: Scores, tried: Sequence[Trial], survives: Callable[[Scores, Scores], bool]
) -> Finding:
    ordered = sorted(tried, key=lambda trial: trial.size)
    broken = next((trial for trial in ordered if not survives(baseline, trial.scores)), None)
    held = [trial.size for trial in ordered if broken is None or trial.size < broken.size]
    return Finding(
        kind,
        max(held, default=0.0),
        broken.what if broken else None,
        min(kendall(baseline, trial.scores) for trial in ordered),
        max(regret(baseline, trial.scores) for trial in ordered),
    )


def _told_apart(scores: Scores, tie: float) -> list[tuple[str, str]]:
    return [(a, b) for a, b in combinations(sorted(scores), 2) if _order(scores, a, b, tie)]


def _order(scores: Scores, a: str, b: str, tie: float) -> int:
    """-1 where a is better, 1 where b is, 0 in a tie."""
    better, worse = sorted((scores[a], scores[b]))
    if worse - better <= tie * better:
        return 0
    return -1 if scores[a] < scores[b] else 1
