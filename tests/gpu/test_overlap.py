"""Computing beside exchanges on a GPU: results are waited for, in graphs too, and tokens are those of one rank."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.load import LONE, load_model
from engine.models.decoder import WHOLE
from engine.overlap import Overlap
from engine.parallel.beside import SideStream
from engine.parallel.layout import Layout
from engine.tiny import tiny
from tests.gpu.serving import DEVICE
from tests.gpu.test_ranks import SIZES, expected, spread, tokens

__all__ = ["expected"]  # a fixture

pytestmark = pytest.mark.gpu


def beside(run: SideStream, x: torch.Tensor) -> torch.Tensor:
    """An exchange that takes long and makes memory of its own, and what is computed with its result."""

    def exchange() -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return x * 2

    pending = run(exchange)
    other = x + 1
    return pending() + other


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_what_is_computed_with_a_result_waits_for_it(captured):
    run, x = SideStream(torch.device(DEVICE)), torch.zeros(1 << 20, device=DEVICE)
    for turn in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            x.fill_(turn)
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = beside(run, x)
                x.fill_(turn + 5)
                graph.replay()
            else:
                found = beside(run, x)
            torch.cuda.synchronize()
        wanted = turn + 5 if captured else turn
        assert found.eq(3 * wanted + 1).all()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_one_rank_in_halves(expected, graphs):
    share = replace(LONE, part=replace(WHOLE, overlap=Overlap("two_batch")))
    model = load_model(tiny("llama"), "float32", DEVICE, share=share)
    with closing(CudaBackend(model, **SIZES, graphs=graphs)) as backend:
        assert tokens(backend) == expected


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", ["two_batch", "row_chunks"])
def test_two_ranks(expected, kind, graphs, tmp_path):
    with closing(spread(tiny("llama"), Layout(tp=2), tmp_path, graphs, overlap=Overlap(kind))) as backend:
        assert tokens(backend) == expected
