"""Work for nobody: steps of a given size on the scratch slot, to compile kernels and to see what memory steps take."""

from __future__ import annotations

import numpy as np
import torch

from engine.cuda.forward import Forward, Packed, padded_slices
from engine.cuda.state import Words
from engine.errors import EngineError

WARM_SLICES = (1, 32)
"""Numbers of prefill slices whose kernels are compiled before a run: one of each bucket that steps commonly have."""


def idle_step(slices: int, length: int, rows: int, scratch: int) -> Packed:
    """Prefills of `length` tokens each, `rows` of whose tokens are sampled, beside decode rows that are padding."""
    decodes = 8
    empty = padded_slices(slices) - slices
    edges = decodes + length * np.arange(slices + 1)
    padding = np.zeros(decodes + empty, dtype=np.int64)
    positions = np.concatenate((np.full(decodes, -1), np.tile(np.arange(length), slices)))
    return Packed(
        row_slots=np.full(len(positions), scratch),
        positions=positions,
        slots=np.full(decodes + slices + empty, scratch),
        contexts=np.concatenate((padding[:decodes], np.full(slices, length), padding[decodes:])),
        offsets=np.concatenate((edges, np.full(empty, edges[-1]))),
        rows=np.arange(decodes, decodes + rows),
    )


def run_idle(forward: Forward, packed: Packed, device: torch.device) -> None:
    """Whatever KV the pool's first block holds is overwritten."""

    def moved(words: Words) -> torch.Tensor:
        return torch.from_numpy(words).to(device)

    forward.mixed(8, [moved(words) for words in packed], draws=False)


def measured(forward: Forward, tokens: int, max_length: int, seqs: int, scratch: int, device: torch.device) -> int:
    """Bytes that the activations of one step of `tokens` tokens take at their peak."""
    length = min(tokens, max_length)
    slices = min(max(tokens // length, 1), seqs)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_idle(forward, idle_step(slices, length, min(seqs, slices * length), scratch), device)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise EngineError(
            f"limits.max_tokens={tokens}: a step of so many tokens does not fit the {free / 1e9:.1f} of "
            f"{total / 1e9:.1f} GB that are free beside the weights; lower it, or take a smaller model"
        ) from error
    return torch.cuda.max_memory_allocated(device) - before
