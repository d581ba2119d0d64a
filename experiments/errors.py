"""What the user got wrong, in one line: the option, its value, and what would do.

Hydra's and OmegaConf's own errors are many lines about their machinery; here they become one about the option.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_exception, format_list
from typing import NamedTuple

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
    SearchPathException,
)
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from experiments.overrides import did_you_mean, parameters
from experiments.settings import SettingError
from playground.loop import Stuck
from playground.oracle import LengthUnknown
from playground.sim.cost.tables import BeyondTable
from playground.workload.errors import WorkloadError

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / name) for name in ("analysis", "conf", "engine", "experiments", "kernels", "playground",
                                           "policies"))  # fmt: skip
INSTALLED = tuple({str(Path(path)) for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))})
MEND, BUG = 2, 1


class Told(NamedTuple):
    """An error for people: a line, what more there is to see of it, and the exit code."""

    line: str
    details: str
    code: int

    def __str__(self) -> str:
        return f"{self.line}\n{self.details}".rstrip()


def tell(error: BaseException) -> Told:
    """A line for what the user can mend, their own frames for an error in their code, a traceback for a bug of ours."""
    if line := explain(error):
        return Told(line, "", MEND)
    said = _one_line(f"{type(error).__name__}: {error}")
    frames = extract_tb(error.__traceback__)
    if own := [frame for frame in frames if _is_users(frame)]:
        return Told(f"{_where(own[-1])}: {said}", "".join(format_list(own)), BUG)
    if notes := getattr(error, "__notes__", ()):
        return Told(f"{said} ({'; '.join(notes)})", "".join(format_list(frames[-1:])), BUG)
    return Told(said, "".join(format_exception(error)), BUG)


def carried_out(do: Callable[[], int], resumes: bool = True) -> int:
    """A command's exit code: its own, or that of what the user can mend (2), told in one line.

    `resumes`: the same command goes on after an interrupt (130).
    """
    try:
        return do()
    except KeyboardInterrupt:
        print("interrupted: the same command goes on" if resumes else "interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return MEND


def _is_users(frame: FrameSummary) -> bool:
    """Of a file that neither belongs to this repository's packages nor is installed."""
    path = frame.filename
    folders = tuple(f"{folder}/" for folder in (*OURS, *INSTALLED))
    return Path(path).is_file() and "site-packages" not in path and not path.startswith(folders)


def _where(frame: FrameSummary) -> str:
    path = Path(frame.filename)
    name = "/".join(path.parts[-2:]) if path.name == "__init__.py" else path.name
    return f"{name}:{frame.lineno} in {frame.name}"


def explain(error: BaseException) -> str | None:
    """One line for an error that a user can mend; None for one of ours."""
    for kind, tell_it in (_TELLERS | _engines()).items():
        if isinstance(error, kind):
            return _one_line(tell_it(error))
    return None


def _engines() -> dict[type[BaseException], Callable[..., str]]:
    """The engine's errors, if there is one: a simulation must not load it to ask."""
    if (engine := sys.modules.get("engine.errors")) is None:
        return {}
    return {engine.EngineError: str, engine.StepFailed: lambda error: f"{error}; HYDRA_FULL_ERROR=1 shows where"}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _own_words(error: BaseException) -> BaseException:
    """The outermost that is not a wrapper of Hydra's: inner ones know less of where the user was."""
    links = list(_chain(error))
    return next((link for link in links if not isinstance(link, HydraException | OmegaConfBaseException)), links[-1])


def _missing_config(error: MissingConfigException) -> str:
    """`policy=foo`, where the group has no foo."""
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"config {option!r} does not exist: {error}"
    options = list(error.options or [])
    if not options:
        return f"{group}={option}: there is no group {group}; `playground --help` lists the groups"
    hint = did_you_mean(option, options)
    listed = "" if hint.startswith("choose") else f" ({group}: {', '.join(options)})"
    return f"{group}={option}: no such option; {hint}{listed}"


def _composition(error: ConfigCompositionException) -> str:
    """An override of a key or a group that does not exist, or a value of the wrong type."""
    for cause in _chain(error):
        if isinstance(cause, OmegaConfBaseException):
            return _omegaconf(cause, str(error))
    text = str(error)
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{found[1]}: several values are a sweep: add -m"
    if found := re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text):
        return f"{found[1]}: not a group that is set by default; add it with +{found[1]}=..."
    if "To append to your default list use" in text and (found := re.search(r"use (\+\S+)", text)):
        return f"{found[1].lstrip('+')}: not set by default; write {found[1]}"
    if found := re.search(r"Multiple values for ([^.]+)\.", text):
        return f"{found[1]} is set twice; give it once, or several values by -m {found[1]}=a,b"
    return text


