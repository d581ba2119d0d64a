"""Liberties of the command line that Hydra alone does not give.

`policy._target_=mypkg.MyPolicy` exchanges a part for a user's own: the options of the old part go, unless the new one
takes them or the user set them. `logger.mode=online` sets what the part takes though its YAML does not list it: a
default stands in one place, the part's own signature, and a typo is refused still. `engine.cuda_graphs=false` and
`kernels.attention=triton` find the engine, wherever the backend keeps it. Flags may come last, and what a shell has
quoted needs no quotes of Hydra's.
"""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from os.path import expanduser
from typing import TypeVar

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.settings import SettingError

T = TypeVar("T")
TARGET = "._target_"


def in_order(arguments: Sequence[str]) -> list[str]:
    """Flags first, as argparse wants them; a wrong one in one line, before argparse answers with a page of usage."""
    parser = get_args_parser()
    actions = {name: action for action in parser._actions for name in action.option_strings}
    flags: list[str] = []
    options: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, _, attached = argument.partition("=")
        if not argument.startswith("-") or (argument[1:2].isdigit()):
            options.append(argument)
            continue
        if name not in actions:
            hint = did_you_mean(name, list(actions))
            raise SettingError(f"{name}: no such flag; {hint} (options need no dashes: KEY=VALUE)")
        flags += [argument, *_value(name, actions[name], attached, left)]
    return [*flags, *options]


def _value(name: str, action: Action, attached: str, left: list[str]) -> list[str]:
    """What belongs to a flag, taken from what is left of the command line."""
    if action.nargs == 0:
        return []
    choices = list(action.choices or ())
    optional = action.nargs == "?"
    if attached:
        value, taken = attached, []
    elif left and (left[0] in choices if optional else not left[0].startswith("-")):
        value, taken = left[0], [left.pop(0)]
    elif optional:
        return []
    else:
        raise SettingError(f"{name} needs a value{': ' + ', '.join(choices) if choices else ''}")
    if choices and value not in choices:
        raise SettingError(f"{name} {value}: {did_you_mean(value, choices)}")
    return taken


def quoted(arguments: Sequence[str]) -> list[str]:
    """With Hydra's quotes around values that its grammar cannot read, such as paths with spaces: a shell's suffice."""
    return [argument if _readable(argument) else _quote(argument) for argument in arguments]


def _readable(argument: str) -> bool:
    if "=" not in argument or argument.startswith("-"):
        return True
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


def _quote(argument: str) -> str:
    key, _, value = argument.partition("=")
    if value.startswith(tuple("[{('\"")):  # a list or a quotation gone wrong: guessing would hide it
        return argument
    value = expanduser(value) if value.startswith("~/") else value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def swept(arguments: Sequence[str]) -> list[str]:
    """Keys that were given several values."""
    parser = OverridesParser.create()
    given = [argument for argument in quoted(arguments) if "=" in argument and not argument.startswith("-")]
    parsed = [parser.parse_override(argument) for argument in given]
    return [str(override.key_or_group) for override in parsed if override.is_sweep_override()]


def policy_name(option: str, overrides: Iterable[str]) -> str:
    """What a run's policy is called: its option, or the user's own class, and what was exchanged or set in it."""
    name, changes = option, {}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == f"policy{TARGET}":
            name = value.rpartition(".")[2]
        elif found := re.match(r"policy[./](.+)", key):
            changes[found[1].removesuffix(TARGET)] = value.rpartition(".")[2] if key.endswith(TARGET) else value
    told = ", ".join(f"{key}={value}" for key, value in changes.items())
    return f"{name}({told})" if told else name


def _for_folders(option: str | None, overrides: ListConfig) -> str:
    """The same without what file systems or shells dislike."""
    return re.sub(r"[^\w.]+", "-", policy_name(option or "none", as_given(overrides))).strip("-")[:80]


