"""Traps of names and versions."""

import tomllib
from pathlib import Path

import conf

PROJECT = tomllib.loads((Path(conf.__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_transformers_does_not_take_our_kernels_for_hugging_faces():
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()


def test_the_core_needs_no_torch():
    core = " ".join(PROJECT["dependencies"])
    assert not any(name in core for name in ("torch", "transformers", "wandb", "matplotlib"))
