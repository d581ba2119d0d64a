"""Layers that move between two ranks on GPUs: the tokens stay those of one."""

from contextlib import closing
from dataclasses import replace

import pytest

from engine.cuda.backend import CudaBackend
from engine.load import load_model
from engine.parallel.layout import Layout
from engine.tiny import tiny
from tests.engine.parallel.test_moving import Restless
from tests.gpu.serving import DEVICE, policy, served
from tests.gpu.test_ranks import SIZES, spread, workload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", ["llama", "qwen2-moe"])
def test_tokens_stay_when_layers_move(model, graphs, tmp_path):
    """In both directions, while sequences are under way and give way."""
    with closing(CudaBackend(load_model(tiny(model), "float32", DEVICE), **SIZES)) as backend:
        expected = served(backend, workload(), policy(64), prefix_cache=True).tokens
    restless = replace(policy(64), placement=Restless([(3, 1), (1, 3), (2, 2)], every=4))
    with closing(spread(tiny(model), Layout(stages=2, spare_layers=1), tmp_path, graphs)) as backend:
        found = served(backend, workload(), restless, prefix_cache=True)
    assert found.tokens == expected
    assert found.preemptions
