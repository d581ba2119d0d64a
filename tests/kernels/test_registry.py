"""What runs where, and what `python -m kernels list` says of it."""

import pytest
import torch

from kernels import registry
from kernels.__main__ import main
from kernels.registry import IMPLEMENTATIONS, Implementation, Need, available, chosen, select, survey


@pytest.fixture
def as_if_gpu(monkeypatch):
    """A machine with an H200, as far as the registry can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_every_operation_has_a_reference_first():
    assert all(next(iter(entries)) == "reference" for entries in IMPLEMENTATIONS.values())


def test_auto_is_the_fastest():
    assert select("cpu", {"attention": "auto"}).attention is IMPLEMENTATIONS["attention"]["cpu"].kernel


def test_without_a_gpu_the_reference_is_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available("attention", "cuda") == ("reference",)
    with pytest.raises(ValueError, match=r"attention=triton is not available on cuda \(no CUDA device here\); choose"):
        select("cuda", {"attention": "triton"})


def test_an_old_gpu_is_refused(as_if_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match=r"\(compute capability 7\.5, needs 8\.0\)"):
        select("cuda", {"pick": "triton"})


def test_on_a_gpu_triton_is_the_default(as_if_gpu):
    pytest.importorskip("triton")
    from kernels.triton.attention import Attention

    assert select("cuda").attention is Attention
    assert chosen("attention", "cuda") == "triton"
    assert select("cuda", {"attention": "cudnn"}).attention is not Attention


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (Need(head_dim=512), "head size 512, at most 256"),
        (Need(heads=7, kv_heads=2), "7 query heads over 2 KV heads"),
        (Need(dtype=torch.float64), "dtype torch.float64, takes float32, float16, bfloat16"),
    ],
)
def test_what_a_kernel_cannot_do_it_is_not_chosen_for(as_if_gpu, need, reason):
    pytest.importorskip("triton")
    assert chosen("attention", "cuda", need=need) == "reference"
    with pytest.raises(ValueError, match=rf"attention=triton is not available on cuda \({reason}\); choose one of ref"):
        chosen("attention", "cuda", "triton", need)


def test_cudnn_takes_halves_only(as_if_gpu):
    pytest.importorskip("triton")
    assert "cudnn" in available("attention", "cuda", Need(dtype=torch.bfloat16))
    assert "cudnn" not in available("attention", "cuda", Need(dtype=torch.float32))


def test_a_missing_triton_is_said(as_if_gpu, monkeypatch):
    monkeypatch.setattr(registry, "_has", lambda module: False)
    assert IMPLEMENTATIONS["pick"]["triton"].objection("cuda") == "triton is not installed"


def test_a_condition_is_told_as_a_reason():
    assert Implementation(print, condition=lambda: False).objection("cpu") == "not supported by this build of torch"


def test_survey_names_one_runner_an_operation():
    running = [op for op, _, verdict in survey("cpu", {"attention": "reference"}) if verdict.startswith("runs")]
    assert running == list(IMPLEMENTATIONS)
    assert ("attention", "reference", "runs: as chosen") in list(survey("cpu", {"attention": "reference"}))


def test_list(capsys):
    assert main(["list", "--device", "cpu", "kernels.attention=reference"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "on cpu:"
    assert any(line.split() == ["attention", "reference", "runs:", "as", "chosen"] for line in lines)
    assert any(line.split()[:3] == ["pick", "triton", "cannot:"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention=fast"], "kernels.attention=fast is not available on cpu; choose one of reference, cpu"),
        (["attend=cpu"], "attend=cpu: not kernels.OP=NAME with OP one of rms_norm, "),
        (["--dtype", "floaty"], "--dtype=floaty: torch has no such dtype"),
    ],
)
def test_list_refuses_in_one_line(capsys, arguments, message):
    assert main(["list", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_tune_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"heads": 4, "kv-heads": 2, "head-dim": 64, "hidden": 256, "intermediate": 512, "vocabulary": 1000}
    assert main(["tune", *(f"--{name}={value}" for name, value in sizes.items())]) == 2
    assert capsys.readouterr().err == "tune: no CUDA device here; tuning needs a GPU and Triton\n"
