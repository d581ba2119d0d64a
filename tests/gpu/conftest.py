"""Tests that need a GPU: they import neither Hydra nor SimPy nor the front door, which GPU machines may lack."""

from __future__ import annotations

import os
import secrets
from zlib import crc32

import pytest
import torch

os.environ.setdefault("GPU_SEED", str(secrets.randbits(31)))  # in the environment: workers of xdist take it from there
SEED = int(os.environ["GPU_SEED"])


def pytest_report_header() -> str:
    return f"gpu tests: inputs are fresh each time; GPU_SEED={SEED} repeats these"


@pytest.fixture
def random(request: pytest.FixtureRequest) -> torch.Generator:
    """Numbers of this session and this test."""
    print(f"GPU_SEED={SEED}")
    return torch.Generator().manual_seed(SEED + crc32(request.node.nodeid.encode()))
