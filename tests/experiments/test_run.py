"""One run from the command line: what it prints, what it leaves, and what it must not load."""

import json
import subprocess
import sys
from pathlib import Path
from signal import SIGINT, SIGTERM, default_int_handler, raise_signal, signal

import pytest

from experiments.run import _claim
from experiments.settings import SettingError
from playground.trace import SCHEMAS

SMALL = ("workload.requests=12", "workload.rate=20", "kv.blocks=600")


def test_a_run_leaves_its_folder(playground):
    outcome = playground(*SMALL, "seed=3", "slo.ttft=10")
    assert outcome.code == 0
    assert outcome.err == ""
    names = {path.name for path in outcome.run_dir.iterdir()}
    assert names >= {"config.yaml", "run.json", "summary.json"} | {f"{table}.parquet" for table in SCHEMAS}
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    assert summary["completed"] == 12
    assert summary["slo_attainment"] == 1.0
    assert outcome.last == {"run_dir": str(outcome.run_dir)} | summary


def test_the_folder_tells_where_it_comes_from(playground):
    run = json.loads((playground(*SMALL, "seed=3").run_dir / "run.json").read_text())
    assert (run["seed"], run["backend"], run["device"], run["ended"]) == (3, "SimBackend", "H100", "completed")
    assert run["policy"]["_target_"] == "policies.composed.Composed"
    assert run["policy"]["budget"]["_target_"] == "policies.budget.ChunkedPrefill"
    assert run["spec"]["blocks"] == 600
    assert {"numpy", "simpy", "serving-playground"} <= set(run["versions"])
    assert run["trace_version"] >= 1
    assert run["spent"]["wall"] > 0


def test_the_saved_configuration_is_the_run(playground):
    first = playground(*SMALL, "policy=token_throttling")
    config = (first.run_dir / "config.yaml").read_text()
    assert "policies.budget.TokenThrottling" in config
    assert "${" not in config


def test_people_get_a_table(playground):
    outcome = playground(*SMALL)
    assert "TTFT p99" in outcome.out
    assert f"Traces and summary: {outcome.run_dir}" in outcome.out


def test_equal_seeds_give_equal_bytes(playground):
    one, two, other = (playground(*SMALL, f"seed={seed}").run_dir for seed in (1, 1, 2))
    for table in SCHEMAS:
        assert (one / f"{table}.parquet").read_bytes() == (two / f"{table}.parquet").read_bytes()
    assert (one / "requests.parquet").read_bytes() != (other / "requests.parquet").read_bytes()


def test_kv_blocks_caps_what_fits(playground):
    def blocks(*arguments):
        return json.loads((playground(*SMALL, *arguments).run_dir / "run.json").read_text())["spec"]["blocks"]

    assert blocks("kv.blocks=600") == 600
    assert blocks("kv.blocks=100000000") == blocks("kv.blocks=null")


def test_some_rejections_are_told_and_are_no_error(playground):
    outcome = playground("workload.requests=40", "workload.rate=20", "kv.blocks=40")
    assert outcome.code == 0
    assert 0 < outcome.last["rejected"] < 40
    assert outcome.err.startswith(f"note: {outcome.last['rejected']} of 40 requests were rejected, the first since")


def test_more_blocks_than_fit_are_told(playground):
    assert "note: kv.blocks=100000000 is more than fits: the pool has" in playground(*SMALL, "kv.blocks=100000000").err


def test_a_folder_holds_one_run(playground, tmp_path):
    assert playground(*SMALL, "run_dir=mine").code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    outcome = playground(*SMALL, "run_dir=mine", "seed=9")
    assert outcome.code == 2
    assert outcome.err == "error: run_dir=mine already holds a run: choose another folder, or delete that one\n"
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_of_two_runs_at_once_one_gets_the_folder(tmp_path):
    _claim(tmp_path)
    with pytest.raises(SettingError, match="already holds a run"):
        _claim(tmp_path)


@pytest.mark.parametrize("stop", [SIGINT, SIGTERM])
def test_an_interrupted_run_says_so(playground, monkeypatch, stop):
    # Who was started in the background by a shell, tests included, has been told to ignore it.
    signal(SIGINT, default_int_handler)

    def stopped(self, done, total, now):
        if done == 5:
            raise_signal(stop)

    monkeypatch.setattr("experiments.progress.Lines.update", stopped)
    outcome = playground(*SMALL, "run_dir=mine")
    assert outcome.code == 128 + stop
    assert json.loads((outcome.folder / "mine" / "run.json").read_text())["ended"] == "interrupted"
    summary = json.loads((outcome.folder / "mine" / "summary.json").read_text())
    assert summary["notes"][0].startswith("interrupted: ")
    assert summary["notes"][0].endswith("requests had not ended")


def test_a_failed_run_says_so(playground, monkeypatch):
    monkeypatch.setattr("experiments.run.serve", None)
    with pytest.raises(TypeError):
        playground(*SMALL, "run_dir=mine")
    assert json.loads(Path("mine/run.json").read_text())["ended"] == "failed"


