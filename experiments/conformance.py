"""What the conformance kit (`playground.check`) takes from the rest: policies by their configuration, a table, the
CPU engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from random import Random
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import launcher, overrides, plugins, settings
from experiments.build import make
from experiments.settings import SettingError
from playground.check.case import Make
from playground.check.examination import Progress
from playground.check.page import Line
from playground.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE, LINE_EVERY = 2.0, 5.0
"""Seconds until somebody is told how far it is, and between two lines of it."""
STYLES = {"passed": "green", "failed": "bold red", "not asked": "dim"}


def factory(words: Sequence[str]) -> Make:
    """Makes the policy that these overrides describe: `policy=NAME`, or `policy=my.module:make`, and its options.

    It is made once at once: `SettingError` says in one line what is wrong with it.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's module in the folder that it is called from
    given = [override for word in words for override in _overrides(word)]
    settings.register()
    plugins.register()
    overrides.register()
    launcher.register()
    with initialize_config_module("conf", version_base="1.3"):
        config = overrides.completing(lambda known: compose("config", known), ["run_dir=unused", *given])
    overrides.retarget(config, given)
    described: Any = OmegaConf.to_container(config.policy, resolve=True)
    made = partial(make, "policy", described, Policy)
    made()
    return made


def _overrides(word: str) -> list[str]:
    key, _, value = word.lstrip("+").partition("=")
    if key == "policy" and (":" in value or "." in value):
        _look(word, value.replace(":", "."))
        return [f"policy._target_={value.replace(':', '.')}"]
    if key != "policy" and not key.startswith(("policy.", "policy/")):
        raise SettingError(f"{word}: only a policy is examined: policy=NAME, policy.PART.OPTION=..., policy/PART=...")
    return [word]


def _look(word: str, path: str) -> None:
    """A name that its module lacks is told with those it has; whatever else is wrong Hydra finds out."""
    place, _, name = path.rpartition(".")
    try:
        module = import_module(place)
    except Exception:  # noqa: BLE001  (a module of the user's may raise anything)
        return
    if hasattr(module, name):
        return
    own = sorted(key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    raise SettingError(f"{word}: {place} ({module.__file__}) has no {name}; it has {', '.join(own) or 'nothing'}")


def told(lines: Sequence[Line]) -> Table:
    """The verdicts, for a terminal."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("property", "", "worst", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "property")
    for line in lines:
        failed = line.status == "failed"
        table.add_row(
            line.name,
            f"[{STYLES[line.status]}]{line.status}[/]",
            _plain(line.value),
            _plain(line.told if failed else f"{line.meaning} {line.told}"),
        )
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


@contextmanager
def shown(title: str) -> Iterator[Progress]:
    """Says how far the examination is, on standard error, when it takes longer than a moment."""
    due = monotonic() + PATIENCE

    def tell(done: int, total: int, doing: str) -> None:
        nonlocal due
        if (clock := monotonic()) >= due:
            due = clock + LINE_EVERY
            print(f"{title}: {done} of {total} cases ({doing})", file=sys.stderr, flush=True)

    yield tell


clock = perf_counter


def same_tokens(make_policy: Make, model: str) -> str:
    """Greedy tokens on the CPU engine, against those of another policy with memory for all; what differs, or nothing.

    Memory is for a third of the prompts at a time, steps have 64 tokens, and half of the prompts share a beginning.
    """
    from experiments.llm import LLM, SamplingParams  # torch: only if asked for

    rng = Random(0)
    shared = [rng.randint(1, 200) for _ in range(20)]
    prompts = [
        (shared if number % 2 else []) + [rng.randint(1, 200) for _ in range(rng.randint(4, 24))]
        for number in range(12)
    ]
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def answers(policy: Policy | None, **sizes: int) -> list[tuple[int, ...]]:
        with LLM(model, policy=policy, **sizes) as llm:  # type: ignore[arg-type]
            return [tuple(answer.token_ids) for answer in llm.generate(prompts, params)]

    expectation = answers(None, kv_blocks=200)
    try:
        found = answers(make_policy(), kv_blocks=14, max_tokens_per_step=64)
    except Exception as error:  # noqa: BLE001  (a policy under examination may raise anything)
        return f"the engine had to stop: {type(error).__name__}: {error}"
    for number, (expected, got) in enumerate(zip(expectation, found, strict=True)):
        if expected != got:
            return f"prompt {number}: tokens {list(got)} where {list(expected)} are the model's"
    return ""
