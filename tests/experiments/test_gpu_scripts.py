"""The GPU benchmarks run where only torch, triton, numpy and transformers are installed, from a bare checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = ("hydra", "omegaconf", "simpy", "wandb", "rich")
WITHOUT = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({MISSING}))
sys.path[:] = [entry for entry in sys.path if not entry.startswith({str(ROOT)!r}) or ".venv" in entry]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["gpu_engine", "gpu_kernels"])
def test_scripts_start_without_the_front_door(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, str(ROOT / f"experiments/benchmarks/{script}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--only" in done.stdout
    assert "Method" in done.stdout


def test_the_benchmark_of_many_ranks_does_so_too() -> None:
    run = WITHOUT.replace(
        "runpy.run_path(sys.argv[0]", f"sys.path.insert(0, {str(ROOT)!r}); runpy.run_module(sys.argv[0]"
    )
    command = [sys.executable, "-c", run, "experiments.benchmarks.ranks", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--parts" in done.stdout and "Method" in done.stdout
