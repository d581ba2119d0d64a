"""A rank of a test, as a process of its own: computes a prompt's logits, or what its stage gives, and prints them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

PROGRAM = """
import json, sys, torch
from engine.config import find_config
from engine.kv import KvPool
from engine.load import Share, load_model, random_model
from engine.models.decoder import Inputs
from engine.parallel.comm import join, leave
from engine.parallel.layout import Layout
from kernels.batch import PagedBatch

asked = json.loads(sys.argv[1])
layout = Layout(**asked["layout"])
torch.set_num_threads(1)
experts = find_config(asked["path"]).shape.experts
part = join(layout, asked["rank"], asked["method"], torch.device("cpu"), 60.0, experts and experts.count)
make = random_model if asked["random"] else load_model
model = make(asked["path"], "float32", share=Share(layout, layout.place(asked["rank"]), part))
pool = KvPool(model.shape, 8, 4, torch.float32)
with torch.inference_mode():
    place = layout.place(asked["rank"])
    for turn, (start, ids) in enumerate(asked["chunks"][place.replica if layout.lockstep else 0]):
        count, size = len(ids), 4
        pooled = tuple(len(chunks[turn][1]) for chunks in asked["chunks"]) if layout.lockstep else ()
        positions = torch.arange(start, start + count)
        pages = PagedBatch([start], [count], torch.arange(8)[None], size)
        rows = torch.tensor([count - 1]) if count else None
        tokens = torch.tensor(ids, dtype=torch.int64)
        logits = model(Inputs(tokens, positions, positions, rows, pages, pooled), pool)
print(json.dumps(logits.tolist()))
leave()
"""


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Chunks = list[tuple[int, list[int]]]


def logits(path: str | Path, chunks: Chunks | list[Chunks], layout: dict, random: bool = False) -> list[list]:
    """What every rank of a layout has after a prompt in chunks of (start, ids): logits of the last token.

    In lockstep `chunks` are as many for each replica, of which some may be empty.
    """
    chunks = chunks if layout.get("lockstep") else [chunks]
    ranks = layout.get("stages", 1) * layout.get("tp", 1) * layout.get("replicas", 1)
    asked = dict(layout=layout, method=f"tcp://127.0.0.1:{free_port()}", path=str(path), chunks=chunks, random=random)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    running = [
        subprocess.Popen(
            [*command, json.dumps(asked | {"rank": rank})], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running)
    return [json.loads(output.splitlines()[-1]) for output in outputs]
