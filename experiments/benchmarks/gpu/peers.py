"""What an exchange between GPUs of one host costs by size: by peer loads, and by NCCL.

    python -m experiments.benchmarks.gpu.peers --out OUT [--ranks 2]

Starts a process for each rank and writes OUT/gpu_peers.json. Where there are fewer GPUs than ranks, all ranks share the
first: that shows that exchanges work; their times are then those of the GPU's turns between processes, and there is no
NCCL, which refuses that.

Method: a graph of many calls, replayed between two events, after a barrier of the hosts; the median over replays on
each rank, and of these the slowest rank's, in microseconds a call. Sizes are what one rank gives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.benchmarks.gpu.facts import facts
from kernels.triton.norm import add_rms_norm

SHAPES = [(rows, 4096) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)] + [(32, 5120)]
"""In bf16: 8 KiB to 4 MiB, and the hidden states of a decode step of Qwen3-32B with 32 sequences."""

PATIENCE = 60.0
"""Seconds that a rank waits for others."""

Call = Callable[[], Any]


class Rank:
    """One rank's process: its device, and the ways in which it exchanges."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        from engine.parallel.peers import Peers, Ring

        self.rank, self.size = rank, size
        self.alone = torch.cuda.device_count() >= size
        self.device = torch.device("cuda", rank if self.alone else 0)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/ranks",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PATIENCE),
        )
        self.nccl = dist.new_group(backend="nccl") if self.alone else None
        capacity = max(rows * width * 2 for rows, width in SHAPES)
        self.peers = Peers(dist.group.WORLD, rank, size, self.device, capacity)
        pair = dist.new_group([0, 1])
        self.ring = Ring(pair, rank, self.device, capacity) if rank < 2 else None

    def calls(self, x: Tensor) -> Iterator[tuple[str, str, Call]]:
        """(operation, by what, call) for a message of each rank like x [rows, width]."""
        total, weight, flat = x.clone(), torch.ones_like(x[0]), x.view(self.size, -1)
        yield "add_sum", "peers", lambda: self.peers.add_sum(x, total)
        yield "add_sum_norm", "peers", lambda: self.peers.add_sum_norm(x, total, weight, 1e-6)
        yield "gather_rows", "peers", lambda: self.peers.gather_rows(x)
        yield "scatter_sum", "peers", lambda: self.peers.scatter_sum(flat)
        if (ring := self.ring) is not None:
            yield "put, take", "peers", (lambda: ring.put(x)) if self.rank == 0 else (lambda: ring.take(x))
        else:
            yield "put, take", "peers", lambda: None
        if self.nccl is not None:
            yield from self._nccl_calls(x, total, weight, flat)

    def _nccl_calls(self, x: Tensor, total: Tensor, weight: Tensor, flat: Tensor) -> Iterator[tuple[str, str, Call]]:
        group = self.nccl
        gathered, scattered = x.new_empty(self.size * len(x), x.shape[1]), torch.empty_like(flat[0])

        def reduced() -> Tensor:
            dist.all_reduce(x, group=group)
            return x

        yield "all_reduce alone", "nccl", reduced
        yield "add_sum", "nccl", lambda: total.add_(reduced())
        yield "add_sum_norm", "nccl", lambda: add_rms_norm(total, reduced(), weight, 1e-6)
        yield "gather_rows", "nccl", lambda: dist.all_gather_into_tensor(gathered, x, group=group)
        yield "scatter_sum", "nccl", lambda: dist.reduce_scatter_tensor(scattered, flat.flatten(), group=group)
        if self.rank < 2:
            yield "put, take", "nccl", lambda: (dist.recv if self.rank else dist.send)(x, 1 - self.rank, group=group)
        else:
            yield "put, take", "nccl", lambda: None

    def microseconds(self, call: Call) -> float:
        """The same number of calls on every rank, whatever a call takes."""
        calls, replays = (50, 20) if self.alone else (4, 5)
        for _ in range(3):
            call()  # compiled, connected
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, capture_error_mode="thread_local"
        ):  # NCCL's watchdog asks for its events meanwhile
            for _ in range(calls):
                call()
        spans = []
        for _ in range(replays):
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(start.elapsed_time(end) * 1e3 / calls)
        slowest = torch.tensor(statistics.median(spans))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def measured(self) -> list[dict[str, Any]]:
        rows = []
        for shape in SHAPES:
            x = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)  # sums of sums would overflow
            rows += [
                {"operation": name, "by": by, "shape": list(shape), "bytes": x.nbytes, "us": self.microseconds(call)}
                for name, by, call in self.calls(x)
            ]
        return rows

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        self.peers.close()
        dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """A line a shape, a column an operation and way."""
    columns = list(dict.fromkeys((row["operation"], row["by"]) for row in rows))
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    found = {(tuple(row["shape"]), row["operation"], row["by"]): row["us"] for row in rows}
    names = [f"{operation} ({by})" for operation, by in columns]
    lines = ["us a call".ljust(12) + " ".join(names)]
    for shape in shapes:
        cells = [f"{found[shape, *column]:.1f}".rjust(len(name)) for name, column in zip(names, columns, strict=True)]
        lines.append(f"{shape[0]} x {shape[1]}".ljust(12) + " ".join(cells))
    return "\n".join(lines)


def run_rank(number: int, size: int, folder: Path, out: Path, commit: str) -> None:
    """In a process of its own; the first writes what was found."""
    rank = Rank(number, size, folder)
    rows = rank.measured()
    if number == 0:
        print(table(rows))
        found = {
            "versions": facts(commit),
            "ranks": size,
            "gpus_of_their_own": rank.alone,
            "method": __doc__,
            "rows": rows,
        }
        (out / "gpu_peers.json").write_text(json.dumps(found, indent=1))
    rank.close()


def run_all(size: int, out: Path, limit: float, commit: str) -> int:
    """Starts all ranks; one that fails ends the others, which wait for it. The exit code."""
    # Never NVLink multicast: it can put GPUs out of service that others share.
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "experiments.benchmarks.gpu.peers"]
    command += ["--out", str(out), "--ranks", str(size), "--commit", commit]
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--folder", folder], env=environment)
            for rank in range(size)
        ]
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    failed = [rank for rank, code in enumerate(codes) if code]
    if None in codes:
        why = f"ranks {failed} have failed" if failed else f"not all ranks have ended after {limit} s"
        print(why, file=sys.stderr)
    return int(any(code != 0 for code in codes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for gpu_peers.json; or $OUT")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--commit", default="", help="of this tree, where it lies without its history")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which all ranks are ended")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is None:
        parser.error("--out: no folder given, and $OUT is not set")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if options.rank is not None:
        run_rank(options.rank, options.ranks, options.folder, options.out, options.commit)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    sys.exit(run_all(options.ranks, options.out, options.limit, options.commit))


if __name__ == "__main__":
    main()
