"""Ranks that exchange with one another (`peer_rank`), started and awaited."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


def digests(devices: list[str], folder: Path, rounds: int, interpret: bool, limit: float) -> list[str]:
    """What each rank's results come to; `limit`: seconds. A rank that fails ends all, since they wait for it."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    running = [
        subprocess.Popen(_command(rank, devices, folder, rounds), cwd=ROOT, env=environment, **_said(folder, rank))
        for rank in range(len(devices))
    ]
    end = time.monotonic() + limit
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            assert time.monotonic() < end, f"ranks have not ended after {limit} s"
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()
    for rank, code in enumerate(codes):
        assert not code, (folder / f"{rank}.errors").read_text()[-2000:]
    return [(folder / f"{rank}.said").read_text().split()[-1] for rank in range(len(devices))]


def _command(rank: int, devices: list[str], folder: Path, rounds: int) -> list[str]:
    command = [sys.executable, "-m", "tests.engine.parallel.peer_rank"]
    return [*command, str(rank), str(len(devices)), devices[rank], str(folder), str(rounds)]


def _said(folder: Path, rank: int) -> dict:
    return {name: (folder / f"{rank}.{end}").open("w") for name, end in (("stdout", "said"), ("stderr", "errors"))}
