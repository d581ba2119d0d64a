"""Every composition that ships passes, but for what is known of it and told in docs/conformance.md."""

from dataclasses import replace
from pathlib import Path

import pytest

import conf
from experiments.conformance import factory, same_tokens
from playground.check.examination import examine
from playground.check.properties import PROPERTIES
from tests.playground.check.sick import DoubleUse, Skips

NAMES = sorted(file.stem for file in (Path(conf.__file__).parent / "policy").glob("*.yaml"))
PROMPTS_FIRST = {"sglang", "split_pd", "static", "td_pipe", "vllm_v0"}
"""While prompts come, decodes wait: the rule of the engine that the policy is made after."""
SCALED = {
    name: ["policy.budget.max_prefill=32"]
    for name in ("token_throttling_2025", "token_throttling_2026", "token_throttling_no_wt")
}
"""Where nothing throttles them their thousands of prefill tokens take the whole of a step of 64."""
COMPARED = ("determinism", "permutation", "steady", "oracle")
"""Serve every case again: tests/playground/test_laws.py asks the same of every composition."""
FAMILIES = ("tiny_pool", "huge_prompt", "stream", "half_prefilled", "misfits", "lockstep")
ASKED = tuple(
    replace(one, families=tuple(family for family in FAMILIES if family in (one.families or FAMILIES)))
    for one in PROPERTIES
    if one.name not in COMPARED and (not one.families or set(one.families) & set(FAMILIES))
)


@pytest.mark.parametrize("name", NAMES)
def test_a_composition_passes(name):
    report = examine(factory([f"policy={name}", *SCALED.get(name, [])]), 1, properties=ASKED, patience=0)
    assert {verdict.property.name for verdict in report.failed} == ({"starvation"} if name in PROMPTS_FIRST else set())
    assert report.served == len(FAMILIES)


@pytest.mark.slow
def test_tokens_on_the_engine_are_the_models():
    assert same_tokens(factory(["policy=vllm_v1"]), "tiny") == ""


@pytest.mark.slow
@pytest.mark.parametrize(("make", "told"), [(Skips, "prompt 0: tokens "), (DoubleUse, "the engine had to stop: ")])
def test_tokens_on_the_engine_that_are_not(make, told):
    assert same_tokens(make, "tiny").startswith(told)
