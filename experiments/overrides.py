"""Two liberties of the command line that Hydra alone does not give.

`policy._target_=mypkg.MyPolicy` exchanges a part for a user's own: the options of the old part go, unless the new one
takes them or the user set them. `logger.mode=online` sets what the part takes though its YAML does not list it: a
default stands in one place, the part's own signature, and a typo is refused still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import TypeVar

from hydra._internal.utils import get_args_parser
from hydra.errors import ConfigCompositionException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.settings import SettingError

T = TypeVar("T")
TARGET = "._target_"


def check_flags(arguments: Sequence[str]) -> None:
    """Hydra's flags, before argparse answers a wrong one with a page of usage."""
    parser = get_args_parser()
    known = [name for action in parser._actions for name in action.option_strings]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise SettingError(f"{name}: no such flag; {did_you_mean(name, known)} (options need no dashes: KEY=VALUE)")


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
    """Try, and try again with ++ before each option that its part takes though the YAML does not list it."""
    given = list(arguments)
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
    completed = [f"++{argument}" if _taken(argument, node) else argument for argument in arguments]
    return completed if completed != list(arguments) else None


def _taken(argument: str, node: DictConfig) -> bool:
    parent, _, name = argument.partition("=")[0].rpartition(".")
    if not parent or parent != node._get_full_key(None) or name in node or "_target_" not in node:
        return False
    return name in parameters(node["_target_"])


def parameters(target: str) -> list[str]:
    """What a target can be given by name; nothing if it cannot be imported: building it will say why."""
    try:
        found = signature(get_object(target)).parameters.values()
    except (ImportError, ValueError, TypeError):
        return []
    return [parameter.name for parameter in found if parameter.kind not in _UNNAMED]


_UNNAMED = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The nearest known word, or all of them if there are few."""
    if near := get_close_matches(word, known, n=1):
        return f"did you mean {near[0]}?"
    return f"choose one of: {', '.join(known)}" if known else "there are none"
