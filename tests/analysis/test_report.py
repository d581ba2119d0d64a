"""`python -m analysis report`: what the page is drawn from, and the page as a browser shows it."""

import json
import re

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.metrics import latencies, load, summarize
from analysis.report.data import MOST_BESIDE, One, labels, read, runs_of
from analysis.report.page import page
from analysis.report.stages import MOST_SPANS
from analysis.report.timelines import Level, each, line, rate, total
from analysis.report.twins import errors, twins
from experiments import run
from experiments.composing import composed
from tests.browser import browser

SMALL = (
    "model=tiny", "backend=sim", "kv.blocks=60", "workload.requests=40", "workload.rate=2500",
    "workload.max_length=256",
)  # fmt: skip


def made(folder, *overrides):
    config = composed([*SMALL, *overrides])
    config.run_dir = str(folder)
    run.execute(config)
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "pipeline", "parallel=pp2", "policy=token_throttling")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """As `playground -m` leaves one."""
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    rows = []
    for number, policy in enumerate(["vllm_v1", "static"]):
        made(folder / str(number), f"policy={policy}")
        rows.append({"job": str(number), "policy": policy, "requests": 40, "p99_ttft_ms": 1.0})
    (folder / "sweep.json").write_text(json.dumps(rows))
    return folder


def written(folders, tmp_path):
    file = tmp_path / "out" / "page.html"
    assert main(["report", *map(str, folders), "-o", str(file)]) == 0
    return file


# --- data


def test_distributions_are_the_runs(pipeline):
    found = read(pipeline, "x")
    finished = latencies(load(pipeline).requests)
    for name in ("ttft", "tpot", "e2el"):
        values = finished[name].dropna().to_numpy() * 1e3
        for at, share in found.cdfs[name]:
            assert at == pytest.approx(np.quantile(values, share), rel=1e-4)
        assert found.cdfs[name][-1] == [pytest.approx(values.max(), rel=1e-4), 1.0]
    summary = summarize(load(pipeline))
    assert found.summary["p99_ttft_ms"] == summary["p99_ttft_ms"]


def test_every_instant_of_a_stage_is_at_work_or_idle_for_one_cause(pipeline):
    for stage in read(pipeline, "x").stages:
        whole = np.sum(list(stage["shares"].values()), axis=0)
        assert whole == pytest.approx(np.ones(len(whole)), abs=1e-3)
        busy = sum(end - begin for begin, end, *_ in stage["spans"])
        shares = sum(np.sum(stage["shares"][kind]) for kind in ("prefill", "mixed", "decode"))
        assert shares / len(whole) * (stage["end"] - stage["begin"]) == pytest.approx(busy, rel=1e-3)


def test_windows_take_merged_steps_apart(tmp_path):
    """The same run, merged and step by step, has the same time lines."""
    merged, stepped = made(tmp_path / "a"), made(tmp_path / "b", "backend.skip_ahead=false")
    one, other = (read(folder, "x").lines for folder in (merged, stepped))
    assert set(one) == set(other) and one["kv"]["most"] != one["kv"]["least"]
    for name in set(one) - {"begin", "end"}:
        for statistic in one[name]:
            assert one[name][statistic] == pytest.approx(other[name][statistic], rel=1e-3, abs=1e-6), (name, statistic)
    each = (one["end"] - one["begin"]) / len(one["decode_rate"]["mean"])
    tokens = sum(one["decode_rate"]["mean"]) * each
    assert tokens == pytest.approx(load(merged).repetitions["decode_tokens"].sum(), rel=1e-3)


def test_lines_by_hand():
    """3 from 1 s on, 1 from 2.5 s on, nothing from 4 s on; windows of 2 s."""
    level = Level.of(np.array([1.0, 2.5, 4.0]), np.array([3.0, 1.0, 0.0]))
    edges = np.array([0.0, 2.0, 4.0, 6.0])
    found = line(level, edges)
    assert found.mean.tolist() == [1.5, 1.5, 0.0]
    assert (found.least.tolist(), found.most.tolist()) == ([0, 1, 0], [3, 3, 0])
    other = Level.of(np.array([0.0, 2.0]), np.array([1.0, 0.0]))
    assert line(total([level, other]), edges).most.tolist() == [4, 3, 0]  # 1 until 2 s, 3 then
    assert each([level, other], edges).mean.tolist() == [1.25, 0.75, 0.0]
    ended = level.zero_after(np.array([3.0, 1.0]))
    assert ended.at(np.array([1.0, 2.9, 3.0, 3.9])).tolist() == [3, 1, 0, 0], "a change at an end stays"


