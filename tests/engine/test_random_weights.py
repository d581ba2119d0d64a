"""Models of any shape with weights that were read from nowhere."""

import json
from dataclasses import fields
from importlib.resources import files

import pytest
import torch

from engine.config import ARCHITECTURES, find_config
from engine.errors import EngineError
from engine.load import random_model
from engine.tiny import tiny
from engine.weights import random_weights, read_weights
from playground.model import ModelShape, shipped
from tests.engine.driver import Driver
from tests.engine.test_correctness import Pools, Runner, poisoned


def sizes(weights):
    """Shapes of all tensors, by name."""
    layer = weights.layers[-1]
    parts = {field.name: getattr(layer, field.name) for field in fields(layer)}
    parts |= {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
    return {name: shapes(part) for name, part in parts.items()}


def shapes(part):
    """Of a tensor, or of those in a tuple of whatever depth."""
    if isinstance(part, tuple):
        return [shapes(piece) for piece in part]
    return None if part is None else part.shape


def test_drawn_weights_have_the_layout_of_those_that_are_read(checkpoint):
    shape = find_config(checkpoint).shape
    drawn = random_weights(shape, torch.bfloat16, "cpu")
    assert sizes(drawn) == sizes(read_weights(checkpoint, shape, torch.bfloat16, "cpu"))
    assert (drawn.head is drawn.embedding) == shape.tied_embeddings
    assert drawn.head.dtype == torch.bfloat16


def test_the_seed_decides():
    shape = ModelShape.read("tiny")
    first, again, other = (random_weights(shape, torch.float32, "cpu", seed).layers for seed in (1, 1, 2))
    assert torch.equal(first[3].down.weight, again[3].down.weight)
    assert not torch.equal(first[3].down.weight, other[3].down.weight)
    assert not torch.equal(first[3].down.weight, first[2].down.weight)


def stated(name):
    return json.loads(files("playground").joinpath("models", f"{name}.json").read_text())


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_shape_has_a_config_or_is_the_simulators_alone(name):
    if "quantization_config" in stated(name) and stated(name)["architectures"][0] in ARCHITECTURES:
        with pytest.raises(EngineError, match="quantization_config: the engine has no quantised weights"):
            find_config(name)
        return
    if stated(name)["architectures"][0] not in ARCHITECTURES:
        with pytest.raises(
            EngineError, match=r"is not supported: the engine has .*; backend=sim has the costs of more$"
        ):
            find_config(name)
        return
    config = find_config(name)
    assert config.shape == ModelShape.read(name)
    kinds = {"tiny": "float32"} | dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), "float16")
    assert config.dtype == kinds.get(name, "bfloat16")


@pytest.mark.parametrize("family", ["qwen3", "qwen2-moe", "deepseek-v3"])
def test_random_text_goes_on_and_on(family):
    """It neither repeats one token nor stops making sense to compare."""
    model = random_model(tiny(family))
    driver = Driver(Runner(model, {0: Pools(poisoned(model))}), range(160), 4)
    driver.add(0, [5, 6, 7], 40)
    (text,) = driver.decode(0)
    assert len(set(text)) > 20


def test_unknown_names_are_told():
    with pytest.raises(EngineError, match="no-such-model: no such file"):
        random_model("no-such-model")


def test_a_device_that_is_not_there():
    with pytest.raises(EngineError, match="device=cuda: no CUDA device is visible"):
        random_model("tiny", device="cuda")
