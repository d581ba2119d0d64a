"""Backends over fake workers, for tests of what is between driver and workers."""

import json
import os
import sys
import time
from pathlib import Path

from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.launch import spawned
from engine.parallel.layout import Layout
from playground.core import Request, Sampling, Slice, Step

COMMAND = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))
PROMPT = (5, 6, 7)


def config(layout, patience=60.0, **asked):
    sizes = {"blocks": 64, "max_seqs": 8}
    return WorkerConfig(json.dumps(asked), layout, "file:///nowhere", sizes=sizes, patience=patience)


def fake(patience=60.0, sizes=None, **asked):
    """`sizes`: of the layout; `asked`: see `fake_worker`."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])
    layout = Layout(**(sizes or {}))
    return ParallelBackend(config(layout, patience, **asked), spawned(layout.ranks, COMMAND))


def processes(backend):
    return [peer.process for peer in backend._crew._peers]


def prefill(step, group=0, **more):
    request = Request(100 + group, 0.0, len(PROMPT), 50, prompt=PROMPT, sampling=Sampling(ignore_eos=True))
    part = Slice(100 + group, 0, group, 0, len(PROMPT), True, (0,))
    return Step(step, group, 0.0, (part,), starts=(request,), **more)


def decode(step, start, group=0):
    return Step(step, group, 0.0, (Slice(100 + group, 0, group, start, 1, True, ()),))


def gone(pid, seconds=3.0):
    """Whether a process is no more (or nobody but its parent has yet to notice), after a while at the latest."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False
