"""Calibrations: of a simulated device they find its cost model again, after a kill they go on, and refits are told."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from shutil import copytree

import pytest
from hydra import initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import launcher, plugins
from experiments import settings as front_door
from experiments.calibrate import __main__ as command
from experiments.calibrate import design, measure, serving, study
from experiments.calibrate.observe import observe, shape_of
from experiments.calibrate.study import Calibrate
from experiments.settings import SettingError
from experiments.study import Composer
from playground.core import Spec
from playground.model import ModelShape
from playground.sim.cost import Calibrated, Roofline
from playground.sim.cost.profile import Profile
from playground.sim.device import Device
from playground.trace import read

DEVICE = ("model=llama-3.1-8b", "device=h100", "backend=sim", "++backend.cost.graph_rows=0")
SMALL = (*DEVICE, "limits.max_seqs=16", "limits.max_tokens=512", "kv.blocks=1024", "kv.host_blocks=64")
QUICK = Calibrate(policies=("vllm_v1", "vllm_v0"), passes=1, most_context=2048, requests=24)


@contextmanager
def hydra():
    for registering in (front_door, plugins, launcher):
        registering.register()
    with initialize_config_module("conf", version_base="1.3"):
        yield


def calibrate(folder, *overrides, how=QUICK):
    with hydra():
        return how.calibrated(folder, Composer(folder, [*SMALL, *overrides]))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Where a user's own profiles are kept."""
    patch = pytest.MonkeyPatch()
    place = tmp_path_factory.mktemp("own")
    patch.setattr(study, "OWN", place)
    yield place
    patch.undo()


@pytest.fixture(scope="module")
def made(own, tmp_path_factory):
    """(folder, profile, file) of a simulated device without noise."""
    folder = tmp_path_factory.mktemp("calibration") / "run"
    return folder, *calibrate(folder)


def parts(config="h100"):
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from playground.sim.cost.profile import shipped

    device: Device = instantiate(OmegaConf.load(shipped().parent / f"{config}.yaml"))
    return ModelShape.read("llama-3.1-8b"), device


# --- a simulated device is found again


def test_all_errors_on_held_out_steps_are_small(made):
    _, profile, _ = made
    assert {"random, decode", "random, mixed", "random, prefill"} < set(profile.held_out)
    assert {"served vllm_v0, decode", "served vllm_v0, prefill"} < set(profile.held_out)
    for name, error in profile.held_out.items():
        assert error.mape <= 0.01, name
        assert error.low <= error.mape <= error.high
        assert profile.fitted.held_out[name].mape <= 0.025, name
    assert profile.spread == 0.0


def test_repeated_steps_are_judged_one_by_one(made):
    """Or decodes are far too long: the simulator says many of them in one row."""
    folder, profile, _ = made
    counts = read(folder / "served" / "vllm_v0", "steps").column("count").to_pylist()
    held_out = profile.held_out["served vllm_v0"]
    assert held_out.steps == sum(counts) > 1.5 * len(counts)
    assert profile.held_out["served vllm_v0, decode"].p95 < 0.02


def test_the_profile_simulates_what_the_device_does(made):
    _, _, file = made
    model, device = parts()
    truth = Roofline(model, device, graph_rows=0)
    for form, off in (("profiled", 0.01), ("fitted", 0.05)):
        cost = Calibrated(model, device, path=str(file), form=form)
        for groups in ([(9, 700, 1)], [(1, 0, 300)], [(5, 100, 1), (1, 256, 200)], [(1, 1300, 1)]):
            one = shape_of([design.Group(*group) for group in groups])
            assert cost.stage(one, 0).device_time == pytest.approx(truth.stage(one, 0).device_time, rel=off)
            assert cost.host(one) == pytest.approx(truth.host(one), rel=1e-3)
        assert cost.copy(50) == pytest.approx(truth.copy(50), rel=1e-3)


def test_intervals_hold_their_coefficients(made):
    _, profile, _ = made
    for line in (*profile.fitted.stages, profile.host, profile.copy_in, profile.copy_out):
        for name, value in line.coefficients.items():
            assert line.low[name] <= value * (1 + 1e-9) + 1e-15
            assert line.high[name] >= value * (1 - 1e-9)
    assert profile.fitted.fitted_to == "measurements"
    weights = 16e9 / 3.35e12  # seconds to read an 8B model in bf16 at the sheet's bandwidth
    assert weights < profile.fitted.stages[0].low["base"] < 1.5 * weights


