"""README and docs say what the code and the recorded results say, and their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import catalogue
from experiments.benchmarks import tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_policy_page_is_made_from_the_docstrings() -> None:
    assert catalogue.PAGE.read_text(encoding="utf-8") == catalogue.page(), "run python -m experiments.catalogue"


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_made_from_recorded_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == tables.filled(text), "run python -m experiments.benchmarks.tables"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.slow
def test_readme_policy_runs_from_the_users_package(tmp_path: Path) -> None:
    """The README's example, in a folder of its own, with the README's command."""
    (tmp_path / "mypkg.py").write_text(next(block for block in blocks("python") if "class HalfPrefill" in block))
    command = re.search(r"^playground (policy\.budget\._target_=.*)$", README, flags=re.MULTILINE)
    assert command
    done = subprocess.run(
        [sys.executable, "-m", "playground", *command[1].split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert '"completed": 200' in done.stdout


@pytest.mark.slow
def test_readme_llm_example_runs(tmp_path: Path) -> None:
    example = next(block for block in blocks("python") if "from experiments.llm" in block)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/analysis.md", "docs/whatif.md"])
def test_commands_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
    """`lint` ends with 1: short examples have doubtful figures."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        words = line.partition("#")[0].replace("python -m ", "").split()
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == int(" lint " in line), (line, done.stderr)
