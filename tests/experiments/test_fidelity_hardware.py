"""The runs of a plan: in order, resumable, within a budget. On a simulator, which is as good as a machine here."""

import json
import shutil
from pathlib import Path

import pytest

from experiments.fidelity import hardware
from experiments.fidelity.hardware import POINT, expected, finished, serve
from experiments.fidelity.plan import Point
from experiments.settings import SettingError

FEW = ("backend=sim", "workload.requests=4", "workload.rate=50", "kv.blocks=600")


def point(policy: str, load: str = "near", repeat: int = 0, pool: str = "full", workload: str = "short") -> Point:
    return Point(policy, workload, load, pool, repeat, (*FEW, f"policy={policy}"))


@pytest.fixture
def ran(monkeypatch):
    """Names of the folders that runs were made in, by a backend that takes no time."""
    names = []

    def execute(config, _title):
        folder = Path(config.run_dir)
        names.append(folder.name)
        (folder / "run.json").write_text('{"spent": {"wall": 0.1}}')

    monkeypatch.setattr(hardware.run, "execute", execute)
    return names


def test_points_become_run_folders(tmp_path):
    points = [point("vllm_v1"), point("vllm_v1", repeat=1)]
    assert serve(points, tmp_path) == hardware.Served([one.name for one in points])
    assert finished(tmp_path) == sorted(tmp_path / "hardware" / one.name for one in points)
    folder = tmp_path / "hardware" / points[1].name
    assert json.loads((folder / "summary.json").read_text())["completed"] == 4
    kept = json.loads((folder / POINT).read_text())
    assert kept["overrides"] == list(points[1].overrides)
    assert kept["seconds"] > 0
    assert {name: kept[name] for name in ("group", "policy", "load", "repeat")} == {
        "group": points[0].name, "policy": "vllm_v1", "load": "near", "repeat": 1,
    }  # fmt: skip


def test_it_goes_on_where_a_stop_left_it(tmp_path, ran):
    points = [point("vllm_v1"), point("orca")]
    serve(points[:1], tmp_path)
    half = tmp_path / "hardware" / points[1].name
    half.mkdir()
    (half / "run.json").touch()  # as a killed run leaves it
    ran.clear()
    assert serve(points, tmp_path).done == [one.name for one in points]
    assert ran == [points[1].name]
    assert [folder.name for folder in half.parent.glob("*.interrupted*")] == [f"{half.name}.interrupted"]
    assert len(finished(tmp_path)) == 2


def test_what_was_moved_aside_is_never_overwritten(tmp_path, ran):
    half = tmp_path / "hardware" / point("vllm_v1").name
    for turn in ("first", "second"):
        half.mkdir(parents=True)
        (half / "run.json").write_text(turn)
        serve([point("vllm_v1")], tmp_path)
        shutil.rmtree(half)
    aside = sorted(half.parent.iterdir())
    assert [folder.name for folder in aside] == [f"{half.name}.interrupted", f"{half.name}.interrupted-2"]
    assert [(folder / "run.json").read_text() for folder in aside] == ["first", "second"]


def test_nothing_begins_that_would_end_too_late(tmp_path, ran, monkeypatch):
    clock = iter(range(0, 1000, 10))  # ten seconds pass between any two looks at it
    monkeypatch.setattr(hardware, "monotonic", lambda: float(next(clock)))
    points = [point("vllm_v1"), point("orca"), point("vllm_v0")]
    served = serve(points, tmp_path, budget=60.0)
    assert (served.done, served.left) == ([points[0].name], [points[1].name, points[2].name])
    assert ran == served.done


def test_finished_points_tell_how_long_others_take():
    spent = {point("a"): 5.0, point("b"): 8.0, point("c", load="past"): 20.0, point("d", workload="long"): 70.0}
    assert expected(point("a", repeat=1), spent) == 5.0
    assert expected(point("z"), spent) == 8.0  # in the same setting
    assert expected(point("z", load="below"), spent) == 20.0  # of the same workload
    assert expected(point("z", workload="other"), spent) == 70.0
    assert expected(point("a"), {}) == 0.0


def test_time_of_points_that_were_there_counts_and_the_order_is_kept(tmp_path, ran):
    long, short = point("vllm_v1"), point("vllm_v1", workload="other")
    serve([long, short], tmp_path)
    file = tmp_path / "hardware" / long.name / POINT
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 1e6}))
    rest = [point("orca"), point("orca", workload="other")]  # the second would fit
    served = serve([long, short, *rest], tmp_path, budget=1e5)
    assert (served.done, served.left) == ([long.name, short.name], [one.name for one in rest])


def test_a_finished_point_with_other_overrides_is_no_result_of_this_plan(tmp_path, ran):
    serve([point("vllm_v1")], tmp_path)
    with pytest.raises(SettingError, match=r"other overrides \(kv.blocks=700\)"):
        serve([point("vllm_v1")], tmp_path, ["kv.blocks=700"])


def test_a_point_that_fails_takes_no_other_with_it(tmp_path, capsys):
    wrong = Point("vllm_v1", "short", "near", "full", 0, (*FEW, "kv.blocks=-1"))
    served = serve([wrong, point("orca")], tmp_path)
    assert (served.failed, served.done) == ([wrong.name], [point("orca").name])
    assert "error: short-near-full-vllm_v1: kv.blocks=-1 must be at least 1" in capsys.readouterr().err
    assert finished(tmp_path) == [tmp_path / "hardware" / point("orca").name]


def test_a_plan_that_does_not_compose_is_told_at_once(tmp_path, ran):
    with pytest.raises(SettingError, match=r"^short-near-full-vllm_v1: kv\.blocksize=3: "):
        serve([point("vllm_v1"), point("orca")], tmp_path, ["kv.blocksize=3"])
    assert ran == []


def test_an_interrupted_run_is_no_point(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware.run, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve([point("vllm_v1")], tmp_path)
    assert finished(tmp_path) == []