def test_stages_of_a_pipeline_are_told_apart(own, tmp_path):
    _, file = calibrate(tmp_path / "run", "parallel.layers=[10,22]", how=replace(QUICK, requests=12))
    assert file.name == "pp2.json"
    model, device = parts()
    truth = Roofline(model, device, stages=2, layers=[10, 22], graph_rows=0)
    cost = Calibrated(model, device, stages=2, layers=[10, 22], path=str(file))
    one = shape_of([design.Group(9, 700, 1), design.Group(1, 0, 300)])
    for stage in range(2):
        assert cost.stage(one, stage).device_time == pytest.approx(truth.stage(one, stage).device_time, rel=0.01)
    assert cost.transfer(one) == pytest.approx(truth.transfer(one), rel=1e-3)


def test_steps_are_read_in_the_order_in_which_they_were_timed(made):
    """For what heats a device up comes before what is slower for it."""
    folder = made[0]
    facts = json.loads((folder / "calibration.json").read_text())
    seen = observe(folder, facts, Roofline(*parts(), graph_rows=0)).seen
    for session in {step.session for step in seen}:
        times = [step.at for step in seen if step.session == session]
        assert times == sorted(times)
    assert len({step.session for step in seen}) == 3  # the probes, and each policy


def test_a_meter_comes_to_its_end_with_the_last_step(own, tmp_path, monkeypatch):
    told = []

    class Told:
        def update(self, done, total, now):
            told.append((done, total))

    @contextmanager
    def meter(title, unit="requests"):
        yield Told()
        units.append((title, unit))

    units = []
    monkeypatch.setattr(study, "meter", meter)
    with hydra():
        replace(QUICK, policies=("vllm_v1",))._measure(tmp_path / "run", Composer(tmp_path / "run", SMALL))
    steps, served = [one for one in told if one[1] != told[-1][1]], [one for one in told if one[1] == told[-1][1]]
    for counts in (steps, served):
        assert [done for done, _ in counts] == sorted({done for done, _ in counts})
        assert counts[-1][0] == counts[-1][1]
    assert units == [("timing steps", "steps"), ("serving, vllm_v1", "requests")]


# --- interrupted


class Killed(Exception):
    pass


def lines(folder):
    return (folder / measure.SAMPLES).read_text().splitlines()


def test_what_was_measured_before_a_kill_stays(made, own, tmp_path, monkeypatch):
    whole, folder, keep = made[0], tmp_path / "run", measure._keep
    written = []

    def killing(*arguments):
        if len(written) == 40:
            raise Killed
        written.append(arguments)
        keep(*arguments)

    monkeypatch.setattr(measure, "_keep", killing)
    with pytest.raises(Killed):
        calibrate(folder)
    with (folder / measure.SAMPLES).open("a") as file:
        file.write('{"pass": 0, "probe": "dec')  # the line that the kill cut off
    before = lines(folder)[:40]
    monkeypatch.setattr(measure, "_keep", keep)
    profile, _ = calibrate(folder)
    after = lines(folder)
    assert after[:40] == before
    assert sorted(row_of(line) for line in after) == sorted(row_of(line) for line in lines(whole))
    assert profile.held_out["random"].mape <= 0.01
    with hydra():
        QUICK._measure(folder, Composer(folder, SMALL))
    assert lines(folder) == after  # nothing is measured twice


def test_passes_are_added_to_those_that_are_there(made, tmp_path):
    folder = tmp_path / "run"
    copytree(made[0], folder)
    before = lines(folder)
    with hydra():
        replace(QUICK, passes=2)._measure(folder, Composer(folder, SMALL))
    after = lines(folder)
    assert after[: len(before)] == before
    assert {row_of(line)[1] for line in after[len(before) :]} == {1}
    assert len(after) - len(before) == len([line for line in before if not row_of(line)[0].startswith("ramp")])


def row_of(line):
    row = json.loads(line)
    return row["probe"], row["pass"]


def test_serving_that_was_interrupted_is_repeated_and_nothing_else(made, own, tmp_path, monkeypatch):
    folder, served = tmp_path / "run", []
    log = study.serving.log

    def killing(*arguments):
        served.append(arguments[3].name)
        assert not arguments[3].exists()
        log(*arguments)
        if len(served) == 2:
            raise Killed  # before it is said to be complete

    monkeypatch.setattr(study.serving, "log", killing)
    with pytest.raises(Killed):
        calibrate(folder)
    with hydra():
        QUICK._measure(folder, Composer(folder, SMALL))
    assert served == ["vllm_v1", "vllm_v0", "vllm_v0"]


