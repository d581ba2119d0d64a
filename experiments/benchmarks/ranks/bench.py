"""What every part of the benchmark uses: the report, the sizes, the machine, and crews of workers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.overlap import NONE, Overlap
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.launch import free_port, spawned
from engine.parallel.layout import Layout
from engine.parallel.supervise import Hire
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.ranks import shapes
from experiments.benchmarks.ranks.sizes import Sizes

ONE = Layout()
PATIENCE = 120.0
"""Seconds after which ranks that wait for one another are given up."""
SHARED = 0.8
"""Of a GPU's memory, what ranks may take together that share it."""


@dataclass(frozen=True)
class Bench:
    """`folder` holds the models' configs. `ranks`: how many have a device of their own; `share_gpus`: more may run."""

    report: Report
    sizes: Sizes
    folder: Path
    device: str
    ranks: int
    hire: Callable[[int], Hire] = spawned
    share_gpus: bool = False

    def model(self, name: str, **changes: Any) -> str:
        """The path of a shipped model's config with some values of its own."""
        return self.written(name, self.config(name) | changes)

    def config(self, name: str) -> dict[str, Any]:
        return shapes.config(name, self.sizes.tiny)

    def written(self, name: str, content: Mapping[str, Any]) -> str:
        return shapes.write(self.folder, f"{name}-{abs(hash(str(content))):x}", content)

    @contextmanager
    def crew(
        self, path: str, layout: Layout = ONE, dtype: str = "bfloat16", overlap: Overlap = NONE, **sizes: Any
    ) -> Iterator[ParallelBackend]:
        """Workers with random weights of a shape, warmed up; `sizes` as backends take them."""
        if (crowded := layout.ranks > self.ranks) and not self.share_gpus:
            raise EngineError(f"needs {layout.ranks} GPUs, and this machine has {self.ranks}")
        given: dict[str, Any] = {"max_seqs": 256, "max_tokens": 8192, "max_length": self.sizes.sequence}
        if self.device == "cpu":  # where nobody says how much memory is there to be used
            given["blocks"] = 400
        elif crowded:
            given["memory_utilization"] = SHARED / layout.ranks
        backend = ParallelBackend(
            WorkerConfig(
                path=path,
                layout=layout,
                rendezvous=f"tcp://127.0.0.1:{free_port('127.0.0.1')}",
                weights="random",
                dtype=dtype if self.device == "cuda" else "float32",
                device=self.device,
                sizes=given | sizes,
                patience=PATIENCE,
                share_gpus=self.share_gpus,
                overlap=overlap,
            ),
            self.hire(layout.ranks),
        )
        try:
            backend.now()
            yield backend
        finally:
            backend.close()
