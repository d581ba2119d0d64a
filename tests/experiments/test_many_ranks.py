"""Many ranks as a user starts and stops them: a whole command, with processes of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.parallel.launch import free_port
from engine.tiny import tiny
from experiments import torchrun
from experiments.run import _terminate
from experiments.settings import Parallel, SettingError, Settings
from experiments.workers import Terminated
from playground.trace import read

ROOT = Path(__file__).parents[2]
RUN = ("-m", "playground", "backend=engine", "model=tiny", "run_dir=mine", "kv.blocks=200")
SHORT = (
    "workload.requests=3",
    "workload.rate=inf",
    "workload.lengths.output.mean=6",
    "workload.lengths.prompt.mean=40",
)
LONG = ("workload.requests=4000", "workload.rate=50")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


def start(folder, *command, **environment):
    """In a process group of its own, as a shell starts it; Ctrl-C as a terminal's programs have it."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def torchrun_command(ranks):
    port = free_port("127.0.0.1")
    options = ("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(port))
    return (sys.executable, "-m", "torch.distributed.run", *options), {"PLAYGROUND_PORT": str(free_port("127.0.0.1"))}


def test_torchrun_serves_one_run(tmp_path):
    """Rank 0's process alone has a folder and something to say."""
    tiny()
    command, ports = torchrun_command(2)
    process = start(tmp_path, *command, *RUN, "parallel=pp2", *SHORT, PLAYGROUND_AUTHKEY="secret", **ports)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert json.loads(out.splitlines()[-1])["completed"] == 3
    assert out.count('"completed": 3') == 1
    assert len(list(tmp_path.glob("runs/*"))) <= 1
    assert set(read(tmp_path / "mine", "steps").column("stage_finished").to_pandas().map(len)) == {2}


UNDER = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ENGINE = {"_target_": "experiments.engines.Engine"}


@pytest.mark.parametrize(
    ("parallel", "backend", "said"),
    [
        (Parallel(stages=3), ENGINE, r"^parallel: stages=3 x tp=1 x replicas=1 are 3 ranks, .*\(WORLD_SIZE=2\); make"),
        (Parallel(), ENGINE, "are 1 ranks"),
        (Parallel(stages=2), {"_target_": "experiments.build.Simulated"}, "^backend: only backend=engine has work for"),
    ],
)
def test_a_run_must_suit_its_processes(parallel, backend, said):
    wanted = Settings(parallel=parallel, backend=backend)
    with pytest.raises(SettingError, match=said):
        torchrun.check(wanted, UNDER)
    torchrun.check(wanted, {})
    torchrun.check(wanted, UNDER | {"WORLD_SIZE": "1"})
    torchrun.check(Settings(parallel=Parallel(tp=2), backend=ENGINE), UNDER)


@pytest.mark.parametrize(
    ("environment", "given", "said"),
    [
        ({}, (), "PLAYGROUND_AUTHKEY_FILE: not set; write a secret"),
        ({"RANK": "x"}, (), "RANK=x must be a whole number: set it to one, or start this without torchrun"),
        ({"PLAYGROUND_AUTHKEY": "x"}, ("-m", "seed=1,2"), "-m: under torchrun (WORLD_SIZE=2) there is one run; give"),
        ({"PLAYGROUND_AUTHKEY": "x"}, ("+experiment=quickstart",), "study: under torchrun (WORLD_SIZE=2) there is one"),
        ({"PLAYGROUND_AUTHKEY": "x"}, (), "backend: only backend=engine has work"),
    ],
)
def test_what_torchrun_must_not_be_used_for(playground, monkeypatch, environment, given, said):
    for name, value in (UNDER | environment).items():
        monkeypatch.setenv(name, value)
    outcome = playground(*given)
    assert outcome.code != 0
    assert f"error: {said}" in outcome.err + outcome.out
    assert "Traceback" not in outcome.err


def test_another_rank_finds_no_driver(playground, monkeypatch):
    """And has read no option: what it would need them for is told to it by the driver."""
    for name, value in (UNDER | {"RANK": "1", "PLAYGROUND_AUTHKEY": "x"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PLAYGROUND_PORT", str(free_port("127.0.0.1")))
    monkeypatch.setattr("experiments.torchrun.MEETING", 0.2)
    outcome = playground("nonsense=1")
    assert outcome.code == 2
    assert outcome.err.startswith("error: MASTER_ADDR=localhost, PLAYGROUND_PORT=")
    assert len(outcome.err.splitlines()) == 1
    assert not list(outcome.folder.iterdir())


def test_a_driver_has_a_moment_to_find_out_who_was_lost(monkeypatch):
    """torchrun sends SIGTERM to all that are left."""
    monkeypatch.setattr(torchrun, "GRACE", 0.1)
    with pytest.raises(Terminated):
        torchrun.patient(_terminate, {})()
    torchrun.patient(_terminate, UNDER)()
    with pytest.raises(Terminated):
        time.sleep(10)


# --- the end of a run that was to go on


def workers(driver):
    """Process ids by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == driver and "engine.parallel.worker" in words:
            found[int(next(word for word in words if word.startswith("--rank=")).partition("=")[2])] = int(folder.name)
    return found


def wait_until(holds, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def described(folder):
    file = folder / "mine" / "run.json"
    return file.is_file() and file.stat().st_size > 0


@pytest.fixture
def running(tmp_path):
    """Two tensor-parallel ranks in the middle of a run: the driver, and its workers' ids by rank."""
    shared = set(os.listdir("/dev/shm"))
    process = start(tmp_path, sys.executable, *RUN, "parallel=tp2", *LONG)
    try:
        wait_until(lambda: described(tmp_path) or process.poll() is not None)
        ids = workers(process.pid)
        assert sorted(ids) == [0, 1]
        time.sleep(4.0)  # on a busy machine ranks take their time to warm up
        yield process, ids
        wait_until(lambda: not any(Path(f"/proc/{id}").exists() for id in ids.values()), 5.0)
        assert set(os.listdir("/dev/shm")) <= shared
    finally:
        process.kill()
        process.communicate()


def ended(process, folder):
    """What it said besides how far it was, after at least one step that can be read."""
    _, errors = process.communicate(timeout=20)
    assert read(folder / "mine", "steps").num_rows > 0
    told = json.loads((folder / "mine" / "run.json").read_text())["ended"]
    return told, [line for line in errors.splitlines() if " of the run" not in line]


@LINUX
def test_ctrl_c(running, tmp_path):
    process, _ = running
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process, tmp_path) == (
        "interrupted",
        ["interrupted: what was traced until then is in the run folder"],
    )
    assert process.returncode == 130


@LINUX
def test_a_rank_that_is_killed(running, tmp_path):
    process, ids = running
    os.kill(ids[1], signal.SIGKILL)
    told, lines = ended(process, tmp_path)
    assert told == "failed"
    assert process.returncode == 2, lines
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1
    words = (
        r"error: rank 1 \(tp_rank 1\) was killed by SIGKILL; it was in step (\d+), the last step it finished was \d+;"
    )
    assert re.match(words, said[0]), said
    assert not [line for line in lines if "Traceback" in line], lines