def _omegaconf(error: OmegaConfBaseException, about: str = "") -> str:
    key = error.full_key or ""
    first = str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is required: give {key}=..."
    if found := re.search(r"hydra\.runtime\.choices\.(\w+)", f"{key} {first}"):
        return f"{found[1]} is required: choose an option of the group, {found[1]}=..."
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {first}"
    if isinstance(error, ValidationError):
        return f"{_as_typed(key, about)} {_expected(first)}"
    if isinstance(error, ConfigKeyError) or "not in" in first:
        return _unknown_key(error, about)
    return f"{key}: {first}" if key else first


def _as_typed(key: str, about: str) -> str:
    """`seed=abc` as the user wrote it, where Hydra repeats it."""
    found = re.search(r"override[^\n]*?'?([\w.@/]+=[^\n']*)'?", about)
    return found[1] if found and found[1].startswith(key) else key


def _expected(problem: str) -> str:
    for word, kind in {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}.items():
        if word in problem:
            return f"must be {kind}"
    return f"cannot be: {problem}"


def _unknown_key(error: OmegaConfBaseException, about: str) -> str:
    """Names the keys that the parent has, since a typo is the usual reason."""
    found = re.search(r"use (\+[^\n]+)", about)
    wanted = found[1].strip() if found else f"+{error.full_key}=..."
    key, _, value = wanted.lstrip("+").partition("=")
    if "/" in key:
        return f"{wanted.lstrip('+')}: there is no group {key}; `playground --help` lists the groups"
    name = key.rpartition(".")[2]
    known = sorted(str(child) for child in _children(error) if not str(child).startswith("_"))
    inside = f" {error.key}" if value.startswith("{") and str(error.key) != name else ""
    return f"{wanted.lstrip('+')}: unknown option{inside}; {did_you_mean(str(error.key) if inside else name, known)}"


def _children(error: OmegaConfBaseException) -> set[object]:
    """What the parent lists, and what the part that it configures takes besides."""
    parent = error.parent_node
    if not isinstance(parent, Mapping):
        return set()
    return {*parent, *(parameters(parent["_target_"]) if "_target_" in parent else ())}


def _instantiation(error: InstantiationException) -> str:
    """A `_target_` that cannot be imported, or that refused its options."""
    text = str(error)
    key = found[1] if (found := re.search(r"full_key: (\S+)", text)) else ""
    if found := re.search(r"Error (?:locating|loading) (?:target )?'([^']+)'", text):
        why = list(_chain(error))[-1]
        return f"{_dot(key)}_target_={found[1]}: cannot be imported ({why}); is its package installed or on PYTHONPATH?"
    inner = _own_words(error)
    if isinstance(inner, TypeError) and (found := re.search(r"in call to target '([\w.<>]+)'", text)):
        return _refused(key, found[1], inner)
    return str(inner)


def _refused(key: str, target: str, inner: TypeError) -> str:
    """An unexpected or missing option; says which ones there are."""
    if found := re.search(r"unexpected keyword argument '(\w+)'", str(inner)):
        return (
            f"{_dot(key)}{found[1]}: {_short(target)} has no such option; {did_you_mean(found[1], parameters(target))}"
        )
    if found := re.search(r"missing \d+ required [\w-]+ arguments?: (.*)", str(inner)):
        return (
            f"{key or _short(target)}: {_short(target)} needs {found[1]}: give +{_dot(key)}{_first_name(found[1])}=..."
        )
    return f"{key or _short(target)}: {inner}"


def _dot(key: str) -> str:
    return f"{key}." if key else ""


def _short(target: str) -> str:
    return target.rpartition(".")[2]


def _first_name(names: str) -> str:
    return names.strip("'").partition("'")[0]


def _parse(error: OverrideParseException) -> str:
    return (
        f"{error.override!r} cannot be read: write GROUP=OPTION or KEY.PATH=VALUE, and quote what a shell would change"
    )


def _stuck(error: Stuck) -> str:
    return f"the policy is stuck: {error}; a policy that waits on purpose must say so with draft.wake(at)"


_TELLERS: dict[type[BaseException], Callable[..., str]] = {
    SettingError: str,
    WorkloadError: str,
    MissingConfigException: _missing_config,
    OverrideParseException: _parse,
    ConfigCompositionException: _composition,
    InstantiationException: _instantiation,
    SearchPathException: lambda error: f"--config-dir: {error}",
    OmegaConfBaseException: _omegaconf,
    HydraException: str,
    Stuck: _stuck,
    LengthUnknown: lambda error: f"policy: {error}",
    BeyondTable: lambda error: f"backend.{error}",
}