def test_people_at_a_terminal_are_spared_the_json(playground, monkeypatch):
    monkeypatch.setattr("experiments.report.sys.stdout.isatty", lambda: True)
    assert playground(*SMALL).out.strip().splitlines()[-1].startswith("Traces and summary: ")


@pytest.mark.parametrize("name", ["with space", "a=b", "größe", "it's", "~tilde", "(x)", "back\\slash"])
def test_a_shells_quotes_suffice(playground, tmp_path, name):
    outcome = playground(*SMALL, f"run_dir={tmp_path}/{name}")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / name / "summary.json").exists()


def test_a_home_folder_is_meant(playground, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = playground(*SMALL, "run_dir=~/mine")
    assert outcome.code == 0, outcome.err
    assert outcome.run_dir == tmp_path / "mine"
    assert playground("workload=saved", "workload.path=~/x.csv").err.startswith(
        f"error: workload.path={tmp_path}/x.csv"
    )


def test_an_option_may_refer_to_another(playground):
    outcome = playground(*SMALL, "slo.ttft=${workload.rate}")
    assert outcome.code == 0, outcome.err
    assert "ttft: 20" in (outcome.run_dir / "config.yaml").read_text()


def test_flags_may_come_last(playground):
    outcome = playground("policy=token_throttling", "--cfg", "job", "--package", "policy")
    assert (outcome.code, outcome.err) == (0, "")
    assert "policies.budget.TokenThrottling" in outcome.out


def test_plots_on_request(playground):
    outcome = playground(*SMALL, "plots=true")
    assert len(list((outcome.run_dir / "plots").glob("*.png"))) == 3


def test_cfg_shows_what_would_run(playground):
    outcome = playground("--cfg", "job", "policy=token_throttling", "--package", "policy")
    assert outcome.code == 0
    assert "policies.budget.TokenThrottling" in outcome.out


def test_help_explains_the_groups(playground):
    outcome = playground("--help")
    assert outcome.code == 0
    for word in (
        "policy/victims: cost_aware, largest",
        "backend     sim (SimPy",
        "+experiment=quickstart",
        "kv.blocks=2000",
    ):
        assert word in outcome.out


def test_a_simulation_loads_nothing_heavy(tmp_path):
    """In a process of its own, since this one has loaded everything."""
    script = (
        "import sys; from experiments.run import main\n"
        f"sys.argv = ['playground', *{SMALL!r}]\n"
        "main()\n"
        "heavy = {'torch', 'transformers', 'triton', 'wandb', 'matplotlib', 'tensorboard', 'engine'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("command", [[sys.executable, "-m", "playground"], [sys.executable, "-m", "experiments"]])
def test_the_modules_are_commands(command, tmp_path):
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class TestEngine:
    ARGUMENTS = ("backend=engine", "model=tiny", "workload.requests=6", "workload.rate=50", "kv.blocks=300")

    def test_the_same_command_runs_on_tensors_and_decides_alike(self, playground, monkeypatch, capfd):
        from experiments.__main__ import main

        outcome = playground(*self.ARGUMENTS, "policy=token_throttling")
        assert outcome.code == 0, outcome.err
        assert outcome.last["completed"] == 6
        monkeypatch.setattr(sys, "argv", ["experiments", "parity", str(outcome.run_dir)])
        assert main() == 0
        assert "every decision identical" in capfd.readouterr().out

    def test_another_policy_decides_otherwise(self, playground, monkeypatch, capfd):
        from experiments.__main__ import main

        outcome = playground(*self.ARGUMENTS, "policy=token_throttling")
        config = outcome.run_dir / "config.yaml"
        config.write_text(config.read_text().replace("TokenThrottling", "PrefillFirst"))
        monkeypatch.setattr(sys, "argv", ["experiments", "parity", str(outcome.run_dir)])
        assert main() == 1
        assert "NOT identical" in capfd.readouterr().out


def test_costed_runs_a_pipeline_of_tensors_on_a_simulated_clock(playground):
    outcome = playground("backend=costed", "model=tiny", "parallel=pp4", "workload.requests=6")
    assert outcome.code == 0, outcome.err
    assert outcome.last["completed"] == 6


def test_what_cannot_be_replayed_is_told(playground, monkeypatch, capfd):
    from experiments.__main__ import main

    merged = playground(*SMALL).run_dir
    monkeypatch.setattr(sys, "argv", ["experiments", "parity", "nowhere", str(merged)])
    assert main() == 2
    assert len(capfd.readouterr().err.splitlines()) == 2  # one bad folder does not stop the rest
    for folder, problem in ((merged, "run it again with backend.skip_ahead=false"), ("nowhere", "has no config.yaml")):
        monkeypatch.setattr(sys, "argv", ["experiments", "parity", str(folder)])
        assert main() == 2
        assert problem in capfd.readouterr().err
