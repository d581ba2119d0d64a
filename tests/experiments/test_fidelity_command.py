"""`python -m experiments fidelity`: from a plan to pairs, in lines that say what became of them."""

import pytest

from experiments.__main__ import main

PLAN = """
base: [backend=sim, backend.skip_ahead=false, kv.blocks=600, workload.requests=4]
policies: {one: [policy=vllm_v1], two: [policy=orca]}
pools: {full: []}
workloads: {short: {overrides: [workload=poisson], rates: {near: 50}}}
runs: [{policies: all, workloads: all, loads: [near], pools: all}]
"""


@pytest.fixture
def fidelity(tmp_path, capfd):
    (tmp_path / "plan.yaml").write_text(PLAN)

    def call(*words):
        """(exit code, stdout, stderr); PLAN and STUDY stand for this test's own."""
        places = {"PLAN": str(tmp_path / "plan.yaml"), "STUDY": str(tmp_path / "study")}
        capfd.readouterr()
        code = main(["fidelity", *[places.get(word, word) for word in words]])
        return code, *capfd.readouterr()

    return call


def test_from_a_plan_to_pairs(fidelity, tmp_path):
    code, out, _ = fidelity("run", "PLAN", "-o", "STUDY")
    assert (code, out) == (0, f"2 of 2 points are finished in {tmp_path / 'study' / 'hardware'}\n")
    code, out, _ = fidelity("twin", "--cost", "roofline", "-o", "STUDY")
    assert code == 0
    assert [line.split("/")[-1] for line in out.splitlines()] == ["short-near-full-one", "short-near-full-two"]

    (tmp_path / "study" / "hardware" / "short-near-full-one" / "run.json").unlink()
    code, out, err = fidelity("twin", "--cost", "roofline", "-o", "STUDY")  # which takes no other with it
    assert code == 2
    assert err.endswith("short-near-full-one: not the folder of a run: it has no run.json\n")
    assert out.endswith("short-near-full-two was there\n")


def test_overrides_may_stand_anywhere(fidelity):
    for words in (
        ["kv.blocks=7", "-o", "STUDY"],
        ["-o", "STUDY", "kv.blocks=7"],
        ["-o", "STUDY", "--only", "*two", "kv.blocks=7"],
    ):
        code, out, _ = fidelity("run", "PLAN", "--list", *words)
        assert code == 0
        assert all(line.endswith("kv.blocks=7") for line in out.splitlines())
    assert out.startswith("short-near-full-two: ")
    assert out.count("\n") == 1


def test_a_folder_may_be_named_like_an_override(fidelity, tmp_path):
    (tmp_path / "rate=2").mkdir()
    code, _, err = fidelity("twin", str(tmp_path / "rate=2"), "-o", "STUDY")
    assert (code, err) == (2, f"error: {tmp_path / 'rate=2'}: not the folder of a run: it has no run.json\n")


def test_what_is_left_for_want_of_time_is_told(fidelity):
    assert fidelity("run", "PLAN", "-o", "STUDY", "--only", "*one")[0] == 0
    code, out, _ = fidelity("run", "PLAN", "-o", "STUDY", "--budget", "0")
    assert code == 1
    assert "left, for want of time: short-near-full-two; the same command goes on" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "nothing", "-o", "STUDY"], "plan=nothing: No such file"),
        (["run", "PLAN", "-o", "STUDY", "--only", "x*"], "--only x*"),
        (["run", "PLAN", "more", "-o", "STUDY"], "more: no KEY=VALUE"),
        (["run", "PLAN", "-o", "STUDY", "--nope"], "--nope: no such option"),
        (["run", "PLAN", "-o", "/dev/null/study"], "/dev/null/study/hardware: Not a directory"),
        (["run", "PLAN", "-o", "STUDY", "kv.blocks=x"], "kv.blocks=x must be a whole number"),
        (["twin", "-o", "STUDY"], "no finished run; make some with"),
        (["twin", ".", "-o", "STUDY"], ".: not the folder of a run"),
    ],
)
def test_wrong_options_are_told_in_a_line(fidelity, words, told):
    code, _, err = fidelity(*words)
    assert code == 2
    assert told in err
    assert "Traceback" not in err


def test_an_interruption_says_how_to_go_on(fidelity, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.fidelity.hardware.run.execute", interrupted)
    code, _, err = fidelity("run", "PLAN", "-o", "STUDY")
    assert (code, err) == (130, "interrupted: the same command goes on\n")
