"""`python -m experiments run CARD` and `python -m experiments cards`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments.cards import gllm_sc25
from experiments.cards.card import NOT, PARTLY, REPRODUCED, SEEDS, UNTESTABLE, Card, Finding, Results, results
from experiments.cards.page import markdown, page
from experiments.conformance import shown
from experiments.errors import carried_out
from experiments.settings import SettingError
from experiments.trials import Trials

CARDS: dict[str, Card] = {card.name: card for card in (gllm_sc25.CARD,)}
HELP = """\
A paper's claims, checked by runs: each is reproduced, partly, not, or not testable here, with the figure that was
measured over several seeds (paired: all policies serve the same requests) and its 95 % interval, and the same claim
against the baseline at its own best setting.

  python -m experiments cards                       which there are
  python -m experiments run gllm_sc25 -o card       minutes; goes on after a stop
  python -m experiments run gllm_sc25 --small       seconds, on a tiny model: shows the way, and no more
  python -m experiments run gllm_sc25 device=h100   with other settings for all runs
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="check a paper's claims (a card)",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("card", help="its name: see `python -m experiments cards`")
    add("words", nargs="*", metavar="KEY=VALUE", help="for every run")
    add("--small", action="store_true", help="in seconds, on a tiny model")
    add("--seeds", type=int, default=SEEDS, help=f"seeds 0 to N-1 ({SEEDS})")
    add("--workers", type=int, help="runs at a time (one a core)")
    add("-o", "--out", type=Path, metavar="FOLDER", help="for figures, data and page (runs/cards/CARD)")
    parser.set_defaults(obey=_obey, do_card=_run)
    listing = commands.add_parser("cards", help="the papers whose claims can be checked")
    listing.set_defaults(obey=_obey, do_card=_list)


def _obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done, whatever the verdicts. 2: something to mend. 130: interrupted."""
    return carried_out(lambda: given.do_card(given, more))


def _list(given: argparse.Namespace, more: Sequence[str]) -> int:
    for card in CARDS.values():
        print(f"{card.name:14} {card.title}; {len(card.claims)} claims\n{'':14} {card.source}")
    return 0


def _run(given: argparse.Namespace, more: Sequence[str]) -> int:
    card = CARDS.get(given.card)
    if card is None:
        raise SettingError(f"{given.card}: no such card; there are: {', '.join(CARDS)}")
    if given.seeds < 1:
        raise SettingError(f"--seeds {given.seeds} must be at least 1")
    words = (*given.words, *more)
    if wrong := [word for word in words if "=" not in word]:
        raise SettingError(f"{wrong[0]}: no KEY=VALUE")
    out: Path = given.out or Path("runs") / "cards" / (f"{card.name}-small" if given.small else card.name)
    trials = Trials(out, given.workers)
    with shown(card.name) as progress:
        found = results(
            card, trials, given.small, range(given.seeds), words, lambda done, total: progress(done, total, "runs")
        )
    findings = [claim.judge(found) for claim in card.claims]
    provenance.write(out / "card.json", _data(card, found, findings, given, words))
    (out / "card.md").write_text(markdown(card, findings, given.small, given.seeds), encoding="utf-8")
    (out / "card.html").write_text(page(card, found, findings, given.small), encoding="utf-8")
    print(told(card, findings))
    print(f"\n{len(trials)} runs. Page: {out / 'card.html'}")
    return 0


def told(card: Card, findings: Sequence[Finding]) -> str:
    """For a terminal."""
    lines = [card.title, card.source, ""]
    for claim, finding in zip(card.claims, findings, strict=True):
        lines.append(f"{finding.verdict:17} {claim.name} (said: {claim.said})")
        lines.append(f"{'':17} {finding.figure}")
        if finding.robust:
            lines.append(f"{'':17} {finding.robust}")
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (REPRODUCED, PARTLY, NOT, UNTESTABLE))
    return "\n".join([*lines, "", summary])


def _data(
    card: Card, found: Results, findings: Sequence[Finding], given: argparse.Namespace, words: Sequence[str]
) -> dict[str, Any]:
    loads = {**card.loads, **card.small_loads} if given.small else card.loads
    keys = (
        "mean_ttft_ms",
        "p90_ttft_ms",
        "mean_tpot_ms",
        "mean_e2el_ms",
        "output_throughput",
        "bubble_ratio",
        "preemptions",
    )
    return {
        "card": card.name,
        "source": card.source,
        "small": given.small,
        "seeds": given.seeds,
        "overrides": list(words),
        "claims": [
            {"claim": claim.name, "said": claim.said, **asdict(finding)}
            for claim, finding in zip(card.claims, findings, strict=True)
        ],
        "arms": {load: {arm: {key: found.mean(arm, load, key) for key in keys} for arm in card.arms} for load in loads},
        **provenance.facts(),
    }
