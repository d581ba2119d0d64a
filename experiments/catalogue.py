"""docs/policies.md, made from what the code says of itself: `python -m experiments.catalogue`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "policies.md"
GROUP = ROOT / "conf" / "policy"
QUESTIONS = {
    "budget": "What is a step made of?",
    "order": "Who is next among the waiting?",
    "order/predictor": "(Orders by length) How many tokens will an answer have?",
    "admission": "May it start now?",
    "victims": "Who gives way when memory is short, and how?",
    "route": "Which replica serves a new request?",
    "align": "(DP attention) May ranks in lockstep start prompts now?",
    "overlap": "What runs at the same time?",
    "placement": "Which stage holds which layers?",
}
HEAD = """# Policies

Made from the docstrings by `python -m experiments.catalogue`: edit those.

A policy is a composition of choices; each is an option of its own: `policy=chunked_prefill policy/victims=largest
policy.budget.tokens=512`. The rule that joins them is `policies.composed.Composed`. Tokens and seconds are bare, KV is
counted in blocks.

| `policy=` | budget | admission | |
|---|---|---|---|
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page, Markdown."""
    compositions = "\n".join(_composition(file) for file in sorted(GROUP.glob("*.yaml")))
    choices = "\n".join(_choice(name, question) for name, question in QUESTIONS.items())
    return f"{HEAD}{compositions}\n\n{choices}"


def _composition(file: Path) -> str:
    defaults: dict[str, str] = {}
    for entry in _read(file)["defaults"]:
        defaults |= entry
    return f"| `{file.stem}` | `{defaults['budget']}` | `{defaults['admission']}` | {_title(file)} |"


def _choice(name: str, question: str) -> str:
    options = "\n".join(_option(name, file) for file in sorted((GROUP / name).glob("*.yaml")))
    return f"## {name}: {question[0].lower()}{question[1:]}\n\n{options}"


def _option(group: str, file: Path) -> str:
    config, others = _read(file), {}
    if "_target_" not in config:  # it sets more than a part of the policy
        others = {key: value for key, value in config.items() if key != "policy"}
        config = config["policy"][group]
    part = get_class(config["_target_"])
    heading = f"### `policy/{group}={file.stem}`\n\n{_about(file, part, bool(others))}\n"
    for name, inner in _inner(config).items():
        if inner["_target_"] not in _targets():
            heading += f"\n`{name}`: {cleandoc(get_class(inner['_target_']).__doc__ or '')}\n"
    rows = [*_parameters(group, part, config), *_others(others)]
    if not rows:
        return heading
    return heading + "\n| option | default |\n|---|---|\n" + "\n".join(rows) + "\n"


def _about(file: Path, part: type, more: bool) -> str:
    """What the part says of itself, after what the option says where that is more than the part."""
    text = cleandoc(part.__doc__ or "")
    return f"{_title(file)}.\n\n{text}" if more else text


def _others(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for group, values in groups.items():
        for name, value in values.items():
            yield f"| `{group}.{name}` | `{value}` |"


def _parameters(group: str, part: type, config: Mapping[str, Any]) -> Iterator[str]:
    inner = _inner(config)
    for field in fields(part):
        if not field.init:
            continue
        option = f"policy.{group}.{field.name}".replace("/", ".")
        if field.name in inner:
            given = inner[field.name]
            kind = get_class(given["_target_"])
            yield f"| `{option}` | `{kind.__name__}` |"
            yield from _parameters(f"{group}.{field.name}", kind, given)
        else:
            yield f"| `{option}` | `{config.get(field.name, _default(field))}` |"


def _inner(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parts of a part that its file names."""
    return {name: value for name, value in config.items() if isinstance(value, dict) and "_target_" in value}


@cache
def _targets() -> frozenset[str]:
    """Classes that are options of their own, and are told of there."""
    files = [file for name in QUESTIONS for file in sorted((GROUP / name).glob("*.yaml"))]
    return frozenset(config["_target_"] for config in map(_read, files) if "_target_" in config)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        return "required"
    return getattr(field.default, "value", field.default)


def _read(file: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _title(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if not line.startswith("# @package")).removeprefix("# ")


if __name__ == "__main__":
    main()
