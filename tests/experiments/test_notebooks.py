"""A sweep from Python is the command line's: the same folder, resumed, as a table."""

from __future__ import annotations

import pytest

from experiments.notebooks import read, sweep
from experiments.settings import SettingError

SMALL = {"workload.requests": 12, "workload.rate": 20, "kv.blocks": 600}


def test_a_sweep_is_a_table_and_is_not_run_twice(tmp_path):
    options = SMALL | {"policy": ["orca", "chunked_prefill"], "kv.prefix_cache": [True, False]}
    runs = sweep(options, tmp_path / "sweep", workers=2)
    assert runs["completed"].tolist() == [12] * 4
    assert runs.groupby("policy").size().to_dict() == {"orca": 2, "chunked_prefill": 2}
    assert runs["kv.prefix_cache"].sum() == 2, "True and False, not text"
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "sweep").glob("*/finished.json")}
    assert len(before) == 4
    assert sweep(options, tmp_path / "sweep").equals(runs)
    assert before == {file: file.stat().st_mtime_ns for file in before}
    with pytest.raises(SettingError, match="holds another sweep"):
        sweep(SMALL | {"seed": [1, 2]}, tmp_path / "sweep")


def test_points_that_fail_have_a_row_that_says_why(tmp_path, capsys):
    runs = sweep(SMALL | {"workload.rate": [20, -1]}, tmp_path)
    assert runs["workload.rate"].tolist() == [20, -1], "numbers, not text"
    good, bad = runs.to_dict("records")
    assert good["completed"] == 12
    assert bad["error"] == "workload.rate=-1 must be greater than 0"
    assert "failed: workload.rate=-1" in capsys.readouterr().out


def test_without_a_sweep_there_is_no_table(tmp_path):
    with pytest.raises(SettingError, match=r"holds no sweep\.json"):
        read(tmp_path)
