"""Backends with real tensors, made from settings. Torch is imported when one is made, not before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.build import Plan, Simulated
from experiments.settings import SettingError
from playground.backend import Backend

if TYPE_CHECKING:
    from engine.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Engine:
    """One model on one device, in real time.

    `checkpoint` is a Hugging Face folder or a name that the engine prepares itself (default: `model.path`), with
    `weights=random` any model's shape; `dtype` float32, bfloat16, float16 or auto, the model's own (default: float32 on
    a CPU, auto elsewhere); `kernels` names implementations by operation where the fastest is not wanted. On
    `device=cuda`: `cuda_graphs` for steps of nothing but decodes, and the share of the memory to use.
    """

    checkpoint: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    kernels: Mapping[str, str] | None = None
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9
    real_time: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingError(f"backend.gpu_memory_utilization={self.gpu_memory_utilization} must lie in (0, 1]")

    def make(self, plan: Plan) -> Backend:
        _check_single(plan)
        _check_precision(plan)
        _check_torch()
        from engine.memory import whole_or_nothing

        with whole_or_nothing():
            return self._make(plan)

    def _make(self, plan: Plan) -> Backend:
        kv, limits = plan.settings.kv, plan.settings.limits
        return self.backend(
            self.load(plan),
            blocks=kv.blocks,
            block_size=kv.block_size,
            host_blocks=kv.host_blocks,
            max_seqs=limits.max_seqs,
            max_tokens=limits.max_tokens,
        )

    def backend(self, model: Decoder, **sizes: Any) -> Backend:
        """The backend of the model's device; `sizes` as it takes them."""
        if self.on_gpu:
            from engine.cuda.backend import CudaBackend

            return CudaBackend(model, graphs=self.cuda_graphs, memory_utilization=self.gpu_memory_utilization, **sizes)
        from engine.backend import TorchBackend

        return TorchBackend(model, **sizes)

    @property
    def on_gpu(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    def load(self, plan: Plan) -> Decoder:
        settings = plan.settings
        return self.decoder(self.checkpoint or plan.checkpoint, settings.weights, settings.seed)

    def decoder(self, path: str, weights: str, seed: int = 0) -> Decoder:
        """A model with the weights of a checkpoint, or `random` ones of this seed for any model's shape."""
        _check_torch()
        from engine.load import load_model, random_model

        dtype = self.dtype or ("auto" if self.on_gpu else "float32")
        if weights == "random":
            return random_model(path, dtype, self.device, self.kernels, seed)
        return load_model(checkpoint_folder(path), dtype, self.device, self.kernels)

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


def _check_single(plan: Plan) -> None:
    parallel = plan.settings.parallel
    for name in ("stages", "tp", "replicas", "ep"):
        if (value := getattr(parallel, name)) > 1:
            raise SettingError(
                f"parallel.{name}={value}: backend=engine has one device so far; take backend=sim or backend=costed"
            )
    if parallel.overlap not in ("none", "lanes"):  # lanes: one device has nothing to send
        raise SettingError(
            f"parallel.overlap={parallel.overlap}: backend=engine overlaps no exchanges so far; set it to none, or "
            "backend=sim"
        )


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise SettingError(f"backend=engine needs torch: pip install -e '.[engine]' ({error})") from error
