"""Comparing speeds: the same load for all, Vidur's tables give the steps of our model, ratios are of one round."""

from __future__ import annotations

import csv
import json
import lzma

import pytest

from experiments.peers import contestants, load, speed, vidur_tables
from experiments.peers.contestants import Contestant, Prepared, Timed
from playground.sim.cost.shape import Shape

GIVEN = ["workload=normal", "workload.requests=20", "model=llama-3.1-8b", "device=h200"]


@pytest.fixture(scope="module")
def made():
    return load.read(GIVEN)


def test_vidurs_tables_give_our_steps(made, tmp_path):
    """Put together as Vidur puts them together: per layer, attention of several decodes 10 % on top."""
    vidur_tables.write(tmp_path, made.cost, made.layers, 16, 64, 512)
    dense, decode, prefill = (_read(tmp_path, name) for name in ("mlp_up_proj", "attn_decode", "attn_prefill"))
    decodes = Shape(16, 16, 16, 16, 16 * 512, 512, 0, 0)
    predicted = made.layers * (dense[16,] + 1.1 * decode[16, 512]) / 1e3
    assert predicted == pytest.approx(made.cost.stage(decodes, 0).device_time + made.cost.host(decodes))
    chunk = Shape(64, 1, 1, 0, 0, 0, 64 * 448 + 64 * 65 // 2, 512, ((448, 64),))
    predicted = made.layers * (dense[64,] + prefill[512, 64]) / 1e3
    assert predicted == pytest.approx(made.cost.stage(chunk, 0).device_time + made.cost.host(chunk))
    assert {(n,) for n in range(1, 65)} == set(_read(tmp_path, "attn_kv_cache_save"))
    assert all(set(_read(tmp_path, name)) == set(dense) for name in vidur_tables.NOTHING)


def test_everyone_gets_the_same_requests(made, tmp_path):
    load.write_azure(tmp_path / "azure.csv", made.requests)
    load.write_mooncake(tmp_path / "mooncake.jsonl", made.requests)
    with (tmp_path / "azure.csv").open() as text:
        azure = list(csv.DictReader(text))
    mooncake = [json.loads(line) for line in (tmp_path / "mooncake.jsonl").read_text().splitlines()]
    assert len(made.requests) == len(azure) == len(mooncake) == 20
    for one, row, line in zip(made.requests, azure, mooncake, strict=True):
        assert (float(row["Time"]), int(row["PromptTokenCount"])) == (one.arrival, one.prompt_length)
        assert int(row["CompletionTokenCount"]) == line["output_length"] == one.output_length
        assert line["input_length"] == one.prompt_length and line["timestamp"] == pytest.approx(1e3 * one.arrival)
    hashes = [found for line in mooncake for found in line["hash_ids"]]
    assert len(set(hashes)) == len(hashes) == sum(-(-one.prompt_length // load.BLOCK) for one in made.requests)


def test_a_run_of_ours_is_timed_in_a_process_of_its_own(tmp_path):
    prepared = Prepared(GIVEN, tmp_path, 1000, 256, 2048)
    lean, whole = (contestants.timed(one, prepared) for one in contestants.ours())
    assert lean.requests == whole.requests == 20
    assert lean.steps == whole.steps and lean.finished == whole.finished, "skipping ahead changes nothing"
    assert 0 < lean.serving < 30 and 0 < lean.start_up < 30


def test_a_contestant_that_fails_is_named(tmp_path):
    broken = Contestant("Broken", "1", lambda _: ["python3", "-c", "raise SystemExit('no tables')"])
    with pytest.raises(RuntimeError, match="Broken ended with 1: no tables"):
        contestants.timed(broken, Prepared([], tmp_path, 1, 1, 1))


def test_ratios_are_of_runs_of_the_same_round():
    ours = [Timed(1.0, seconds, 100, 10, 5.0) for seconds in (1.0, 2.0, 4.0)]
    theirs = [Timed(3.0, seconds, 100, 12, 5.0) for seconds in (10.0, 40.0, 40.0)]
    found = speed.summary(ours, theirs)
    assert found["ours_is_times_as_fast"] == [10.0, 10.0, 20.0]
    assert found["requests_per_second"] == [2.5, 2.5, 10.0]
    assert found["start_up"] == [3.0, 3.0, 3.0] and found["steps"] == 12


def test_what_is_quoted_is_not_told_as_measured():
    rows = [{"name": "ours", "requests_per_second": [5.0, 4.0, 6.0], "start_up": [1.0] * 3}]
    rows[0]["ours_is_times_as_fast"] = [1.0, 1.0, 1.0]
    record = {"peers": {"ours": "1"}, "cases": [{"case": "light", "rows": rows}], "quoted": speed.QUOTED}
    measured, *quoted = speed.told(record).splitlines()[2:]
    assert "5 | 4-6" in measured and "quoted" not in measured
    assert len(quoted) == len(speed.QUOTED) and all("not measured here" in row for row in quoted)


def _read(folder, operator):
    with lzma.open(folder / "compute" / f"{operator}.csv.xz", "rt") as text:
        rows = [list(map(float, row)) for row in list(csv.reader(text))[1:]]
    return {tuple(map(int, row[:-1])): row[-1] for row in rows}
