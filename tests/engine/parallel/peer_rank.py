"""A rank that exchanges with others and checks what it gets, as a process of its own.

python -m tests.engine.parallel.peer_rank RANK SIZE DEVICE FOLDER ROUNDS

On a CPU (in Triton's interpreter) a file of FOLDER stands for a GPU's memory. Every rank knows what all give, by their
seeds. The last line is a digest of all results that should be the same on every rank.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel import ipc
from engine.parallel.peers import Peers, Ring
from engine.parallel.worker import settle_in

CAPACITY = 1 << 20
SLOTS = 2


def file_memory(folder: Path, rank: int) -> None:
    """Let files be memory that all see."""
    opened: dict[int, Tensor] = {}

    def mapped(path: Path, nbytes: int) -> int:
        memory = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        opened[memory.data_ptr()] = memory
        return memory.data_ptr()

    def allocate(device: torch.device, nbytes: int) -> int:
        path = folder / f"{rank}-{len(opened)}"
        path.write_bytes(bytes(nbytes))
        address = mapped(path, nbytes)
        names[address] = path.name
        return address

    def show(device: torch.device, address: int) -> bytes:
        return f"{names[address]}:{len(opened[address])}".encode().ljust(ipc.HANDLE)

    def open_shown(device: torch.device, handle: bytes) -> int:
        name, nbytes = handle.decode().split(":")
        return mapped(folder / name, int(nbytes))

    names: dict[int, str] = {}
    ipc.identity = lambda device: bytes(16)
    ipc.check_reach = lambda device, other: None
    ipc.allocate, ipc.show, ipc.open_shown = allocate, show, open_shown
    ipc.close_shown = ipc.free = lambda device, address: opened.pop(address)


class Exchanger:
    """One rank: every call is checked against what plain torch makes of what all ranks give."""

    def __init__(self, rank: int, size: int, device: torch.device, rows: int, width: int) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.rows, self.width = rows, width
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter rounds bf16 otherwise
        group = dist.group.WORLD
        self.peers = Peers(group, rank, size, device, CAPACITY)
        pair = dist.new_group([0, size - 1])
        self.gives = rank == size - 1  # against the order of the group
        self.ring = Ring(pair, int(not self.gives), device, CAPACITY, SLOTS) if rank in (0, size - 1) else None
        self.digest = hashlib.sha256()
        self.x = self.made(1 << 20, rows, width)
        self.weight = self.made(1 << 21, width)
        self.parts = [self.made(rank, rows, width) for rank in range(size)]
        self.message = torch.empty_like(self.x)

    def made(self, seed: int, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(self.dtype).to(self.device)

    def renew(self, seed: int) -> None:
        """In place: a graph reads the same tensors again."""
        for rank, part in enumerate(self.parts):
            part.copy_(self.made(seed * self.size + rank, self.rows, self.width))

    def exchange(self) -> dict[str, Tensor]:
        """Every operation once; results that are checked later."""
        mine = self.parts[self.rank]
        added, normed = self.x.clone(), self.x.clone()
        self.peers.add_sum(mine, added)
        found = {"norm": self.peers.add_sum_norm(mine, normed, self.weight, 1e-6), "added": added, "normed": normed}
        found["gather"] = self.peers.gather(mine)
        found["gather_rows"] = self.peers.gather_rows(mine[:3])
        found["scatter_sum"] = self.peers.scatter_sum(mine[: self.rows // self.size * self.size])
        if self.ring is not None:
            if not self.gives:
                self.pause()  # until the ring is full and the other must wait
            for part in self.messages():
                if self.gives:
                    self.ring.put(part)
                else:
                    found["taken"] = torch.cat((found["taken"], self.taken())) if "taken" in found else self.taken()
        return found

    def messages(self) -> list[Tensor]:
        """More than the ring has slots, and never what was in the same slot before."""
        return self.parts + self.parts[::-1]

    def pause(self) -> None:
        if self.device.type == "cpu":
            time.sleep(0.2)
        else:
            torch.cuda._sleep(1_000_000)

    def taken(self) -> Tensor:
        return self.ring.take(self.message).clone()

    def wanted(self) -> dict[str, Tensor]:
        total = torch.zeros(self.rows, self.width, device=self.device)
        for part in self.parts:
            total += part.float()
        added, n = (total + self.x.float()).to(self.dtype), self.rows // self.size
        return {
            "added": added,
            "normed": added,
            "gather": torch.cat(self.parts, 1),
            "gather_rows": torch.cat([part[:3] for part in self.parts]),
            "scatter_sum": total[self.rank * n : self.rank * n + n].to(self.dtype),
        } | ({"taken": torch.cat(self.messages())} if self.ring is not None and not self.gives else {})

    def check(self, found: dict[str, Tensor], where: str) -> None:
        for name, tensor in self.wanted().items():
            assert torch.equal(found[name], tensor), f"rank {self.rank}, {where}: {name} differs"
        wide = found["normed"].float()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()
        bound = 1e-5 if self.dtype == torch.float32 else 2.0**-7
        assert torch.allclose(found["norm"].float(), norm, atol=1e-5, rtol=bound), f"rank {self.rank}, {where}: norm"
        for name in ("added", "norm", "gather"):
            self.digest.update(found[name].cpu().view(torch.uint8).numpy().tobytes())

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        self.peers.close()


def rounds(exchanger: Exchanger, count: int, delay: Callable[[], None]) -> None:
    for number in range(count):
        exchanger.renew(number)
        delay()
        exchanger.check(exchanger.exchange(), f"round {number}")


def replays(exchanger: Exchanger, count: int, delay: Callable[[], None]) -> None:
    """The same from a graph, which must go on counting rounds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = exchanger.exchange()
    for number in range(count):
        exchanger.renew(1000 + number)
        delay()
        graph.replay()
        exchanger.check(found, f"replay {number}")


def main(rank: int, size: int, device: torch.device, folder: Path, count: int) -> None:
    settle_in()  # a rank that waits for one that has died would stay when the test is killed
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    chance = random.Random(rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
        file_memory(folder, rank)
        exchanger = Exchanger(rank, size, device, 3, 2500)
        rounds(exchanger, count, lambda: time.sleep(chance.random() * 0.05))
    else:
        torch.cuda.set_device(device)
        exchanger = Exchanger(rank, size, device, 33, 5120)

        def delay() -> None:
            time.sleep(chance.random() * 2e-3)
            torch.cuda._sleep(chance.randrange(1_000_000))

        rounds(exchanger, count, delay)
        replays(exchanger, 3, delay)
        rounds(exchanger, 3, delay)
    exchanger.close()
    dist.destroy_process_group()
    print(exchanger.digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