def as_given(overrides: object) -> list[str]:
    """Hydra's list of overrides as the user wrote them: `${...}` in one is about the run and not about the list."""
    written = OmegaConf.to_container(overrides, resolve=False) if isinstance(overrides, ListConfig) else overrides
    assert isinstance(written, list)
    return [str(override) for override in written]


def register() -> None:
    """`${policy_name:option,overrides}` in config.yaml names run folders."""
    OmegaConf.register_new_resolver("policy_name", _for_folders, replace=True)


def retarget(config: DictConfig, overrides: Sequence[str]) -> None:
    """Prune, in place, every node whose `_target_` one of the overrides exchanges."""
    named = [override.partition("=")[0].lstrip("+~") for override in overrides]
    for key in named:
        if key.endswith(TARGET):
            _prune(config, key.removesuffix(TARGET), named)


def _prune(config: DictConfig, path: str, named: Sequence[str]) -> None:
    node = OmegaConf.select(config, path)
    accepted = parameters(node["_target_"])
    wanted = {name[len(path) + 1 :].partition(".")[0] for name in named if name.startswith(f"{path}.")}
    with open_dict(node):
        for name in list(node):
            if not str(name).startswith("_") and name not in accepted and name not in wanted:
                del node[name]


def completing(attempt: Callable[[list[str]], T], arguments: Sequence[str]) -> T:
    """Try, and try again with the engine's options under their full names, and ++ before what no YAML lists."""
    given = quoted(arguments)
    while True:
        try:
            return attempt(given)
        except ConfigCompositionException as error:
            completed = _complete(given, error)
            if completed is None:
                raise
        given = completed


def _complete(arguments: Sequence[str], error: BaseException) -> list[str] | None:
    """None if the error is about another thing."""
    cause = error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException) or not isinstance(cause.parent_node, DictConfig):
        return None
    node = cause.parent_node
    if "backend" in node and not node._get_full_key(None):
        completed = [_in_full(argument, node["backend"]) for argument in arguments]
    else:
        completed = [f"++{argument}" if _taken(argument, node) else argument for argument in arguments]
    return completed if completed != list(arguments) else None


def _taken(argument: str, node: DictConfig) -> bool:
    """Whether it is about something that the node's part takes and its YAML does not list."""
    key, path = argument.partition("=")[0], f"{node._get_full_key(None)}."
    if path == "." or not key.startswith(path) or "_target_" not in node:
        return False
    name = key.removeprefix(path).partition(".")[0]
    return name not in node and name in parameters(node["_target_"])


def _in_full(argument: str, backend: DictConfig) -> str:
    """`engine.X` and `kernels.X` under the part of the backend that takes `kernels`: that is the engine."""
    if not (found := re.match(r"engine\.|(?=kernels[.=])", argument)):
        return argument
    parts = {"backend": backend, **{"backend." + str(name): part for name, part in backend.items()}}
    for path, part in parts.items():
        if isinstance(part, DictConfig) and "_target_" in part and "kernels" in parameters(part["_target_"]):
            return f"{path}.{argument[found.end() :]}"
    raise SettingError(f"{argument}: only an engine has that: add backend=engine")


def parameters(target: object) -> list[str]:
    """What a target can be given by name; nothing if it cannot be imported: building it will say why."""
    if not isinstance(target, str):
        return []
    try:
        found = signature(get_object(target)).parameters.values()
    except (ImportError, ValueError, TypeError):
        return []
    return [parameter.name for parameter in found if parameter.kind not in _UNNAMED]


def default(target: str, name: str) -> object:
    """What a target's parameter is unless it is given; None if that cannot be told."""
    try:
        return signature(get_object(target)).parameters[name].default
    except (ImportError, ValueError, TypeError, KeyError):
        return None


_UNNAMED = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The nearest known word, or all of them if there are few."""
    if near := get_close_matches(word, known, n=1):
        return f"did you mean {near[0]}?"
    return f"choose one of: {', '.join(known)}" if known else "there are none"