def test_rates_by_hand():
    """8 tokens from 1 to 3 s, 5 at once at 4 s: windows of 2 s have 4, 4 and 5."""
    found = rate(np.array([1.0, 4.0]), np.array([3.0, 4.0]), np.array([8.0, 5.0]), np.array([0.0, 2.0, 4.0, 6.0]))
    assert found.tolist() == [2.0, 2.0, 2.5]


def test_a_simulated_run_stands_beside_its_hardware_run():
    """Each in one pair, and only with what differs in nothing but where it ran."""
    settings = [{"seed": 0}, {"seed": 1}, {"seed": 0}, {"seed": 0}, {}, {}]
    backends = ["CudaBackend", "CudaBackend", "SimBackend", "SimBackend", "CudaBackend", "SimBackend"]
    assert twins(settings, backends) == [(0, 2)]
    found = errors(
        {"mean_ttft_ms": 10.0, "preemptions": 0, "mean_tpot_ms": None}, {"mean_ttft_ms": 9.0, "preemptions": 2}
    )
    assert found["mean_ttft_ms"] == pytest.approx(-0.1) and found["preemptions"] is found["mean_tpot_ms"] is None


def test_a_page_of_a_run_and_its_simulation(tmp_path):
    """The engine's run and its twin: a table of errors, one colour, the simulated one dashed."""
    engine = made(tmp_path / "engine", "backend=engine", "workload.requests=4", "workload.max_length=40")
    run_of, twin = (read(engine, "engine", 1), read(made(tmp_path / "sim", "workload.requests=4",
                                                         "workload.max_length=40"), "sim", 1))  # fmt: skip
    assert run_of.setting == twin.setting
    shown = embedded(page("x", [twin, run_of]))
    (pair,) = shown["twins"]
    assert (pair["hardware"], pair["simulated"]) == (1, 0)
    share = twin.summary["mean_e2el_ms"] / run_of.summary["mean_e2el_ms"] - 1
    assert pair["errors"]["mean_e2el_ms"] == pytest.approx(share)
    assert shown["colours"][0] == shown["colours"][1] and shown["dashed"] == [True, False]


def test_time_lines_of_many_runs_are_left_out(pipeline):
    assert read(pipeline, "x", MOST_BESIDE - 1).lines and not read(pipeline, "x", MOST_BESIDE).lines
    assert not read(pipeline, "x", 1).stages


def test_of_many_steps_only_columns_are_drawn(pipeline, monkeypatch):
    assert MOST_SPANS > 1000
    monkeypatch.setattr("analysis.report.stages.MOST_SPANS", 5)
    (stage, *_) = read(pipeline, "x").stages
    assert stage["spans"] == stage["holes"] == [] and len(stage["shares"]["decode"]) == 500


def test_a_sweeps_points_are_told_apart_by_their_options(sweep):
    folders = runs_of(sweep)
    assert [folder.name for folder in folders] == ["0", "1"]
    assert labels(folders) == ["policy=vllm_v1", "policy=static"]
    assert labels(folders[:1]) == ["0"]


def one(name, ttft, tpot):
    summary = dict.fromkeys(("mean_ttft_ms", "mean_tpot_ms"))
    return One(name, {}, summary | {"mean_ttft_ms": ttft, "mean_tpot_ms": tpot}, {}, {}, {}, [], [], {})


def embedded(content):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', content, re.DOTALL)[1])


def test_the_front_is_what_no_other_run_beats():
    runs = [one("a", 10, 5), one("b", 20, 3), one("c", 20, 4), one("d", 10, 5), one("e", None, None)]
    points = embedded(page("x", runs))["pareto"]["points"]
    fronts = {runs[point["run"]].name: point["front"] for point in points}
    assert fronts == {"a": True, "b": True, "c": False, "d": True}
    assert embedded(page("x", runs[:1]))["pareto"] is None


def test_names_end_no_script():
    content = page("</script><script>alert(1)</script>", [one("<b>&", 1, 1)])
    assert content.count("</script>") == 2
    assert embedded(content)["title"] == "</script><script>alert(1)</script>"


