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
    with pytest.raises(
        ValueError, match=rf"attention=triton is not available on cuda \({reason}\); choose one of auto, ref"
    ):
        chosen("attention", "cuda", "triton", need)


def test_libraries_are_there_to_be_chosen_and_say_what_they_leave(as_if_gpu, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(registry, "_has", lambda module: True)
    survey_of = survey("cuda", need=Need(torch.bfloat16, 32, 8, 128))
    told = {name: verdict for op, name, verdict in survey_of if op == "attention"}
    assert told["triton"] == "runs: the fastest that can"
    assert told["cudnn"].startswith("available (takes first chunks of 256 tokens or more outside of graphs, Triton")
    assert "nobody has measured it here" in told["flashinfer"]


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (Need(dtype=torch.float32), "dtype torch.float32, takes float16, bfloat16"),
        (Need(head_dim=80), "head size 80, takes 64, 128, 256"),
        (Need(heads=7, kv_heads=2), "7 query heads over 2 KV heads"),
    ],
)
def test_flashinfer_says_what_it_cannot(as_if_gpu, monkeypatch, need, reason):
    monkeypatch.setattr(registry, "_has", lambda module: True)
    assert IMPLEMENTATIONS["attention"]["flashinfer"].objection("cuda", need) == reason
    monkeypatch.setattr(registry, "_has", lambda module: module == "triton")
    assert "flashinfer is not installed" in IMPLEMENTATIONS["attention"]["flashinfer"].objection("cuda")


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
    told = {(op, name): verdict for op, name, verdict in survey("cpu", {"attention": "reference"})}
    assert told["attention", "reference"].startswith("runs: as chosen (not for the engine on a GPU")
    assert told["rms_norm", "cpu"] == "runs: the fastest that can"
    assert told["pick", "reference"] == "runs: nothing else can"
    assert told["pick", "triton"] == "cannot: runs on cuda only"


def test_list(capsys):
    assert main(["list", "--device", "cpu", "kernels.attention=reference"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "on cpu:"
    assert any(line.split()[:5] == ["attention", "reference", "runs:", "as", "chosen"] for line in lines)
    assert any(line.split()[:3] == ["pick", "triton", "cannot:"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention=fast"], "kernels.attention=fast is not available on cpu; choose one of auto, reference, cpu"),
        (["attention=cpu", "kernels.attention=auto"], "kernels.attention=auto: kernels.attention is chosen twice"),
        (["attend=cpu"], "attend=cpu: not kernels.OP=NAME with OP one of rms_norm, "),
        (["--dtype", "floaty"], "--dtype=floaty: torch has no such dtype"),
    ],
)
def test_list_refuses_in_one_line(capsys, arguments, message):
    assert main(["list", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


@pytest.mark.parametrize("size", ["0", "-3", "many", "1.5"])
def test_sizes_are_whole_numbers(capsys, size):
    with pytest.raises(SystemExit) as ended:
        main(["list", f"--head-dim={size}"])
    assert ended.value.code == 2
    assert f"--head-dim: {size} is not a whole number above 0" in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["list", "--device", "cuda", "--dtype", "float32", "--head-dim", "512"]) == 0
    assert capsys.readouterr().out.startswith("on cuda (there is none here, so a run would refuse):\n")


SIZES = [f"--{name}=64" for name in ("heads", "kv-heads", "head-dim", "hidden", "intermediate", "vocabulary")]


def test_what_could_not_be_kept_is_not_tuned(as_if_gpu, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["tune", *SIZES, f"--folder={tmp_path / 'file' / 'cache'}"]) == 2
    error = capsys.readouterr().err
    assert "Not a directory; give a --folder that you may write to" in error and error.count("\n") == 1


def test_sizes_of_experts_are_given_together(as_if_gpu, capsys, tmp_path):
    pytest.importorskip("triton")
    assert main(["tune", *SIZES, "--experts=8", "--active=2", f"--folder={tmp_path}"]) == 2
    told = "tune: give --experts, --active and --expert-intermediate together, or none of them\n"
    assert capsys.readouterr().err == told


def test_tune_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", *SIZES]) == 2
    assert capsys.readouterr().err == "tune: no CUDA device here; tuning needs a GPU and Triton\n"
