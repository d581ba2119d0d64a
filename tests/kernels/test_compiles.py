"""Every kernel compiles for real GPUs, by Triton's own compiler: the interpreter takes what that would not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("capability", [89, 90])
def test_kernels_compile_and_fit_the_shared_memory(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment["TMPDIR"] = str(tmp_path)  # the compiler leaves files
    command = [sys.executable, "-m", "tests.kernels.compiling", str(capability)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    too_large = [one for one in found if one["shared"] > SHARED[capability]]
    assert not too_large
    kernels = {one["kernel"] for one in found}
    assert kernels >= {"_decode", "_prefill", "skinny_kernel", "matvec_kernel", "_rms_norm"}
    assert kernels >= {"_route", "_arrange", "_gated", "_weighted", "_sum"}
    assert kernels >= {"_latent", "_merge", "_place_latent"}
    if capability >= 90:
        assert kernels >= {"_add_sum", "_add_sum_norm", "_gather", "_scatter_sum", "_put", "_take"}