# --- the page


@pytest.fixture(scope="module")
def shown():
    with browser() as opened:
        yield opened


def canvas(number):
    return f"document.querySelectorAll('canvas')[{number}]"


def box(shown, number):
    shown.run(f"{canvas(number)}.scrollIntoView({{block: 'center'}})")
    return json.loads(shown.run(f"JSON.stringify({canvas(number)}.getBoundingClientRect())"))


def test_a_run_in_a_browser(pipeline, tmp_path, shown):
    file = written([pipeline], tmp_path)
    assert file.stat().st_size < 1_500_000
    shown.errors.clear()
    shown.requested.clear()
    shown.open(file)
    assert shown.errors == [] and shown.requested == [file.resolve().as_uri()]
    assert shown.run("document.querySelectorAll('canvas').length") == 4 + 6 + 2
    assert shown.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert "few" in shown.run("document.getElementById('findings').textContent")

    place = box(shown, 0)
    middle = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    shown.mouse("mouseMoved", *middle)
    assert shown.run("document.getElementById('tip').style.display") == "block"
    assert re.match(r"[\d.,]+ ms\n.*: [\d.]+ %", shown.run("document.getElementById('tip').textContent"))


def test_charts_over_time_zoom_together(pipeline, tmp_path, shown):
    shown.open(written([pipeline], tmp_path))
    first, stage = 4, 10
    before = shown.run(f"+{canvas(first)}.dataset.until")
    place = box(shown, first)
    y = place["y"] + 60
    ends = [place["x"] + place["width"] * share for share in (0.4, 0.6)]
    shown.mouse("mousePressed", ends[0], y, button="left", clickCount=1)
    shown.mouse("mouseMoved", ends[1], y, button="left", buttons=1)
    shown.mouse("mouseReleased", ends[1], y, button="left", clickCount=1)
    views = [[shown.run(f"+{canvas(number)}.dataset.{end}") for end in ("from", "until")] for number in (first, stage)]
    assert views[0] == views[1]
    assert 0 < views[0][0] < views[0][1] < before
    assert shown.run(f"+{canvas(0)}.dataset.until") > 0  # distributions keep theirs
    place = box(shown, stage)
    shown.mouse("mouseMoved", place["x"] + place["width"] / 2, place["y"] + 70)
    assert re.search(r"step \d+|: [\d.]+ %|idle: ", shown.run("document.getElementById('tip').textContent"))
    for clicks in (1, 2):
        place = box(shown, first)
        for kind in ("mousePressed", "mouseReleased"):
            shown.mouse(kind, place["x"] + 200, place["y"] + 60, button="left", clickCount=clicks)
    assert shown.run(f"+{canvas(first)}.dataset.until") == before
    assert shown.errors == []


def test_a_sweep_in_a_browser(sweep, tmp_path, shown):
    shown.errors.clear()
    shown.open(written([sweep], tmp_path))
    assert shown.errors == []
    assert shown.run("[...document.querySelectorAll('#summary td:first-child')].map(one => one.textContent)") == [
        "policy=vllm_v1",
        "policy=static",
    ]
    assert shown.run("document.querySelectorAll('canvas').length") == 1 + 4 + 6
    ink = f"(() => {{ const pen = {canvas(1)}.getContext('2d'); return pen.getImageData(0, 0, {canvas(1)}.width, 200)"
    ink += ".data.reduce((sum, one) => sum + one, 0) })()"
    before = shown.run(ink)
    shown.run("document.querySelectorAll('.legend')[1].firstChild.click()")
    assert shown.run(ink) < before  # a line is gone
    shown.dark()
    assert shown.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    shown.dark(False)


def test_what_is_no_run_is_told_in_a_line(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["report", str(folder)]) == 2
        err = capsys.readouterr().err
        assert "neither the folder of a run nor of a sweep" in err and err.count("\n") == 1


def test_by_default_it_lies_in_the_runs_folder(sweep, monkeypatch, capsys):
    monkeypatch.setattr("analysis.waiting.PATIENCE", 0.0)
    assert main(["report", str(sweep / "0")]) == 0
    assert "report: reading, 0 s" in capsys.readouterr().err, "who waits is told"
    assert (sweep / "0" / "report.html").is_file()
