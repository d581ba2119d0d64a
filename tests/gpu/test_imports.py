"""GPU machines may lack all that a simulation and the front door need: the tests for them do without."""

import subprocess
import sys

ABSENT = ("hydra", "omegaconf", "simpy", "wandb", "pandas", "gguf")


def test_gpu_tests_import_what_gpu_machines_have():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))  # importing them is an ImportError now
from tests.gpu import conftest, test_kernels, test_logits, test_memory, test_tokens
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
