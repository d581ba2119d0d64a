"""Traces for the Perfetto UI: every event in its place, nothing that the format does not allow."""

import gzip
import json
from collections import Counter, defaultdict

import pytest

from analysis.__main__ import main
from analysis.metrics import load
from analysis.perfetto import REQUESTS, events
from experiments import run
from experiments.composing import composed
from playground.trace import read

SMALL = (
    "model=tiny",
    "backend=sim",
    "kv.blocks=60",
    "workload.requests=24",
    "workload.rate=2500",
    "workload.max_length=256",
)


TOPOLOGIES = {
    "one": (),
    "pipeline": ("parallel=pp2", "policy=token_throttling"),
    "swapping replicas": ("parallel=dp2", "kv.host_blocks=40", "policy.victims.how=swap"),
}


@pytest.fixture(scope="module", params=TOPOLOGIES.values(), ids=TOPOLOGIES)
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "run"
    config = composed([*SMALL, *request.param])
    config.run_dir = str(place)
    run.execute(config)
    return place


@pytest.fixture
def found(folder):
    return list(events(folder))


def spans(found):
    """By track: (begin, end, name) in nanoseconds."""
    tracks = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            tracks[event["tid"]].append((begin, begin + round(event["dur"] * 1e3), event["name"]))
    return tracks


def test_spans_of_a_track_lie_within_or_behind_one_another(found):
    """Else the UI drops them."""
    for track in spans(found).values():
        open_ends = []
        for begin, end, name in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], name
            open_ends.append(end)


def test_stages_are_at_work_as_long_as_the_trace_says(folder, found):
    tables = load(folder)
    rows = tables.repetitions
    staged = rows["stage_started"].notna().any()
    expected = sum(
        sum(end - begin for begin, end in zip(row.stage_started, row.stage_finished, strict=True))
        if staged and row.stage_started is not None
        else row.finished - row.started
        for row in rows.itertuples()
    )
    at_work = sum(
        one["dur"] for one in found if one["ph"] == "X" and one["cat"] == "step" and "plan" not in one["name"]
    )
    assert at_work / 1e6 == pytest.approx(expected, rel=1e-6)


def test_tracks_are_named_and_no_two_processes_share_a_number(found):
    named = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    used = {event["tid"]: event["pid"] for event in found if event["ph"] == "X"}
    assert set(used) <= set(named)
    assert len(named) == len([event for event in found if event["name"] == "thread_name"])
    assert 0 not in {event["pid"] for event in found}


def test_every_request_is_there_with_its_phases(folder, found):
    requests = {row["id"]: row for row in read(folder, "requests").to_pylist()}
    shown = defaultdict(dict)
    for event in found:
        if event["ph"] == "X" and event["cat"] == "request":
            name = event["name"].split()[0]
            shown[event["args"]["request"]][name] = event["dur"] / 1e6
    assert set(shown) == set(requests)
    for id, parts in shown.items():
        row = requests[id]
        whole = parts.pop("request")
        assert whole == pytest.approx(row["finished"] - row["arrival"], abs=1e-8)
        assert sum(parts.values()) == pytest.approx(whole, abs=1e-8)
        assert parts.get("waits", 0) == pytest.approx(row["admitted"] - row["arrival"], abs=1e-8)
    losses = sum(event["ph"] == "i" for event in found)
    assert losses == sum(row["preemptions"] for row in requests.values()) > 0


def test_arrows_begin_at_the_request_and_end_within_steps(folder, found):
    tracks = spans(found)
    by_request = defaultdict(list)
    for event in found:
        if event["ph"] in "stf":
            by_request[event["id"]].append(event)
            at = round(event["ts"] * 1e3)
            assert any(begin <= at <= end for begin, end, _ in tracks[event["tid"]]), event
    assert len(by_request) == 24
    for arrows in by_request.values():
        kinds = Counter(event["ph"] for event in arrows)
        assert kinds["s"] == kinds["f"] == 1 and arrows[0]["pid"] == REQUESTS + 1
        times = [event["ts"] for event in arrows]
        assert times == sorted(times)
    more = [event for event in events(folder, decodes=True) if event["ph"] == "t"]
    assert len(more) > sum(event["ph"] == "t" for event in found)


def test_counters_are_the_traces(folder, found):
    blocks = [event["args"]["blocks"] for event in found if event["name"] == "KV blocks in use"]
    assert min(blocks) >= 0 and max(blocks) == 60 - load(folder).repetitions["blocks_free"].min()
    running = [event["args"] for event in found if event["name"] == "requests"]
    assert len(running) == len(blocks)


def test_a_stretch_of_a_run(folder, found, tmp_path):
    assert main(["perfetto", str(folder), "-o", str(tmp_path / "part.json"), "--between", "0.01", "0.02"]) == 0
    part = json.loads((tmp_path / "part.json").read_text())["traceEvents"]
    assert all(event in found for event in part)
    spans = [event for event in part if event["ph"] == "X"]
    assert 0 < len(spans) < sum(event["ph"] == "X" for event in found)
    assert all(event["ts"] <= 0.02e6 and event["ts"] + event["dur"] >= 0.01e6 for event in spans)


def test_the_command_writes_json_that_can_be_read(folder, tmp_path, capsys):
    for name, opened in (("trace.json", open), ("deep/trace.json.gz", gzip.open)):
        assert main(["perfetto", str(folder), "-o", str(tmp_path / name)]) == 0
        with opened(tmp_path / name, "rt") as stream:
            content = json.load(stream)
        assert len(content["traceEvents"]) == len(list(events(folder)))
        assert f"{len(content['traceEvents']):,} events; open it at https://ui.perfetto.dev" in capsys.readouterr().out
    assert main(["perfetto", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