def test_another_calibration_in_the_folder_is_refused(made):
    folder = made[0]
    with pytest.raises(SettingError, match=r"holds a calibration with other settings \(spec, probes.*another run_dir"):
        calibrate(folder, "limits.max_seqs=8")
    with pytest.raises(SettingError, match=r"other settings \(requests\)"):
        calibrate(folder, how=replace(QUICK, requests=41))


@pytest.mark.parametrize("name", ["passes", "most_context", "requests"])
def test_options_that_cannot_be(name):
    with pytest.raises(SettingError, match=rf"study\.{name}=0 must be at least 1"):
        Calibrate(**{name: 0})


def test_one_replica_is_calibrated(own, tmp_path):
    with pytest.raises(SettingError, match=r"parallel\.replicas=2: calibrate one replica"):
        calibrate(tmp_path / "run", "parallel=dp2")


def test_limits_too_small_to_calibrate_are_told(own, tmp_path):
    with pytest.raises(SettingError, match="no step of the family context was timed: calibrate with larger limits"):
        calibrate(tmp_path / "run", "kv.blocks=20", how=replace(QUICK, policies=("vllm_v1",), most_context=100))


# --- fitted once more


@pytest.fixture
def refit(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["calibrate", *map(str, arguments)])
        code = command.main()
        return code, *capsys.readouterr()

    return call


def test_a_refit_says_the_same(made, refit, tmp_path):
    folder, profile, _ = made
    code, out, _ = refit(folder, "-o", tmp_path)
    file = tmp_path / "h100" / "llama-3.1-8b" / "single.json"
    assert code == 0
    assert str(file) in out
    assert Profile.load(file) == profile
    head = next(line for line in out.splitlines() if "MAPE" in line)
    assert head.split()[:2] == ["steps", "count"]
    row = next(line for line in out.splitlines() if line.strip().startswith("random, mixed"))
    assert row.count("..") == 2  # an interval of either model


def test_other_runs_are_fitted_to_too(made, refit, tmp_path):
    folder, profile, _ = made
    more = folder / "served" / "vllm_v1"
    assert refit(folder, "-o", tmp_path, "--runs", more)[0] == 0
    found = Profile.load(tmp_path / "h100" / "llama-3.1-8b" / "single.json")
    assert found.facts["runs"] == ["vllm_v1"]
    assert found.fitted.points > profile.fitted.points


def test_stages_that_took_no_time_are_left_out_and_counted(made, refit, tmp_path):
    """A pipeline's processes may hear of a stage's end only when the next one has ended, too."""
    folder = tmp_path / "run"
    copytree(made[0], folder)
    rows = [json.loads(line) for line in lines(folder)]
    for row in rows[5:8]:
        row["stages"] = [0.0]
    (folder / measure.SAMPLES).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, _ = refit(folder, "-o", tmp_path / "out")
    found = Profile.load(tmp_path / "out" / "h100" / "llama-3.1-8b" / "single.json")
    assert (code, found.facts["untimed"]) == (0, 3)
    assert "3 steps, of which a stage is said to have taken no time, were left out" in " ".join(out.split())
    assert found.held_out["random"].mape < 0.01


