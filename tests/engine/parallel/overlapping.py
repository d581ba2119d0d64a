"""A rank of a test, or the only one, that computes steps as an overlap has it: prompts, then prompts beside decodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import find_config
from engine.kv import KvPool
from engine.load import LONE, Share, load_model
from engine.models.decoder import WHOLE, Inputs
from engine.overlap import NONE, Overlap, passes, tokens_of
from engine.parallel.comm import join, leave
from engine.parallel.layout import Layout
from engine.tiny import tiny
from kernels.batch import PagedBatch
from playground.core import Slice

BLOCKS, SIZE = 6, 4
"""Of each sequence."""

Part = tuple[int, int, int]
"""Sequence, start, length; all sample."""


def inputs(slices: list[Slice], pooled: tuple[int, ...]) -> Inputs:
    """Of slices in any order, on the CPU."""
    slices = sorted(slices, key=lambda part: part.length)
    tables = torch.tensor([[BLOCKS * part.sequence + block for block in range(BLOCKS)] for part in slices])
    places = [(part.sequence, place) for part in slices for place in range(part.start, part.start + part.length)]
    positions = torch.tensor([place for _, place in places], dtype=torch.int64)
    slots = torch.tensor([BLOCKS * SIZE * owner + place for owner, place in places], dtype=torch.int64)
    ids = torch.tensor([(31 * owner + 17 * place) % 90 + 3 for owner, place in places], dtype=torch.int64)
    ends = torch.tensor([part.length for part in slices]).cumsum(0)
    rows = torch.tensor([end - 1 for end, part in zip(ends, slices, strict=True) if part.samples], dtype=torch.int64)
    pages = PagedBatch([part.start for part in slices], [part.length for part in slices], tables, SIZE)
    return Inputs(ids, positions, slots, rows, pages, pooled)


def computed(model, steps: list[list[list[Part]]], replica: int, overlap: Overlap) -> dict[int, list[float]]:
    """Logits of each sequence's last token; `steps` by replica."""
    pool, found = KvPool(model.shape, BLOCKS * 10, SIZE, torch.float32), {}
    for step in steps:
        slices = [[Slice(id, 0, 0, start, length, True, ()) for id, start, length in parts] for parts in step]
        parts = passes(slices, overlap)
        halves = [inputs(half[replica], tuple(map(tokens_of, half)) if len(steps[0]) > 1 else ()) for half in parts]
        with torch.inference_mode():
            logits = model(halves[0], pool, *halves[1:])
        ordered = [part for half in parts for part in sorted(half[replica], key=lambda part: part.length)]
        sampling = [part.sequence for part in ordered if part.samples]
        if model.part.last:
            found |= dict(zip(sampling, logits.tolist(), strict=True))
    return found


def alone(family: str, steps: list[list[list[Part]]], overlap: Overlap = NONE) -> dict[int, list[float]]:
    """In this process, the replicas one after another."""
    model = load_model(tiny(family), share=replace(LONE, part=replace(WHOLE, overlap=overlap)))
    apart = [[[parts] for parts in replica if parts] for replica in zip(*steps, strict=True)]
    return {id: row for one in apart for id, row in computed(model, one, 0, overlap).items()}


class Case(NamedTuple):
    family: str
    steps: list[list[list[Part]]]
    layout: dict
    overlap: Overlap


def together(cases: list[Case], folder: Path) -> list[list[dict[int, list[float]]]]:
    """What every rank of each case's layout has found, over Gloo. One process imports torch and splits into ranks."""
    for case in cases:
        tiny(case.family)
    told = json.dumps([case._replace(overlap=asdict(case.overlap)) for case in cases])
    command = [sys.executable, "-m", "tests.engine.parallel.overlapping", told, str(folder)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=240)
    every = [range(Layout(**case.layout).ranks) for case in cases]
    return [[torch.load(folder / f"{index}.{rank}") for rank in ranks] for index, ranks in enumerate(every)]


def work(rank: int, cases: list[Case], folder: Path) -> None:
    """As one rank of each case that has so many."""
    torch.set_num_threads(1)
    for index, (family, steps, sizes, how) in enumerate(cases):
        layout, overlap = Layout(**sizes), Overlap(**how)
        if rank >= layout.ranks:
            continue
        experts, method = find_config(tiny(family)).shape.experts, f"file://{folder / 'meet'}{index}"
        part = join(layout, rank, method, torch.device("cpu"), 30.0, experts and experts.count, overlap)
        place = layout.place(rank)
        model = load_model(tiny(family), share=Share(layout, place, part))
        found = computed(model, steps, place.replica if layout.lockstep else 0, overlap)
        torch.save(found, folder / f"{index}.{rank}")
        leave()


def main() -> None:
    cases, folder = [Case(*told) for told in json.loads(sys.argv[1])], Path(sys.argv[2])
    ranks = max(Layout(**case.layout).ranks for case in cases)
    crew = [get_context("fork").Process(target=work, args=(rank, cases, folder)) for rank in range(ranks)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    if any(one.exitcode for one in crew):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
