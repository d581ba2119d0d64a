"""The mirrors of a run, read back."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.curves import windows

SMALL = ("workload.requests=12", "workload.rate=20", "kv.blocks=600")


def test_wandb_offline_holds_config_curves_summary_and_files(playground):
    pytest.importorskip("wandb")
    outcome = playground(*SMALL, "logger=wandb", "seed=5")
    assert outcome.code == 0, outcome.err
    assert "W&B (offline)" in outcome.err and "logging took" in outcome.err
    (log,) = outcome.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    read = inspect(log)
    assert read["config"]["seed"] == 5
    assert read["config"]["policy"]["budget"]["_target_"] == "policies.budget.ChunkedPrefill"
    assert read["summary"]["completed"] == 12
    assert read["summary"]["mean_ttft_ms"] == pytest.approx(outcome.last["mean_ttft_ms"])
    assert 0 < read["rows"] <= 1000
    assert {"steps.parquet", "slices.parquet", "requests.parquet", "summary.json", "config.yaml"} <= read["files"]
    # All of it inside the run's folder: a later `wandb sync` needs nothing else.
    assert list(outcome.run_dir.glob("wandb-data/**/staging/*"))


def inspect(log: Path) -> dict:
    """From the records of W&B's own format, by the reader that comes with it."""
    from wandb.proto import wandb_internal_pb2 as pb

    read = {"config": {}, "summary": {}, "rows": 0, "files": set()}
    for blob in records(log.read_bytes()):
        record = pb.Record()
        record.ParseFromString(blob)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            read["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            read["rows"] += 1
        elif kind == "summary":
            read["summary"] |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            read["files"] |= {entry.path for entry in record.request.log_artifact.artifact.manifest.contents}
        elif kind == "artifact":
            read["files"] |= {entry.path for entry in record.artifact.manifest.contents}
    return read


def records(data: bytes):
    """LevelDB's log framing: blocks of 32 KiB, each record with a header of crc, length and kind; 7 bytes lead."""
    block, position, held = 32768, 7, b""
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        held += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield held
            held = b""


def test_tensorboard_holds_curves_and_summary(playground):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = playground(*SMALL, "logger=tensorboard")
    events = EventAccumulator(str(outcome.run_dir / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert "curves/kv_usage" in tags["tensors"]
    assert "summary/mean_ttft_ms" in tags["tensors"]


def test_without_the_package_the_extra_is_named(playground, monkeypatch):
    monkeypatch.setattr("experiments.logger.find_spec", lambda _: None)
    outcome = playground(*SMALL, "logger=wandb")
    assert outcome.code == 2
    assert "pip install -e '.[wandb]'" in outcome.err


def test_windows_are_bounded_and_lose_no_token():
    count = 5000
    steps = pd.DataFrame(
        {
            "planned": range(count), "started": range(count), "finished": [i + 1.0 for i in range(count)],
            "prefill_tokens": 3, "decode_tokens": 2, "waiting": 1, "running": 4, "blocks_free": 5, "preempted": 0,
            "count": 1,
        }
    )  # fmt: skip
    rows = windows(steps, blocks=10, most=100)
    assert len(rows) == 100
    width = count / 100
    assert (rows["prefill_tokens_per_s"] * width).sum() == pytest.approx(3 * count)
    assert rows["kv_usage"].unique() == [0.5]
    assert rows["step_ms"].unique() == [1000.0]
    assert rows["time"].iloc[-1] == count


def test_wandb_is_readable_by_its_own_terminal_viewer(playground):
    pytest.importorskip("wandb")
    outcome = playground(*SMALL, "logger=wandb")
    (log,) = outcome.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", "--summary", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mean_ttft_ms" in done.stdout
