"""Work for nobody: steps of a given size on the scratch slot, to compile kernels and to see what memory steps take."""

from __future__ import annotations

import torch

from engine.cuda.forward import ROWS, Forward, least_shape, pack, spans
from engine.cuda.residents import Batch, Resident, Rows
from engine.cuda.state import Picking, SlotState
from engine.errors import EngineError
from engine.sequence import Sequence as Text
from playground.core import Request

WARM_SLICES = (1, 32)
"""Numbers of prefills whose kernels are compiled before a run: one of each bucket that steps commonly have."""


def run_idle(forward: Forward, state: SlotState, slices: int, length: int, rows: int, device: torch.device) -> None:
    """Prefills of `length` tokens, some of which sample, with nothing exchanged between stages.

    Whatever KV the pool's first block holds is overwritten.
    """
    nobody = Resident(Text(Request(0, 0.0, 1, 1, prompt=(0,)), 1), Picking.GREEDY, slot=state.scratch)
    samples = [index < rows for index in range(slices)]
    batch = Batch.of(Rows.of([nobody] * slices), [0] * slices, [length] * slices, samples)
    shape = least_shape(batch)
    if shape.rows is not None:
        shape = shape._replace(decodes=max(shape.decodes, ROWS), rows=rows)
    packed, _ = pack(batch, shape, state.scratch)
    forward(torch.from_numpy(packed).to(device), shape, Picking.GREEDY, known=[spans(batch, shape)])


def measured(forward: Forward, state: SlotState, tokens: int, max_length: int, seqs: int, device: torch.device) -> int:
    """Bytes that the activations of one step of `tokens` tokens take at their peak."""
    length = min(tokens, max_length)
    slices = min(max(tokens // length, 1), seqs)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_idle(forward, state, slices, length, min(seqs, tokens), device)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise EngineError(
            f"limits.max_tokens={tokens}: a step of so many tokens does not fit the {free / 1e9:.1f} of "
            f"{total / 1e9:.1f} GB that are free beside the weights; lower it, or take a smaller model"
        ) from error
    return torch.cuda.max_memory_allocated(device) - before
