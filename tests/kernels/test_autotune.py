"""Tuned configs on disk: found again, merged, and never in the way of a run."""

import json
import multiprocessing
import os
import warnings
from dataclasses import dataclass

import pytest

from kernels import autotune
from kernels.autotune import Bucket, Entry, Store, fingerprint, merge, read, tune

BUCKET = Bucket("decode", "bfloat16", "h32k8d128", 32)
DEVICE = "NVIDIA H200"


@dataclass(frozen=True)
class Config:
    tile: int
    warps: int = 4

    def __post_init__(self):
        if self.tile % 16:
            raise ValueError(f"tile={self.tile}: not a multiple of 16")


@pytest.fixture
def store(tmp_path):
    return lambda: Store(DEVICE, folder=tmp_path / "mine", shipped=tmp_path / "shipped")


@pytest.fixture(autouse=True)
def no_warning():
    """Unless a test expects one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sized(size):
    return Bucket(BUCKET.kernel, BUCKET.dtype, BUCKET.shape, size)


def test_nothing_tuned(store):
    assert store().best(Config, BUCKET, "v1") is None


def test_what_is_recorded_is_found_by_the_next_process(store):
    store().record(BUCKET, Config(64, 8), 12.345, "v1")
    assert store().best(Config, BUCKET, "v1") == Config(64, 8)
    content = json.loads(store().path.read_text())
    assert content["version"] == 1 and content["device"] == DEVICE
    assert content["entries"]["decode|bfloat16|h32k8d128|32"] == {
        "config": {"tile": 64, "warps": 8}, "us": 12.35, "source": "v1"
    }  # fmt: skip
    assert store().path.name == "nvidia-h200.json"


def test_the_nearest_amount_of_work_serves(store):
    tuned = store()
    for size in (1, 8, 128):
        tuned.record(sized(size), Config(16 * size), 1.0, "v1")
    tiles = [tuned.best(Config, sized(size), "v1").tile // 16 for size in (1, 2, 4, 16, 64, 512)]
    assert tiles == [1, 1, 8, 8, 128, 128]
    assert tuned.best(Config, Bucket("decode", "bfloat16", "h8k8d64", 8), "v1") is None


def test_shipped_results_serve_and_own_ones_go_before_them(store, tmp_path):
    merge(tmp_path / "shipped" / "nvidia-h200.json", DEVICE, {BUCKET: Entry({"tile": 32}, 1.0, "v1")})
    tuned = store()
    assert tuned.best(Config, BUCKET, "v1") == Config(32)
    tuned.record(BUCKET, Config(64), 2.0, "v1")
    assert store().best(Config, BUCKET, "v1") == Config(64)


def test_another_version_of_the_kernel_is_told_once(store):
    store().record(BUCKET, Config(64), 1.0, "v1")
    tuned = store()
    with pytest.warns(UserWarning, match="tuned for another version of the kernel") as told:
        assert tuned.best(Config, BUCKET, "v2") is None
        assert tuned.best(Config, BUCKET, "v2") is None
    assert len(told) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 1}', '{"version": 1, "entries": {"decode": {}}}', "\x00\x01", '"text"', "null",
     '{"version": 1, "entries": {"a|b|c|1": {"config": {"tile": [1]}, "us": 1, "source": "v1"}}}',
     '{"version": 1, "entries": []}'],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_written_anew(store, content):
    path = store().path
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(UserWarning, match="ignored") as told:
        tuned = store()
        assert tuned.best(Config, BUCKET, "v1") is None
    assert len(told) == 1
    tuned.record(BUCKET, Config(64), 1.0, "v1")
    assert store().best(Config, BUCKET, "v1") == Config(64)


def test_damaged_entries_are_ignored_and_the_others_serve(store):
    tuned = store()
    tuned.record(BUCKET, Config(64), 1.0, "v1")
    content = json.loads(tuned.path.read_text())
    sound = content["entries"][str(BUCKET)]
    content["entries"] |= {
        "decode|bfloat16|h32k8d128|0": sound, "decode|bfloat16|h32k8d128|many": sound, "decode": sound,
        str(sized(8)): {"config": {"tile": 16.5}, "us": 1, "source": "v1"}, str(sized(16)): {"config": {"tile": 16}},
        str(sized(64)): None, str(sized(128)): {"config": {"tile": 16}, "us": "fast", "source": "v1"},
    }  # fmt: skip
    tuned.path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"7 of 8 entries are no tuned configs \(.*; ignored") as told:
        again = store()
    assert len(told) == 1
    assert again.best(Config, sized(1), "v1") == Config(64)


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"version": 1, "entries": {}, "more": ' + "9" * 5000 + "}", b"\xff{"]
)
def test_what_is_no_json_at_all(store, content):
    path = store().path
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"not readable .*; ignored"):
        assert store().best(Config, BUCKET, "v1") is None


def test_an_amount_of_work_beyond_all_measure(store):
    store().record(sized(10**400), Config(64), 1.0, "v1")
    assert store().best(Config, BUCKET, "v1") == Config(64)


def test_a_file_of_another_version_is_ignored(store):
    path = store().path
    path.parent.mkdir()
    path.write_text('{"version": 7, "entries": {}}')
    with pytest.warns(UserWarning, match="of version 7, not 1; ignored"):
        store()


@pytest.mark.parametrize("config", [{"tile": 17}, {"tile": 64, "wraps": 4}, {}, {"tile": "wide"}])
def test_what_is_no_config_is_ignored(store, config):
    merge(store().path, DEVICE, {BUCKET: Entry(config, 1.0, "v1")})
    with pytest.warns(UserWarning, match="not a config"):
        assert store().best(Config, BUCKET, "v1") is None


@pytest.mark.parametrize("own", [Entry({"tile": 64}, 1.0, "v0"), Entry({"tile": 17}, 1.0, "v1")])
def test_an_old_or_wrong_result_of_ones_own_does_not_hide_what_is_shipped(store, tmp_path, own):
    merge(tmp_path / "shipped" / "nvidia-h200.json", DEVICE, {BUCKET: Entry({"tile": 32}, 1.0, "v1")})
    merge(store().path, DEVICE, {BUCKET: own})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert store().best(Config, BUCKET, "v1") == Config(32)
    assert len(told) == (own.source == "v1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_no_error(store):
    tuned = store()
    tuned.path.parent.mkdir(mode=0o500)
    with pytest.warns(UserWarning, match="not written"):
        tuned.record(BUCKET, Config(64), 1.0, "v1")
    assert tuned.best(Config, BUCKET, "v1") == Config(64)


def test_a_path_that_is_no_folder_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"not readable.*; ignored"):
        tuned = Store(DEVICE, folder=tmp_path / "file", shipped=tmp_path)
    with pytest.warns(UserWarning, match="not written"):
        tuned.record(BUCKET, Config(64), 1.0, "v1")
    assert tuned.best(Config, BUCKET, "v1") == Config(64)


def _write(folder, writer, count):
    store = Store(DEVICE, folder=folder, shipped=folder)
    for index in range(count):
        store.record(Bucket("decode", "float16", f"w{writer}", index + 1), Config(16), 1.0, "v1")


def test_concurrent_writers_never_break_the_file(tmp_path):
    writers, count = 4, 12
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write, args=(tmp_path, writer, count)) for writer in range(writers)]
    for process in processes:
        process.start()
    path = tmp_path / "nvidia-h200.json"
    while any(process.is_alive() for process in processes):
        read(path)  # a half-written file would warn, and a warning is an error here
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f".{path.name}.lock", path.name]
    written = [bucket.shape for bucket in read(path)]
    assert [written.count(f"w{writer}") for writer in range(writers)] == [count] * writers


def test_a_writer_that_is_killed_leaves_a_sound_file_and_no_lock(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write, args=(tmp_path, 0, 100_000))
    process.start()
    path = tmp_path / "nvidia-h200.json"
    while not path.is_file():
        assert process.is_alive()
    process.kill()
    process.join()
    before = len(read(path))
    assert before > 0
    merge(path, DEVICE, {BUCKET: Entry({"tile": 16}, 1.0, "v1")})
    assert len(read(path)) == before + 1


def test_a_writer_that_sleeps_on_the_lock_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "TRIES", 2)
    store = Store(DEVICE, folder=tmp_path, shipped=tmp_path / "none")
    with autotune._alone(store.path):
        store.record(BUCKET, Config(16), 1.0, "v1")
    assert list(read(store.path)) == [BUCKET]


def test_a_writer_brings_back_what_another_has_overtaken(tmp_path):
    store = Store(DEVICE, folder=tmp_path, shipped=tmp_path)
    store.record(sized(1), Config(16), 1.0, "v1")
    store.path.unlink()
    merge(store.path, DEVICE, {sized(2): Entry({"tile": 32}, 1.0, "v1")})
    store.record(sized(4), Config(64), 1.0, "v1")
    assert [bucket.size for bucket in read(store.path)] == [1, 2, 4]


# --- tuning


def test_the_fastest_wins_and_failures_are_told(store):
    times = {16: 3.0, 32: 1.0, 64: 2.0}
    failed = []

    def measure(config):
        if config.tile == 128:
            raise RuntimeError("out of shared memory")
        return times[config.tile]

    candidates = [Config(16), Config(128), Config(32), Config(64)]
    best = tune(store(), BUCKET, candidates, measure, "v1", lambda config, error: failed.append((config, str(error))))
    assert best == Config(32) and failed == [(Config(128), "out of shared memory")]
    assert store().best(Config, BUCKET, "v1") == Config(32)


def test_nothing_works(store):
    def measure(config):
        raise RuntimeError

    assert tune(store(), BUCKET, [Config(16)], measure, "v1") is None
    assert store().best(Config, BUCKET, "v1") is None


def test_no_tuning_inside_a_capture(store, monkeypatch):
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="tuning inside a graph capture"):
        tune(store(), BUCKET, [Config(16)], lambda config: 1.0, "v1")


def test_the_default_folder_follows_the_desktop_rule(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store(DEVICE).path == tmp_path / "serving-playground" / "kernels" / "nvidia-h200.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    with monkeypatch.context() as homeless:
        homeless.setattr("pathlib.Path.home", _no_home)
        homeless.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        assert tmp_path in autotune.default_folder().parents
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert autotune.default_folder() == tmp_path / "home" / ".cache" / "serving-playground" / "kernels"


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_what_cannot_be_written_whole_is_not_left_in_part(store, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    tuned = store()
    monkeypatch.setattr(autotune.json, "dump", full)
    with pytest.warns(UserWarning, match=r"not written \(No space left on device\)"):
        tuned.record(BUCKET, Config(64), 1.0, "v1")
    assert [file.name for file in tuned.path.parent.iterdir()] == [f".{tuned.path.name}.lock"]


# --- fingerprints

KERNEL = """
import triton

