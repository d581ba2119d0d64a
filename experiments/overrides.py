"""`policy._target_=mypkg.MyPolicy`: a part exchanged for a user's own, from the command line alone.

The options that came with the exchanged part go, unless the new one takes them or the user set them.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, signature

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

TARGET = "._target_"


def retarget(config: DictConfig, overrides: Sequence[str]) -> None:
    """Prune, in place, every node whose `_target_` one of the overrides exchanges."""
    named = [override.partition("=")[0].lstrip("+~") for override in overrides]
    for key in named:
        if key.endswith(TARGET):
            _prune(config, key.removesuffix(TARGET), named)


def _prune(config: DictConfig, path: str, named: Sequence[str]) -> None:
    node = OmegaConf.select(config, path)
    accepted = _parameters(node["_target_"])
    wanted = {name[len(path) + 1 :].partition(".")[0] for name in named if name.startswith(f"{path}.")}
    with open_dict(node):
        for name in list(node):
            if not str(name).startswith("_") and name not in accepted and name not in wanted:
                del node[name]


def _parameters(target: str) -> set[str]:
    """What the target can be given by name; nothing if it cannot be imported: building it will say why."""
    try:
        parameters = signature(get_object(target)).parameters.values()
    except (ImportError, ValueError, TypeError):
        return set()
    return {parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD}
