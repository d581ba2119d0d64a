"""Every composition that ships passes, but for what is known of it and told in docs/conformance.md."""

from pathlib import Path

import pytest

import conf
from experiments.conformance import factory, same_tokens
from playground.check.examination import examine
from playground.check.properties import PROPERTIES

NAMES = sorted(file.stem for file in (Path(conf.__file__).parent / "policy").glob("*.yaml"))
PROMPTS_FIRST = {"sglang", "static", "vllm_v0"}
"""While prompts come, decodes wait: the rule of the engine that the policy is made after."""
COMPARED = ("determinism", "permutation", "steady", "oracle")
"""Serve every case again: tests/playground/test_laws.py asks the same of every composition."""


@pytest.mark.parametrize("name", NAMES)
def test_a_composition_passes(name):
    asked = tuple(one for one in PROPERTIES if one.name not in COMPARED)
    failed = {
        verdict.property.name
        for verdict in examine(factory([f"policy={name}"]), 1, properties=asked, patience=0).failed
    }
    assert failed <= ({"starvation"} if name in PROMPTS_FIRST else set())


def test_tokens_on_the_engine_are_the_models():
    assert same_tokens(factory(["policy=vllm_v1"]), "tiny") == ""
