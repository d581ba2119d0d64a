"""A sweep that is killed or interrupted goes on where it was, and ends as if nothing had happened."""

import os
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGINT
from time import monotonic, sleep

import pytest

from experiments import __main__ as commands
from experiments.points import claim
from playground.trace import SCHEMAS

SWEEP = (
    "-m", "workload.requests=8", "workload.rate=20", "kv.blocks=600",
    "policy.budget._target_=holding.Holding", "policy.budget.tokens=64,96,128",
)  # fmt: skip
HOLDING = '''
import os
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from policies.budget import ChunkedPrefill

@dataclass(frozen=True)
class Holding(ChunkedPrefill):
    """Stands still in the middle of every point but the first while the file `hold` is there."""

    def phases(self, draft):
        if self.tokens > 64 and draft.now > 0.1 and Path("hold").exists():
            Path(f"pid-{os.getpid()}").touch()
            while Path("hold").exists():
                sleep(0.01)
        return super().phases(draft)
'''
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.progress.PATIENCE", 1e9)
    monkeypatch.chdir(tmp_path)
    Path("holding.py").write_text(HOLDING)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("holding", None)


def halfway() -> subprocess.Popen:
    """A sweep of which one point is finished and two stand still in the middle."""
    Path("hold").touch()
    command = [sys.executable, "-m", "playground", *SWEEP, "run_dir=it", "hydra.launcher.workers=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: Path("it/0/finished.json").exists() and len(list(Path().glob("pid-*"))) == 2)
    return process


def orphans() -> list[int]:
    """Points that still run."""
    return [pid for path in Path().glob("pid-*") if not gone(pid := int(path.name.removeprefix("pid-")))]


def wait_until(true, patience=60):
    until = monotonic() + patience
    while not true():
        assert monotonic() < until, "waited in vain"
        sleep(0.02)


def gone(pid: int) -> bool:
    """Dead, or a zombie that nobody in this container reaps."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def contents(folder: str) -> dict[str, bytes]:
    """All that a sweep found out: tables, summaries, traces."""
    names = ("summary.json", *(f"{table}.parquet" for table in SCHEMAS))
    points = {f"{point}/{name}": Path(folder, str(point), name).read_bytes() for point in range(3) for name in names}
    return points | {"sweep.csv": Path(folder, "sweep.csv").read_bytes()}


@LINUX
def test_killed_it_goes_on_where_it_was(place, playground, monkeypatch):
    process = halfway()
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not orphans(), 10)
    assert not Path("it/1/finished.json").exists()
    Path("hold").unlink()

    before = Path("it/0/run.json").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["experiments", "resume", "it"])
    assert commands.main() == 0
    assert Path("it/0/run.json").stat().st_mtime_ns == before, "a finished point ran again"
    assert playground(*SWEEP, "hydra/launcher=basic", "hydra.sweep.dir=serial").code == 0
    assert contents("it") == contents("serial")


@LINUX
def test_interrupted_it_says_how_to_go_on(place):
    process = halfway()
    os.killpg(process.pid, SIGINT)  # a terminal tells all of them
    _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + SIGINT
    assert told.splitlines()[-1] == ("interrupted: 1 of 3 points are done; to go on: python -m experiments resume it")
    assert not orphans()


def test_the_same_command_goes_on_too(playground, place):
    command = (*SWEEP[:4], "seed=1,2", "run_dir=it")
    assert playground(*command, "hydra.launcher.workers=1").code == 0
    Path("it/1/finished.json").unlink()
    outcome = playground(*command)
    assert (outcome.code, outcome.last["jobs"]) == (0, 2)
    assert "1 of them is finished already" in outcome.out


def test_what_failed_is_tried_again(playground, place):
    Path("holding.py").write_text("class Holding:\n    def phases(self, draft):\n        raise OSError('disk full')\n")
    assert playground(*SWEEP, "run_dir=it").last["failed"] == 3
    Path("holding.py").write_text(HOLDING)
    sys.modules.pop("holding", None)
    outcome = playground(*SWEEP, "run_dir=it")
    assert (outcome.code, outcome.last["jobs"], outcome.err) == (0, 3, "")


def test_two_sweeps_do_not_share_a_folder(playground, place):
    small = SWEEP[:4]
    assert playground(*small, "run_dir=it", "seed=1,2").code == 0
    outcome = playground(*small, "run_dir=it", "seed=1,3")
    assert outcome.code == 2
    assert outcome.err.startswith("error: run_dir=it holds another sweep (-m workload.requests=8 ")
    assert outcome.err.endswith("choose another folder, or repeat that command to go on with it\n")
    assert playground(*small, "run_dir=it", "seed=1,2").code == 0


def test_points_of_another_configuration_are_not_taken_for_these(playground, place):
    Path("mine/workload").mkdir(parents=True)
    for requests, code in ((3, 0), (4, 2)):
        text = f"defaults: [poisson]\nrequests: {requests}\n"
        Path("mine/workload/few.yaml").write_text(text)
        outcome = playground("-m", "--config-dir", "mine", "workload=few", "seed=1,2", "run_dir=it")
        assert outcome.code == code
    # Whichever is looked at first.
    assert re.match(r"error: run_dir=it: point [01] was finished with other settings than it would have", outcome.err)


def test_a_folder_of_other_runs_is_left_alone(playground, place):
    assert playground(*SWEEP[1:4], "run_dir=it/0").code == 0
    before = sorted(Path("it").rglob("*"))
    outcome = playground(*SWEEP, "run_dir=it")
    assert outcome.code == 2
    assert outcome.err == "error: run_dir=it holds other runs: choose another folder, or delete that one\n"
    assert [path for path in sorted(Path("it").rglob("*")) if path.name != ".lock"] == before


def test_a_sweep_that_runs_is_not_joined(playground, place, monkeypatch):
    monkeypatch.setattr("experiments.points.PATIENCE", 0.1)
    with claim(Path("it"), [["seed=1"]], ["-m", "seed=1"]):
        outcome = playground("-m", "seed=1", "run_dir=it")
    assert outcome.err == "error: run_dir=it: a sweep is running in it; wait for it or choose another folder\n"


def test_a_folder_without_a_sweep_cannot_be_resumed(place, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["experiments", "resume", "nowhere"])
    assert commands.main() == 2
    assert capfd.readouterr().err.endswith("nowhere: holds no sweep (no points.json: No such file or directory)\n")