def test_what_cannot_be_refitted_is_told_in_a_line(made, refit, tmp_path):
    folder, _, file = made
    code, _, err = refit(tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "no calibration" in err
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for name in ("calibration.json", "config.yaml"):
        (spoilt / name).write_bytes((folder / name).read_bytes())
    (spoilt / measure.SAMPLES).write_text("rubbish\n" + "\n".join(lines(folder)))
    assert refit(spoilt)[::2] == (
        2,
        f"error: {spoilt / measure.SAMPLES}, line 1: no sample (Expecting value: line 1 column 1 (char 0)); delete the "
        "file to begin anew\n",
    )
    for name, text in (("calibration.json", "{"), ("config.yaml", "a: [")):
        kept = (spoilt / name).read_text()
        (spoilt / name).write_text(text)
        code, _, err = refit(spoilt)
        assert (code, err.count("\n")) == (2, 1)
        assert "cannot be read" in err
        (spoilt / name).write_text(kept)
    code, _, err = refit("--tables", file)
    assert (code, "has a fitted model already, of measurements" in err) == (2, True)
    code, _, err = refit("--tables", tmp_path / "none.json")
    assert (code, "cannot be read" in err) == (2, True)


def test_tables_whose_measurements_are_lost_are_fitted_and_marked(made, refit, tmp_path):
    _, profile, _ = made
    bare = replace(profile, fitted=None)
    bare.save(tmp_path / "bare.json")
    code, out, _ = refit("--tables", tmp_path / "bare.json")
    found = Profile.load(tmp_path / "bare.json")
    assert code == 0
    assert "which is not how far off the device" in out
    assert found.fitted.fitted_to == "tables"
    assert replace(found, fitted=None) == bare
    model, device = parts()
    one = shape_of([design.Group(5, 100, 1), design.Group(1, 256, 200)])
    with pytest.warns(UserWarning, match="fitted to its own tables"):
        fitted = Calibrated(model, device, path=str(tmp_path / "bare.json"), form="fitted").stage(one, 0)
    tables = Calibrated(model, device, path=str(tmp_path / "bare.json")).stage(one, 0)
    assert fitted.device_time == pytest.approx(tables.device_time, rel=0.05)
    assert found.fitted.held_out["random"].mape < 0.02


# --- the design

SPECS = st.builds(
    Spec,
    blocks=st.integers(1, 3000),
    block_size=st.sampled_from([1, 4, 16]),
    host_blocks=st.sampled_from([0, 64]),
    max_seqs=st.integers(1, 300),
    max_tokens=st.integers(2, 9000),
    max_length=st.sampled_from([64, 2048, 1 << 20]),
)


@settings(max_examples=25, deadline=None)
@given(SPECS, st.booleans(), st.integers(16, 40_000))
def test_every_step_of_a_design_is_possible(spec, graphs, most):
    probes = design.design(spec, graphs, 0, most)
    assert len({probe.name for probe in probes}) == len(probes)
    for probe in probes:
        assert probe.tokens <= spec.max_tokens
        assert probe.sequences <= spec.max_seqs
        assert probe.blocks(spec.block_size) <= spec.blocks
        assert probe.copied_blocks <= min(spec.host_blocks, spec.blocks)
        for group in probe.groups:
            assert group.start >= 0 and group.length >= 1
            assert probe.end(group) < spec.max_length
    assert probes == design.design(spec, graphs, 0, most)  # what is interrupted is designed again


def test_a_design_reaches_what_a_server_can_do():
    """So that no step of a run with the same limits lies beyond the profile."""
    spec = Spec(600, max_seqs=16, max_tokens=512)
    shapes = [shape_of(probe.groups) for probe in design.design(spec, False, 0, 4096)]
    room = 600 * 16
    fullest = [one.decode_context for one in shapes if one.decodes == one.sequences == 16 and one.decode_longest > 500]
    assert max(fullest) > room - 16 * (16 + design.REPEATS)
    assert max(shape.tokens for shape in shapes) == 512
    assert max(shape.sequences for shape in shapes) == 16
    assert max(shape.prefill_pairs for shape in shapes) > 512 * (4096 - 512)


def test_ragged_contexts_have_one_mean_and_a_long_tail():
    probes = [probe for probe in design.design(Spec(9999, max_seqs=8), False) if probe.family == "ragged"]
    assert {probe.sequences for probe in probes} == {4, 8}
    for probe in probes:
        one = shape_of(probe.groups)
        mean = one.decode_context / one.decodes
        assert one.decode_longest == pytest.approx(3 * mean, rel=0.04)
        ratios = [(b.start + 1) / (a.start + 1) for a, b in pairwise(probe.groups)]
        assert ratios[-1] == pytest.approx(ratios[-2], rel=0.1)


@pytest.mark.parametrize("rows", [2, 3, 4, 100])
def test_contexts_are_spread_as_far_as_rows_allow(rows):
    starts = design.spread(rows, 1000)
    assert sum(starts) == pytest.approx(1000 * rows, abs=rows)
    assert starts == sorted(starts)
    assert max(starts) == pytest.approx(1000 * min(3, 0.95 * rows), rel=0.01)


def test_what_is_served_keeps_to_the_longest_context():
    spec = Spec(9999, max_seqs=16)
    for most in (64, 500, 5000):
        batches = serving.requests(spec, 0, 50, most)
        assert all(one.prompt_length + one.max_tokens < most for batch in batches for one in batch)
    assert len(batches[-1]) == 50
