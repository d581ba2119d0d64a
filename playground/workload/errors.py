"""What a user may get wrong in a workload, said in one line. Knows no format and no workload."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan


class WorkloadError(ValueError):
    """A setting, a file or a row of a file that cannot be used. One line: where, what, and what was expected."""


def check_number(option: str, value: object) -> float:
    """The value as a number, or an error that names the option."""
    if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value):
        raise WorkloadError(f"{option}={value} must be a number")
    return value


def check_positive(option: str, value: object) -> None:
    """A number above 0; nothing (None) passes."""
    if value is not None and not check_number(option, value) > 0:
        raise WorkloadError(f"{option}={value} must be greater than 0")


def check_at_least(option: str, value: object, least: float) -> None:
    """A finite number of at least so much; nothing (None) passes."""
    if value is not None and not least <= check_number(option, value) < inf:
        raise WorkloadError(f"{option}={value} must be at least {least}")


def check_count(option: str, value: object, least: int = 1) -> None:
    """A whole number of at least so much; nothing (None) passes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise WorkloadError(f"{option}={value} must be a whole number")
    check_at_least(option, value, least)


def check_choice(option: str, value: object, choices: Iterable[str]) -> None:
    """One of the names."""
    names = sorted(choices)
    if value not in names:
        raise WorkloadError(f"{option}={value} must be one of {', '.join(names)}")
