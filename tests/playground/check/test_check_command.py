"""The command and the pytest plugin, as their users call them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from playground.check.__main__ import main

SICK = '''
from policies.budget import ChunkedPrefill
from policies.composed import Composed


class Dozes:
    """Leaves the device alone until `least` wait."""

    def __init__(self, least=3):
        self.least = least

    def fill(self, draft):
        if len(draft.waiting) >= self.least or draft.running:
            Composed(ChunkedPrefill()).fill(draft)

    def place(self, request, view):
        return 0

    def run_ahead(self, spec):
        return 1

    def steady(self, draft):
        return 0


def well():
    return Composed(ChunkedPrefill())
'''
ROOT = Path(__file__).parents[3]
QUICK = ["--quick", "--only", "conservation,stall"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("playground.check.__main__.QUICK", 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sickpkg.py").write_text(SICK)
    yield tmp_path
    sys.modules.pop("sickpkg", None)


def test_a_policy_by_its_path_fails_and_its_case_can_be_replayed(folder, capsys):
    assert main(["policy=sickpkg:Dozes", "policy.least=4", *QUICK, "--out", "out"]) == 1
    told = capsys.readouterr().out
    assert json.loads(told.splitlines()[-1])["failed"] == ["stall", "conservation"]
    assert "python -m playground.check replay out/conservation.json" in told
    saved = json.loads((folder / "out/conservation.json").read_text())
    assert saved["policy"] == ["policy=sickpkg:Dozes", "policy.least=4"]
    page = (folder / "out/report.html").read_text()
    assert "<svg" in page and "nothing is in flight" in page and "http" not in page.partition("</style>")[2]

    assert main(["replay", "out/conservation.json"]) == 1
    assert "fails: at 0 s nothing is in flight" in capsys.readouterr().out
    assert main(["replay", "out/conservation.json", "policy=chunked_prefill"]) == 0
    assert "holds" in capsys.readouterr().out


def test_what_was_mended_leaves_no_failing_case_behind(folder):
    assert main(["policy=sickpkg:Dozes", *QUICK, "--out", "out"]) == 1
    assert main(["policy=sickpkg:well", *QUICK, "--out", "out"]) == 0
    assert [file.name for file in (folder / "out").iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "say which policy: policy=NAME"),
        (["policy=chunked"], "policy=chunked"),
        (["policy=sickpkg:Missing"], "has no Missing; it has Dozes, well"),
        (["policy=orca", "kv.blocks=3"], "kv.blocks=3: only a policy is examined"),
        (["policy=orca", "policy.budget.batch=0"], "policy.budget.batch=0 must be at least 1"),
        (["policy=orca", "--only", "speed"], "--only speed: no such property"),
        (["policy=orca", "--only", "engine"], "--only engine: say on which model"),
        (["policy=orca", "--waste=-1"], "--waste -1.0 must be 0 or more"),
        (["replay"], "replay: name one file"),
        (["replay", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["replay", "sickpkg.py"], "sickpkg.py: no saved case"),
        (["policy=orca", "policy/placement=dynapipe", "--quick"], "the policy will have none of the backends"),
    ],
)
def test_what_can_be_mended_is_told_in_one_line(arguments, line, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err.strip()
    assert line in told and told.startswith("error: ") and "\n" not in told


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert "python -m playground.check policy=chunked_prefill" in told and "starvation" in told


def test_the_kit_loads_no_torch():
    code = "import sys, playground.check.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


# --- the plugin

TESTS = """
import sickpkg


def test_well(conformance):
    assert conformance(sickpkg.well, each=1, only=["conservation"]).served == 18


def test_sick(conformance):
    conformance(sickpkg.Dozes, each=1, only=["conservation"])
"""


def pytest_in(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "playground.check.plugin"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stdout + done.stderr


def test_the_fixture_in_somebody_elses_repository(folder):
    (folder / "test_mine.py").write_text(TESTS)
    code, told = pytest_in(folder)
    assert code == 1 and "1 failed, 1 passed" in told
    assert "conservation: No device idles over waiting work" in told and "tokens\n" in told
    assert "python -m playground.check replay .pytest_cache/d/conformance/policy-conservation.json policy=" in told
    assert main(["replay", ".pytest_cache/d/conformance/policy-conservation.json", "policy=sickpkg:Dozes"]) == 1
    assert main(["replay", ".pytest_cache/d/conformance/policy-conservation.json"]) == 2


def test_a_policy_named_on_the_command_line_of_pytest(folder):
    (folder / "test_none.py").write_text("")
    code, told = pytest_in(
        folder, "--policy=sickpkg:Dozes policy.least=2", "--policy-cases=1", "-k", "conservation or hits"
    )
    assert code == 1 and "1 failed" in told and "1 passed" in told
    assert "nothing is in flight" in told and "plugin.py" not in told
    # pytest's summary repeats it where CI is set
    (line,) = {line for line in told.splitlines() if line.startswith("python -m playground.check ")}
    assert main(line.split()[3:]) == 1
    code, told = pytest_in(folder, "--policy=nothing_such")
    assert code == 4 and "--policy=nothing_such" in told and "Traceback" not in told
