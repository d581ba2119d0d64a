"""The machine, the software and the revision that a result was found with."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.registry import IMPLEMENTATIONS, chosen


def facts(commit: str = "") -> dict[str, Any]:
    """`commit`: which one it is, where the tree lies without its history."""
    found = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if found else "none",
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count if found else 0,
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if found else 0.0,
        "driver": _told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or _told("git", "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernels": {op: chosen(op, "cuda") for op in IMPLEMENTATIONS},
    }


def _told(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
