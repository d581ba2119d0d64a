"""What every test shares: an offline, deterministic environment, set before anything heavy is imported."""

import os

# Triton reads its variable when first imported, and transformers imports Triton: this must come before both.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
# Threads of several processes that spin for one another's cores make tiny tensors many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=25,
    deadline=None,
    # No `explain`: it traces every line of a failing simulation, which takes minutes before Python 3.12.
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite golden files from what is decided now")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and (lack := _lack()):
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=lack))


def _lack() -> str | None:
    """Why tests on a GPU cannot run here."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return None if os.environ["TRITON_INTERPRET"] == "0" else "needs compiled kernels: set TRITON_INTERPRET=0"


@pytest.fixture
def rewrite_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite-golden"))
