"""Frequencies equal those of transformers for every kind that Llama's and Qwen's configs use."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import read_config
from engine.rope import frequencies
from engine.tiny import ARCHITECTURES, COMMON

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

CASES = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "legacy default": {"rope_theta": 5e5},
    "nothing said": {},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "legacy linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}},
    "legacy llama3": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 2048}},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "legacy yarn": {"rope_theta": 1e6, "rope_scaling": {**YARN}},
    "yarn with options": {
        "rope_parameters": {
            **YARN,
            "rope_theta": 1e4,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        }
    },
    "yarn with its factor": {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 1.5}},
    "yarn, not truncated": {"rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "half linear": {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "half llama3": {
        "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5}
    },
    "half yarn": {"rope_parameters": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies(case, tmp_path):
    config = {**COMMON, **ARCHITECTURES["qwen3"], "max_position_embeddings": 32768, "head_dim": 64}
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config | CASES[case]))
    ours, scale = frequencies(read_config(tmp_path).rope)
    theirs = AutoConfig.from_pretrained(tmp_path)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        theta = theirs.rope_parameters["rope_theta"]
        expected, expected_scale = 1.0 / theta ** (torch.arange(0, 64, 2) / 64), 1.0
    else:
        expected, expected_scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale)
