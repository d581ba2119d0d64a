"""Twins: the twin of a run on a simulated clock is that run, step by step; of any other it meets the same limits."""

import json
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from experiments import run
from experiments.composing import composed
from experiments.fidelity.predict import predict
from experiments.fidelity.twin import PAIR, pair
from experiments.settings import SettingError
from playground.sim.cost.model import IDLE
from playground.sim.cost.profile import shipped
from playground.trace import expand, read

SMALL = ("model=tiny", "kv.blocks=90", "workload.requests=16", "workload.rate=3000", "workload.max_length=256")
STEPPED = ("backend=sim", "backend.skip_ahead=false")
SHEET = ["backend/cost=roofline"]
COUNTED = ["step", "group", "lane", "prefill_tokens", "decode_tokens", "sampled", "blocks_free", "preempted"]
TIMED = ["planned", "launched", "started", "finished"]


@contextmanager
def nobody(_title):
    class Nobody:
        def update(self, *_): ...

    yield Nobody()


def made(folder, *overrides):
    """A run's folder."""
    config = composed([*SMALL, *overrides])
    config.run_dir = str(folder)
    run.execute(config, "", nobody)
    return folder


@pytest.fixture(scope="module")
def hardware(tmp_path_factory):
    """A run that stands for one on hardware; its pool is small enough to preempt."""
    folder = made(tmp_path_factory.mktemp("runs") / "hardware", *STEPPED)
    assert pc.sum(read(folder, "steps").column("preempted")).as_py() > 0
    return folder


def copied(hardware, place):
    """For a test to spoil."""
    place.mkdir(parents=True)
    for file in hardware.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def told(made):
    return json.loads((made.folder / PAIR).read_text())


class Free:
    """A cost model by which nothing takes time."""

    def stage(self, shape, stage):
        return IDLE

    def host(self, shape):
        return 0.0


def gaps(folder):
    predict(folder, Free(), folder / "predicted.parquet")
    return pq.read_table(folder / "predicted.parquet").column("gap_measured").to_pylist()


def seconds(table, names):
    return [time for name in names for time in table.column(name).to_pylist()]


@pytest.mark.parametrize(
    "overrides",
    [
        ("backend=costed",),
        STEPPED,
        (*STEPPED, "parallel=pp2", "policy=token_throttling"),
        (*STEPPED, "parallel=dp2", "policy=orca"),
    ],
    ids=["costed", "sim", "pp2", "dp2"],
)
def test_the_twin_of_a_simulated_clock_errs_nowhere(tmp_path, overrides):
    one = made(tmp_path / "run", *overrides)
    pairing = pair(one, tmp_path / "study", SHEET, "")
    (steps, slices), (twins, twin_slices) = expand(one, 16), expand(pairing.folder / "simulated", 16)
    assert steps.select(COUNTED).equals(twins.select(COUNTED))
    assert slices.equals(twin_slices)
    assert seconds(steps, TIMED) == pytest.approx(seconds(twins, TIMED), abs=1e-12)
    assert told(pairing)["parity"]["identical"]

    predicted = pq.read_table(pairing.folder / "predicted.parquet")
    assert predicted.num_rows == len(steps) * (2 if "parallel=pp2" in overrides else 1)
    assert seconds(predicted, ["predicted"]) == pytest.approx(seconds(predicted, ["measured"]), abs=1e-12)
    gaps = predicted.filter(pc.is_valid(predicted.column("gap_measured")))
    assert set(gaps.column("stage").to_pylist()) == {0}
    assert seconds(gaps, ["gap_predicted"]) == pytest.approx(seconds(gaps, ["gap_measured"]), abs=1e-12)