@triton.jit(do_not_specialize=["n"])
def _kernel(x, n):
    \"\"\"What it does.\"\"\"
    y = x + 1  # why
    return "text", y

def launch(x):
    return _kernel[(1,)](x)
"""


def printed(tmp_path, source):
    path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.py"
    path.write_text(source)
    return fingerprint(path)


def test_comments_docstrings_and_launchers_do_not_count(tmp_path):
    original = printed(tmp_path, KERNEL)
    for old, new in (("  # why", ""), ("What it does.", "Another."), ("(1,)", "(2,)"), ("x, n):", "x,  n):")):
        assert old in KERNEL and printed(tmp_path, KERNEL.replace(old, new)) == original


def test_the_code_of_a_kernel_counts(tmp_path):
    original = printed(tmp_path, KERNEL)
    for old, new in (("x + 1", "x + 2"), ('"text"', '"other"'), ("_kernel(x", "_other(x")):
        assert old in KERNEL and printed(tmp_path, KERNEL.replace(old, new)) != original


def test_what_is_shipped_is_readable_and_fresh():
    pytest.importorskip("triton")
    from kernels.triton import decode, linear, prefill

    kinds = {"decode": (decode.DecodeConfig, decode.source()), "prefill": (prefill.PrefillConfig, prefill.source()),
             "linear": (linear.LinearConfig, linear.source())}  # fmt: skip
    for path in sorted(autotune.SHIPPED.glob("*.json")):
        for bucket, entry in read(path).items():
            kind, source = kinds[bucket.kernel]
            kind(**entry.config)
            assert entry.source == source, f"{path.name}: {bucket} was tuned for another version: tune again"
