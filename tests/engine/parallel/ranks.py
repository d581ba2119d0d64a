"""Ranks of a test, each a process of its own: what they compute of a prompt, without driver, steps or sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.config import find_config
from engine.kv import KvPool
from engine.load import Share, load_model, random_model
from engine.models.decoder import Inputs
from engine.parallel.comm import join
from engine.parallel.launch import free_port
from engine.parallel.layout import Layout
from kernels.batch import PagedBatch
from tests.engine.parallel.forked import SERVER

Chunks = list[tuple[int, list[int]]]


def logits(path: str | Path, chunks: Chunks | list[Chunks], layout: dict, random: bool = False) -> list[list]:
    """What every rank of a layout has after a prompt in chunks of (start, ids): logits of the last token.

    In lockstep `chunks` are as many for each replica, of which some may be empty.
    """
    chosen, method = Layout(**layout), f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    of = chunks if chosen.lockstep else [chunks] * chosen.replicas
    return together(chosen.ranks, partial(_logits, chosen, method, str(path), of, random))


def together(ranks: int, work: Callable[[int, Connection], None]) -> list[Any]:
    """What each rank says, in order; `work` is a function, which can be pickled, of the rank and a line to say it."""
    ends, processes = [], []
    for rank in range(ranks):
        end, theirs = SERVER.Pipe()
        processes.append(SERVER.Process(target=work, args=(rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # or a rank that dies would never be missed
        ends.append(end)
    try:
        assert all(end.poll(120) for end in ends), "a rank does not get on"
        return [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _logits(
    layout: Layout, method: str, path: str, chunks: list[Chunks], random: bool, rank: int, end: Connection
) -> None:
    torch.set_num_threads(1)
    place, experts = layout.place(rank), find_config(path).shape.experts
    part = join(layout, rank, method, torch.device("cpu"), 60.0, experts and experts.count)
    model = (random_model if random else load_model)(path, "float32", share=Share(layout, place, part))
    pool = KvPool(model.shape, 8, 4, torch.float32)
    with torch.inference_mode():
        for turn, (start, ids) in enumerate(chunks[place.replica]):
            count, size = len(ids), 4
            pooled = tuple(len(one[turn][1]) for one in chunks) if layout.lockstep else ()
            positions = torch.arange(start, start + count)
            pages = PagedBatch([start], [count], torch.arange(8)[None], size)
            rows = torch.tensor([count - 1]) if count else None
            tokens = torch.tensor(ids, dtype=torch.int64)
            found = model(Inputs(tokens, positions, positions, rows, pages, pooled), pool)
    end.send(found.tolist())
    end.recv()  # never: who left now, or let go of its model, would take along what it is still sending
