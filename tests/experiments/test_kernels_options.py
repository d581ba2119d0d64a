"""Options of the engine and its kernels by short names: `kernels.attention=...`, `engine.cuda_graphs=...`."""

import json

import pytest

pytest.importorskip("torch")

ENGINE = ("backend=engine", "model=tiny", "kv.blocks=200", "workload.requests=2", "workload.rate=50")


@pytest.mark.parametrize(
    "argument",
    ["kernels.attention=reference", "kernels={attention: reference}",
     "backend.kernels.attention=reference", "engine.kernels.attention=reference"],
)  # fmt: skip
def test_a_kernel_is_chosen(playground, argument):
    """As it is written into the run's configuration."""
    outcome = playground("--cfg", "job", "--package", "backend", *ENGINE, argument)
    assert outcome.code == 0
    assert "kernels:\n  attention: reference\n" in outcome.out


def test_the_engine_inside_another_backend_is_found(playground):
    arguments = ("backend=costed", "model=tiny", "kernels.attention=reference", "engine.dtype=float32")
    outcome = playground("--cfg", "job", "--package", "backend.engine", *arguments)
    assert outcome.code == 0
    assert "dtype: float32" in outcome.out and "kernels:\n  attention: reference\n" in outcome.out


def test_a_run_with_both(playground):
    outcome = playground(*ENGINE, "kernels.attention=reference", "kernels.linear=auto", "engine.cuda_graphs=false")
    assert outcome.code == 0
    config = (outcome.run_dir / "config.yaml").read_text()
    assert "cuda_graphs: false" in config and "attention: reference" in config


def test_a_sweep_over_implementations(playground):
    outcome = playground("-m", *ENGINE, "kernels.attention=cpu,reference")
    assert outcome.code == 0
    rows = json.loads((outcome.folder / outcome.last["sweep_dir"] / "sweep.json").read_text())
    assert [row["backend.kernels.attention"] for row in rows] == ["cpu", "reference"]


CASES = {
    "kernels.attention=fast": "kernels.attention=fast is not available on cpu; choose one of auto, reference, cpu",
    "kernels.attention=triton": "kernels.attention=triton is not available on cpu (runs on cuda only); choose",
    "kernels.attention=null": "kernels.attention=None is not available on cpu; choose one of auto, reference, cpu",
    "kernels.attend=cpu": "kernels.attend=cpu: no such operation; there are rms_norm, add_rms_norm, ",
    "+kernels.attention=cpu": "+kernels: nothing takes it; without the + you would be told what there is",
    "kernels=reference": "backend.kernels=reference must be a mapping or null",
    "engine.cuda_graph=false": "backend.cuda_graph=false: unknown option; did you mean cuda_graphs?",
    "engine.cuda_graphs=maybe": "backend.cuda_graphs=maybe must be true or false",
}


@pytest.mark.parametrize(("argument", "message"), CASES.items())
def test_what_cannot_be_is_told_in_one_line(playground, argument, message):
    outcome = playground(*ENGINE, argument)
    assert outcome.code == 2
    line = outcome.err.splitlines()[-1]
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize("argument", ["kernels.attention=cpu", "engine.cuda_graphs=false"])
def test_a_simulation_has_neither(playground, argument):
    outcome = playground(argument)
    assert outcome.code == 2
    assert outcome.err.splitlines() == [f"error: {argument}: only an engine has that: add backend=engine"]