def test_a_pair_holds_what_the_report_reads(hardware, tmp_path):
    pairing = pair(hardware, tmp_path, SHEET, "")
    assert pairing.folder == tmp_path / "pairs" / "hardware"
    found = told(pairing)
    assert {"version", "name", "policy", "workload", "load", "pool", "repeat", "group"} <= set(found)
    assert found["cost"] == {"model": "Roofline", "file": None}
    assert {"device", "versions", "revision"} <= set(found["hardware"])
    assert found["parity"]["steps"] == read(hardware, "steps").num_rows
    assert (pairing.folder / "hardware" / "steps.parquet").samefile(hardware / "steps.parquet")
    assert (pairing.folder / "simulated" / "summary.json").is_file()


def test_a_study_with_its_own_runs_can_be_moved(hardware, tmp_path):
    own = copied(hardware, tmp_path / "study" / "hardware" / "one")
    pair(own, tmp_path / "study", SHEET, "")
    (tmp_path / "study").rename(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "pairs" / "one" / "hardware" / "steps.parquet").is_file()


def test_a_pair_is_made_once_of_one_run_and_one_simulator(hardware, tmp_path):
    first = pair(hardware, tmp_path, SHEET, "")
    written = (first.folder / PAIR).stat().st_mtime_ns
    again = pair(hardware, tmp_path, SHEET, "")
    assert (first.anew, again.anew) == (True, False)
    assert (again.folder / PAIR).stat().st_mtime_ns == written

    slower = pair(hardware, tmp_path, [*SHEET, "++backend.cost.host_base=0.01"], "")
    assert slower.anew
    gaps = pq.read_table(slower.folder / "predicted.parquet").column("gap_predicted").drop_null()
    assert min(gaps.to_pylist()) >= 0.01

    (slower.folder / PAIR).unlink()  # as a stop leaves it
    assert pair(hardware, tmp_path, SHEET, "").anew
    assert (hardware / "steps.parquet").is_file()


def test_decisions_that_differ_are_recorded_and_not_raised(hardware, tmp_path):
    other = copied(hardware, tmp_path / "other")
    config = OmegaConf.load(other / "config.yaml")
    config.policy = composed(["policy=orca"]).policy
    OmegaConf.save(config, other / "config.yaml")
    parity = told(pair(other, tmp_path, SHEET, ""))["parity"]
    assert not parity["identical"]
    assert "replayed" in parity["text"]


def test_what_the_machine_found_is_carried_over(hardware, tmp_path):
    """Its configuration says less, and a simulated device would find other limits."""
    other = copied(hardware, tmp_path / "other")
    config = OmegaConf.load(other / "config.yaml")
    config.kv.blocks = None
    OmegaConf.save(config, other / "config.yaml")
    described = json.loads((other / "run.json").read_text())
    described["spec"] |= {"max_seqs": 7, "max_tokens": 300}
    (other / "run.json").write_text(json.dumps(described))
    spec = json.loads((pair(other, tmp_path, SHEET, "").folder / "simulated" / "run.json").read_text())["spec"]
    assert [spec[name] for name in ("blocks", "max_seqs", "max_tokens")] == [90, 7, 300]


def test_a_full_pool_fits_and_another_profile_is_another_pair(tmp_path):
    """Engines may fill more of the memory than the simulator would leave them."""
    full = ("model=qwen3-8b", "device=h200", "kv.blocks=null", "backend.utilization=0.97", "workload.requests=2")
    one = made(tmp_path / "run", *STEPPED, *full)
    profile = tmp_path / "profile.json"
    profile.write_bytes((shipped() / "h200" / "qwen3-8b" / "single.json").read_bytes())
    with_profile = ["backend/cost=calibrated", f"++backend.cost.path={profile}"]
    first = pair(one, tmp_path, with_profile, "")
    assert told(first)["cost"] == {"model": "Calibrated", "file": str(profile)}
    assert not pair(one, tmp_path, with_profile, "").anew
    profile.write_text(profile.read_text() + "\n")
    assert pair(one, tmp_path, with_profile, "").anew


