"""What is searched: options, each in a range or among choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from experiments.settings import SettingError

if TYPE_CHECKING:
    from optuna.trial import Trial

KNOWN = ("low", "high", "log", "choices")
Value = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option of the command line between `low` and `high` (whole numbers if both are), or among `choices`."""

    option: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()

    def ask(self, trial: Trial) -> Value:
        """A value of it."""
        if self.choices:
            chosen: Value = trial.suggest_categorical(self.option, list(self.choices))  # type: ignore[assignment]
            return chosen
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.option, self.low, self.high, log=self.log)
        assert self.low is not None and self.high is not None
        return trial.suggest_float(self.option, self.low, self.high, log=self.log)

    def holds(self, value: object) -> bool:
        """Whether the search could ask for it."""
        if self.choices:
            return value in self.choices
        assert self.low is not None and self.high is not None
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high


def parameters(space: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """From `study.space`. Raises SettingError for what is no range."""
    if not space:
        raise SettingError(
            "study.space={} is empty: say what to search, as {policy.budget.tokens: {low: 64, high: 2048}}"
        )
    return tuple(_parameter(str(option), told) for option, told in space.items())


def _parameter(option: str, told: Any) -> Parameter:
    place = f"study.space.{option}"
    if not isinstance(told, Mapping) or (wrong := [key for key in told if key not in KNOWN]):
        what = told if not isinstance(told, Mapping) else wrong[0]
        raise SettingError(f"{place}: {what} is not known; give low, high and log, or choices")
    if "choices" in told:
        choices = told["choices"]
        if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
            raise SettingError(f"{place}.choices={choices} must be a list of two or more")
        return Parameter(option, choices=tuple(choices))
    low, high = told.get("low"), told.get("high")
    if not _number(low) or not _number(high) or not low < high:
        raise SettingError(f"{place}: needs low < high, or choices; got low={low}, high={high}")
    if told.get("log") and not low > 0:
        raise SettingError(f"{place}: log needs low={low} above 0")
    return Parameter(option, low, high, bool(told.get("log", False)))


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
