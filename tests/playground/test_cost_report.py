"""The error report: sources read, errors by hand, and the command from fit to evaluation."""

import numpy as np
import pytest

from playground.model import ModelShape
from playground.sim.cost import Linear, report
from playground.sim.cost.__main__ import _device, _sheets, main

STEPS = """prefills,decodes,context,seconds,source
0:100,0,0,1.0,one
50:10|0:20,2,300,2.0,one
,4,400,0.5,two
"""
SPLITWISE = """model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel
llama2-70b,a100-80gb,512,2,128,100.0,50.0,4
llama2-70b,a100-80gb,512,2,128,110.0,52.0,4
llama2-70b,a100-80gb,512,2,128,130.0,60.0,4
llama2-70b,a100-80gb,512,2,128,112.0,54.0,4
llama2-70b,h100-80gb-pcap,512,2,128,1.0,1.0,4
bloom-176b,a100-80gb,512,2,128,1.0,1.0,8
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(STEPS)
    return path


def compared(file, base: float):
    return report.compare(report.read(str(file), "all"), lambda setup: Linear(base), 1)


def test_errors_by_hand(file):
    """1 s against 1, 2 and 0.5: 0, -50 and +100 %."""
    error = report.error_of(compared(file, 1.0))
    assert (error.steps, error.mape, error.median, error.bias) == (3, 0.5, 0.5, pytest.approx(0.5 / 3))
    assert error.p95 == pytest.approx(np.percentile([0, 0.5, 1], 95))


def test_the_table_has_a_row_for_each_source_and_kind(file):
    header, *rows = report.lines(compared(file, 1.0))
    assert header.split() == ["source", "region", "steps", "MAPE", "median", "P95", "bias"]
    assert [row.split()[:3] for row in rows] == [
        ["one", "mixed", "1"],
        ["one", "prefill", "1"],
        ["two", "decode", "1"],
        ["all", "3", "50.0%"],
    ]
    assert next(report.worst(compared(file, 1.0), 1)).split()[0] == "+100.0%"


def test_steps_are_read_as_written(file):
    prefill, mixed, decode = (one.shape for one in report.read(str(file), "all"))
    assert (prefill.tokens, prefill.prefill_pairs, prefill.decodes) == (100, 5050, 0)
    assert mixed.chunks == ((50, 10), (0, 20))
    assert (mixed.tokens, mixed.sequences, mixed.decode_context) == (32, 4, 300)
    assert (decode.tokens, decode.decode_longest) == (4, 100)


def test_every_step_can_be_written(file, tmp_path):
    report.write(tmp_path / "out.csv", compared(file, 1.0))
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[3] == "two,decode,4,4,400,0,1.0,0.5"


@pytest.mark.parametrize(("split", "prefill", "decode"), [("test", 111, 53), ("fit", 115, 55), ("all", 111, 53)])
def test_splitwise_medians_of_a_split(tmp_path, split, prefill, decode):
    (tmp_path / "perf_model.csv").write_text(SPLITWISE)
    first, second = report.read(str(tmp_path / "perf_model.csv"), split)
    assert first.setup == report.Setup("llama-2-70b", "a100_80", 4)
    assert (first.shape.chunks, first.seconds) == (((0, 512), (0, 512)), pytest.approx(prefill / 1e3))
    assert (second.shape.decode_context, second.seconds) == (2 * 576, pytest.approx(decode / 1e3))


def test_what_is_no_source_is_told(tmp_path, file):
    with pytest.raises(ValueError, match="no source of steps: give a run's folder"):
        report.read(str(tmp_path / "nothing"), "all")
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="of no known source"):
        report.read(str(file), "all")
    file.write_text("prefills,decodes,context,seconds\n0:5,1,1,0\n")
    with pytest.raises(ValueError, match="line 2: needs tokens, and seconds above 0"):
        report.read(str(file), "all")


def test_sheets_are_read_without_a_yaml_reader():
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    for name, text in _sheets().items():
        assert _device(name) == instantiate(OmegaConf.create(text)), name


class TestCommand:
    ROOFLINE = ("--model", "llama-3.1-8b", "--device", "rtx4090")

    def test_a_profile_holds_the_roofline_to_account(self, capsys):
        source = "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"
        assert main(["evaluate", source, *self.ROOFLINE, "--cost", "roofline", "profiled"]) == 0
        out = capsys.readouterr().out
        roofline, profiled = out.split("\nprofiled\n")
        decode = next(line for line in roofline.splitlines() if " decode " in line)
        assert float(decode.split()[3].rstrip("%")) < 5  # MAPE of 99 decode steps: 3.9 %
        assert all(line.split()[-4:] == ["0.0%", "0.0%", "0.0%", "+0.0%"] for line in profiled.splitlines()[1:4])

    def test_from_a_csv_with_two_models(self, file, tmp_path, capsys):
        command = ["evaluate", str(file), *self.ROOFLINE, "--csv", str(tmp_path / "out.csv"), "--worst", "1"]
        assert main(command) == 0
        assert "measured  2000.000 ms" in capsys.readouterr().out
        assert len((tmp_path / "out.csv").read_text().splitlines()) == 4

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["--device", "rtx4090"], "--model is needed"),
            (["--model", "llama-3.1-8b"], "--device is needed"),
            (["--model", "llama-3.1-8b", "--device", "abacus"], "--device abacus: no such sheet"),
            ([*ROOFLINE, "--cost", "fitted"], "--fit is needed"),
        ],
    )
    def test_what_is_missing_is_told_in_a_line(self, file, arguments, problem, capsys):
        assert main(["evaluate", str(file), *arguments]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1

    def test_help_teaches(self, capsys):
        for command, word in ([], "fitted"), (["evaluate"], "perf_model.csv"), (["fit"], "held out"):
            with pytest.raises(SystemExit):
                main([*command, "--help"])
            assert word in capsys.readouterr().out


def test_an_interpolation_error_on_points_off_the_grid():
    """Two sweeps were profiled; the second one tells how good straight lines between the first are: 1.7 % (mixed)."""
    from playground.sim.cost import Profiled

    model, device = ModelShape.read("qwen3-32b"), _device("rtxpro6000")
    cost = Profiled(model, device, tp=2)
    chunks, *_ = cost.measured.attention[None].mixed.axes
    off = [
        one
        for one in report.read("RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2", "all")
        if one.shape.decodes and one.shape.prefill_tokens and one.shape.prefill_tokens not in chunks
    ]
    error = report.error_of(report.compare(off, lambda setup: cost, 1))
    assert error.steps > 5000
    assert error.mape < 0.025
    assert abs(error.bias) < 0.015