def test_other_limits_are_refused(hardware, tmp_path):
    other = copied(hardware, tmp_path / "other")
    described = json.loads((other / "run.json").read_text())
    described["spec"] |= {"max_length": 99, "blocks": 10**9}
    (other / "run.json").write_text(json.dumps(described))
    with pytest.raises(SettingError, match=r"blocks 1000000000, not \d+; max_length 99, not"):
        pair(other, tmp_path, SHEET, "")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("policy=orca", "policy=orca: a twin takes what its run had"),
        ("kv.blocks=7", "kv.blocks=7: a twin takes what its run had"),
        ("backend=engine", "backend=engine: a twin is simulated"),
        ("backend/cost=calibrated", "no profile of this model on device=H100"),
    ],
)
def test_what_a_twin_cannot_have_is_refused(hardware, tmp_path, more, why):
    with pytest.raises(SettingError, match=why) as error:
        pair(hardware, tmp_path, [more], "")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "pairs").exists()


@pytest.mark.parametrize(("ended", "why"), [("interrupted", "was interrupted"), (None, "was killed")])
def test_a_run_that_did_not_come_to_its_end_has_no_twin(hardware, tmp_path, ended, why):
    other = copied(hardware, tmp_path / "other")
    described = json.loads((other / "run.json").read_text()) | {"ended": ended}
    (other / "run.json").write_text(json.dumps(described))
    with pytest.raises(SettingError, match=why):
        pair(other, tmp_path, SHEET, "")


def test_gaps_are_the_hosts_alone(tmp_path):
    """Nobody is there between two arrivals a second apart: what passes then is nobody's gap."""
    slow = made(tmp_path / "run", *STEPPED, "workload.rate=1", "workload.arrivals=constant", "workload.requests=3")
    predict(slow, Free(), tmp_path / "predicted.parquet")
    found = pq.read_table(tmp_path / "predicted.parquet").to_pylist()
    first = [row["step"] for row in read(slow, "steps").to_pylist() if row["planned"] in (1.0, 2.0, 3.0)]
    assert len(first) == 3
    assert [row["step"] for row in found if row["gap_measured"] is None] == first


def test_work_that_a_policy_held_back_is_no_gap(hardware, tmp_path):
    """A look before the one that planned the step saw that nothing was in flight."""
    other = copied(hardware, tmp_path / "other")
    before = gaps(other)
    looks = read(other, "looks").to_pylist()
    held = next(n for n in range(5, len(looks)) if looks[n]["commits"] > looks[n - 1]["commits"])
    early = {"now": looks[held]["now"] - 1e-9, "commits": looks[held]["commits"]}
    pq.write_table(pa.Table.from_pylist([*looks[:held], early, *looks[held:]]), other / "looks.parquet")
    arrivals = read(other, "arrivals").to_pylist()
    later = [row | {"look": row["look"] + (row["look"] >= held)} for row in arrivals]
    pq.write_table(pa.Table.from_pylist(later, read(hardware, "arrivals").schema), other / "arrivals.parquet")
    changed = [(a, b) for a, b in zip(before, gaps(other), strict=True) if a != b]
    assert changed == [(before[early["commits"]], None)]


def test_lanes_of_ranks_in_lockstep_are_left_out(tmp_path):
    together = made(tmp_path / "run", *STEPPED, "parallel=dp_attention", "parallel.replicas=2", "workload.requests=6")
    lanes = read(together, "slices").group_by(["step", "lane"]).aggregate([("rank", "count_distinct")])
    alone = pc.sum(pc.equal(lanes.column("rank_count_distinct"), 1)).as_py()
    assert 0 < len(gaps(together)) == alone < lanes.num_rows


def test_merged_steps_are_refused(tmp_path):
    merged = made(tmp_path / "run", "backend=sim", "workload.rate=30")
    with pytest.raises(SettingError, match=r"run it with backend\.skip_ahead=false"):
        predict(merged, Free(), tmp_path / "predicted.parquet")
