"""Exchanges by peer loads on real GPUs, by two processes: on GPUs of their own, or both on the only one there is."""

import pytest
import torch

from tests.engine.parallel.peer_ranks import digests

pytestmark = pytest.mark.gpu


def test_two_ranks(tmp_path):
    devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(2)]
    first, second = digests(devices, tmp_path, rounds=200, interpret=False, limit=240)
    assert first == second
