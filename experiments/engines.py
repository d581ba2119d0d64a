"""Backends with real tensors, made from settings. Torch is imported when one is made, not before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine.overlap import NONE, Overlap
from experiments.build import Plan, Simulated
from experiments.settings import Parallel, SettingError
from playground.backend import Backend
from playground.sim.system import check_overlap

if TYPE_CHECKING:
    from engine.models.decoder import Decoder
    from engine.parallel.layout import Layout
    from engine.parallel.supervise import Hire


@dataclass(frozen=True, slots=True)
class Engine:
    """One model in real time: on one device in this process, or a share of it on each of many ranks.

    `checkpoint` is a Hugging Face folder or a name that the engine prepares itself (default: `model.path`), with
    `weights=random` any model's shape; `dtype` float32, bfloat16, float16 or auto, the model's own (default: float32 on
    a CPU, auto elsewhere); `kernels` names implementations by operation where the fastest is not wanted. On
    `device=cuda`: `cuda_graphs` for steps of nothing but decodes, and the share of the memory to use. `patience`:
    seconds after which a rank that does not answer is an error (`parallel.{stages,tp,replicas}`; docs/parallel.md).
    `share_gpus`: ranks may outnumber GPUs, for tests and development.
    """

    checkpoint: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    kernels: Mapping[str, str] | None = None
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9
    patience: float = 120.0
    share_gpus: bool = False
    real_time: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingError(f"backend.gpu_memory_utilization={self.gpu_memory_utilization} must lie in (0, 1]")

    def make(self, plan: Plan) -> Backend:
        _check_parallel(plan)
        _check_precision(plan)
        _check_torch()
        if layout_of(plan.settings.parallel).ranks > 1:  # what no layout can be, is an error for one rank, too
            return self._spread(plan)
        from engine.memory import whole_or_nothing

        with whole_or_nothing():
            return self.backend(self.load(plan), **_sizes(plan))

    def backend(self, model: Decoder, **sizes: Any) -> Backend:
        """The backend of the model's device; `sizes` as it takes them."""
        if self.on_gpu:
            from engine.cuda.backend import CudaBackend

            return CudaBackend(model, **self._manners(), **sizes)
        from engine.backend import TorchBackend

        return TorchBackend(model, **sizes)

    def _manners(self) -> dict[str, Any]:
        """What only a backend on a GPU takes."""
        if not self.on_gpu:
            return {}
        return {"graphs": self.cuda_graphs, "memory_utilization": self.gpu_memory_utilization}

    def _spread(self, plan: Plan) -> Backend:
        """A worker process for each rank; what no rank could use is told before any is started."""
        settings = plan.settings
        path = str(self.checkpoint or plan.checkpoint)
        if settings.weights != "random":
            path = str(checkpoint_folder(path))
        overlap = overlap_of(settings.parallel)
        return self.spread(path, layout_of(settings.parallel), settings.weights, settings.seed, overlap, **_sizes(plan))

    def spread(
        self, path: str, layout: Layout, weights: str, seed: int = 0, overlap: Overlap = NONE, **sizes: Any
    ) -> Backend:
        """Workers of this host, one a rank; or those that `torchrun` has started, if it has started this process.

        `path` is a checkpoint's folder, with `weights=random` any model's shape; `sizes` as backends take them.
        """
        from engine.config import find_config
        from engine.parallel.backend import ParallelBackend
        from engine.parallel.config import WorkerConfig
        from engine.parallel.layout import local_config

        local_config(find_config(path), layout, layout.place(0))
        hire, rendezvous = self._crew(layout.ranks)
        config = WorkerConfig(
            path=path,
            layout=layout,
            rendezvous=rendezvous,
            weights=weights,
            seed=seed,
            dtype=self._dtype,
            device=self.device,
            kernels=self.kernels,
            sizes=sizes | self._manners(),
            patience=self.patience,
            share_gpus=self.share_gpus,
            overlap=overlap,
        )
        return ParallelBackend(config, hire)

    def _crew(self, ranks: int) -> tuple[Hire, str]:
        """Who computes, and where they meet one another."""
        from engine.parallel.launch import Torchrun, free_port, gathered, secret, spawned

        if (here := Torchrun.here(os.environ)) is None:
            return spawned(ranks), f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
        return gathered(here, secret(os.environ), self.patience), f"tcp://{here.address}:{here.port + 1}"

    @property
    def _dtype(self) -> str:
        return self.dtype or ("auto" if self.on_gpu else "float32")

    @property
    def on_gpu(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    def load(self, plan: Plan) -> Decoder:
        settings = plan.settings
        overlap = overlap_of(settings.parallel)
        return self.decoder(self.checkpoint or plan.checkpoint, settings.weights, settings.seed, overlap)

    def decoder(self, path: str, weights: str, seed: int = 0, overlap: Overlap = NONE) -> Decoder:
        """A model with the weights of a checkpoint, or `random` ones of this seed for any model's shape."""
        _check_torch()
        from engine.load import LONE, load_model, random_model

        share = replace(LONE, part=replace(LONE.part, overlap=overlap))
        if weights == "random":
            return random_model(path, self._dtype, self.device, self.kernels, seed, share)
        return load_model(checkpoint_folder(path), self._dtype, self.device, self.kernels, share)

    def where(self, plan: Plan) -> str:
        return self.device


@dataclass(frozen=True, slots=True)
class Costed:
    """Real tensors on the simulator's clock: pipelines, replicas and run-ahead with real tokens on one CPU.

    `blocks` holds where `kv.blocks` says nothing: the pool that fits the simulated device rarely fits this machine.
    """

    simulated: Simulated
    engine: Engine
    blocks: int = 4096

    def make(self, plan: Plan) -> Backend:
        model = self.engine.load(plan)
        from engine.costed import CostedBackend

        return CostedBackend(model, self.simulated.make(self._capped(plan)))

    def _capped(self, plan: Plan) -> Plan:
        kv = plan.settings.kv
        if kv.blocks is not None:
            return plan
        return replace(plan, settings=replace(plan.settings, kv=replace(kv, blocks=self.blocks)))

    def where(self, plan: Plan) -> str:
        return self.simulated.where(plan)


def checkpoint_folder(checkpoint: str) -> Path:
    """The names that the engine prepares itself, else a folder."""
    if checkpoint == "tiny":
        from engine.tiny import tiny

        return tiny()
    if checkpoint == "smollm2-135m":
        from engine.smollm import smollm

        return smollm()
    if not Path(checkpoint).is_dir():
        raise SettingError(
            f"model.path={checkpoint}: the engine needs a Hugging Face folder with weights, "
            "or one of tiny, smollm2-135m, which it prepares itself, or weights=random"
        )
    return Path(checkpoint)


def _check_precision(plan: Plan) -> None:
    for name in ("weights", "experts", "kv"):
        if (value := getattr(plan.model.precision, name)) is not None:
            raise SettingError(
                f"model.{name}={value}: the engine computes in dtypes only; set it to null, or backend=sim"
            )


def _sizes(plan: Plan) -> dict[str, Any]:
    """Of a rank's pools and steps, as backends take them."""
    kv, limits = plan.settings.kv, plan.settings.limits
    return dict(
        blocks=kv.blocks,
        block_size=kv.block_size,
        host_blocks=kv.host_blocks,
        max_seqs=limits.max_seqs,
        max_tokens=limits.max_tokens,
    )


def layout_of(parallel: Parallel) -> Layout:
    """Which rank is where."""
    from engine.parallel.layout import Layout

    return Layout(
        parallel.stages,
        parallel.tp,
        parallel.replicas,
        tuple(parallel.layers or ()),
        lockstep=parallel.dp_attention,
        ep=parallel.ep,
        exchange=parallel.exchange,
        spare_layers=parallel.spare_layers,
    )


def overlap_of(parallel: Parallel) -> Overlap:
    """What ranks compute beside their exchanges; lanes are their policy's."""
    kind = "none" if parallel.overlap == "lanes" else parallel.overlap
    return Overlap(kind, parallel.overlap_rows, parallel.overlap_threshold, parallel.overlap_chunks)


def _check_parallel(plan: Plan) -> None:
    """What the engine's ranks do not do yet, and what there is nothing to do for."""
    parallel = plan.settings.parallel
    check_overlap(parallel.overlap, plan.model, plan.tp, parallel.dp_attention)
    if parallel.padding != "graphs":
        raise SettingError(
            f"parallel.padding={parallel.padding}: backend=engine does not do that so far; set it to graphs, or take "
            "backend=sim"
        )


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise SettingError(f"backend=engine needs torch: pip install -e '.[engine]' ({error})") from error
