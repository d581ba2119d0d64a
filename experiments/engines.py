"""Backends with real tensors, made from settings. Torch is imported when one is made, not before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.build import Plan, Simulated
from experiments.settings import SettingError
from playground.backend import Backend

if TYPE_CHECKING:
    from engine.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Engine:
    """One model on one device, in real time.

    `checkpoint` is a Hugging Face folder or a name that the engine prepares itself (default: `model.path`); `dtype`
    float32, bfloat16, float16 or auto; `kernels` names implementations by operation where the fastest is not wanted.
    """

    checkpoint: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    kernels: Mapping[str, str] | None = None

    def make(self, plan: Plan) -> Backend:
        _check_single(plan)
        model = self.load(plan)
        from engine.backend import TorchBackend

        kv, limits = plan.settings.kv, plan.settings.limits
        return TorchBackend(
            model,
            blocks=kv.blocks,
            block_size=kv.block_size,
            host_blocks=kv.host_blocks,
            max_seqs=limits.max_seqs,
            max_tokens=limits.max_tokens,
        )

    def load(self, plan: Plan) -> Decoder:
        _check_torch()
        from engine.load import load_model

        return load_model(checkpoint_folder(self.checkpoint or plan.checkpoint), self.dtype, self.device, self.kernels)

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
            "or one of tiny, smollm2-135m, which it prepares itself"
        )
    return Path(checkpoint)


def _check_single(plan: Plan) -> None:
    parallel = plan.settings.parallel
    for name in ("stages", "tp", "replicas"):
        if (value := getattr(parallel, name)) > 1:
            raise SettingError(
                f"parallel.{name}={value}: backend=engine has one device so far; take backend=sim or backend=costed"
            )


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise SettingError(f"backend=engine needs torch: pip install -e '.[engine]' ({error})") from error
