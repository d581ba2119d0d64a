"""Processes that `torchrun` has started together: rank 0's goes through the front door and drives a run of
`backend=engine`, the others work for it and see no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from typing import TYPE_CHECKING, Any

from hydra.utils import get_object

from experiments.settings import SettingError, Settings

if TYPE_CHECKING:
    from engine.parallel.launch import Torchrun

MEETING = 120.0
"""Seconds for which a worker looks for its driver."""

GRACE = 2.0
"""Seconds that a driver has to find out why it is to end."""

Handler = Callable[..., object]


def work(environment: Mapping[str, str]) -> int | None:
    """Be the worker of a rank above 0 until the driver says stop; the exit code. None: this process drives.

    Raises `engine.errors.EngineError` where there is no secret, or no driver that has the same.
    """
    if (here := _here(environment)) is None:
        return None
    from engine.parallel.launch import follow, secret

    key = secret(environment)  # the driver's process asks for it, too: it should not begin to run without
    return follow(here, key, MEETING) if here.seat.rank else None


def check(wanted: Settings, environment: Mapping[str, str]) -> None:
    """Refuse a run that would leave processes without work, or work without processes."""
    if (here := _here(environment)) is None:
        return
    if not _is_real_time(wanted.backend):
        raise SettingError(
            f"backend: only backend=engine has work for several processes, and torchrun has started {here.ranks} "
            f"(WORLD_SIZE={here.ranks}); take backend=engine, or start it without torchrun"
        )
    parallel = wanted.parallel
    ranks = parallel.stages * parallel.tp * parallel.replicas
    if ranks != here.ranks:
        raise SettingError(
            f"parallel: stages={parallel.stages} x tp={parallel.tp} x replicas={parallel.replicas} are {ranks} ranks, "
            f"and torchrun has started {here.ranks} (WORLD_SIZE={here.ranks}); make them equal"
        )


def check_single(what: str, environment: Mapping[str, str]) -> None:
    """Refuse more than one run: workers leave with the first."""
    if here := _here(environment):
        raise SettingError(
            f"{what}: under torchrun (WORLD_SIZE={here.ranks}) there is one run; give single values, or start it "
            "without torchrun"
        )


def check_alone(what: str, environment: Mapping[str, str]) -> None:
    """Refuse what starts its own ranks where it has been started once for each already."""
    if here := _here(environment):
        raise SettingError(
            f"{what} starts its ranks itself, and torchrun has started {here.ranks} of it (WORLD_SIZE={here.ranks}): "
            "start the program without torchrun"
        )


def patient(terminate: Handler, environment: Mapping[str, str]) -> Handler:
    """A handler of SIGTERM. torchrun sends it to all when one process has ended; which one, the driver soon knows."""
    if _here(environment) is None:
        return terminate

    def later(*_: object) -> None:
        signal(SIGALRM, terminate)
        setitimer(ITIMER_REAL, GRACE)

    return later


def _here(environment: Mapping[str, str]) -> Torchrun | None:
    if "WORLD_SIZE" not in environment:
        return None  # a simulation loads nothing of the engine
    from engine.parallel.launch import Torchrun

    return Torchrun.here(environment)


def _is_real_time(backend: Any) -> bool:
    try:
        return bool(getattr(get_object(backend["_target_"]), "real_time", False))
    except Exception:  # noqa: BLE001 - whatever it is, building the backend says it better
        return True
