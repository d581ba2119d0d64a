"""Profiles: read or refused in one line, exact at what was timed, monotone between; heat merged is heat stepped."""

import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from playground.core import Request, Slice, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Calibrated, Shape, profile
from playground.sim.cost.profile import Decodes, Launch, Profile, Prompts, Stage, Throttle
from playground.sim.cost.surface import LEAST_KEYS, Curve, Surface, in_tiles
from playground.sim.cost.tables import BeyondTable
from playground.sim.cost.throttle import Heat, Heats
from playground.sim.durations import Modelled
from playground.trace import Trace, expand
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Composed

CONF = Path(__file__).parents[2] / "conf"
SHIPPED = CONF / "device" / "profiles" / "h200" / "qwen3-8b" / "single.json"


def part(group, name):
    return instantiate(OmegaConf.load(CONF / group / f"{name}.yaml"))


H200, QWEN = part("device", "h200"), part("model", "qwen3-8b")


def shape(*slices):
    """Of (start, length)."""
    return Shape.of([Slice(id, 0, 0, start, length, True, ()) for id, (start, length) in enumerate(slices)])


def decodes(rows, keys):
    return shape(*[(keys - 1, 1)] * rows)


@pytest.fixture
def content():
    """Of a shipped profile, to spoil."""
    return json.loads(SHIPPED.read_text())


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A user's own profiles."""
    monkeypatch.setattr(profile, "OWN", tmp_path / "own")
    return tmp_path / "own"


class TestLoading:
    def test_what_is_saved_is_read(self, tmp_path):
        before = Profile.load(SHIPPED)
        before.save(tmp_path / "deep" / "one.json")
        assert Profile.load(tmp_path / "deep" / "one.json") == before

    def test_a_profile_of_before_there_were_fitted_models_is_read(self, tmp_path, content):
        del content["fitted"]
        for error in content["held_out"].values():
            del error["low"], error["high"]
        for stage in content["stages"]:
            del stage["prompts"]["tile"]
        old = self.spoilt(tmp_path, content)
        assert Calibrated(QWEN, H200, path=old).stage(decodes(32, 900), 0) == Calibrated(
            QWEN, H200, path=str(SHIPPED)
        ).stage(decodes(32, 900), 0)
        with pytest.raises(ValueError, match=r"cost\.form=fitted: .* has tables only; .*--tables " + old):
            Calibrated(QWEN, H200, path=old, form="fitted")

    @staticmethod
    def spoilt(folder, content):
        (folder / "spoilt.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return str(folder / "spoilt.json")

    def test_a_missing_file_is_told(self, tmp_path):
        with pytest.raises(ValueError, match=r"cost\.path=.*none\.json: cannot be read .*experiment=calibrate"):
            Calibrated(QWEN, H200, path=str(tmp_path / "none.json"))

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 1, "stages": 3}'])
    def test_what_is_no_profile_is_told(self, tmp_path, text):
        with pytest.raises(ValueError, match=r"cost\.path=.*spoilt\.json: no profile that this can read") as told:
            Profile.load(self.spoilt(tmp_path, text))
        assert "\n" not in str(told.value)

    def test_another_version_is_told(self, tmp_path, content):
        with pytest.raises(ValueError, match="it is of version 7, and this reads 1"):
            Profile.load(self.spoilt(tmp_path, content | {"version": 7}))

    @pytest.mark.parametrize("name", ["throttle", "host", "held_out", "stages", "largest"])
    def test_what_lacks_is_named(self, tmp_path, content, name):
        del content[name]
        with pytest.raises(ValueError, match=name):
            Profile.load(self.spoilt(tmp_path, content))

    @pytest.mark.parametrize(
        ("part", "name"), [("decodes", "seconds"), ("decodes", "contexts"), ("prompts", "seconds")]
    )
    def test_a_table_that_was_cut_is_told(self, tmp_path, content, part, name):
        content["stages"][0][part][name].pop()
        with pytest.raises(ValueError, match=rf"{part}\.{name} has \d+ entries and not \d+"):
            Profile.load(self.spoilt(tmp_path, content))

    def test_wrong_kinds_are_told(self, tmp_path, content):
        with pytest.raises(ValueError, match="no profile that this can read"):
            Profile.load(self.spoilt(tmp_path, content | {"held_out": []}))

    def test_another_model_is_told_with_what_differs(self):
        with pytest.raises(ValueError, match=r"another model \(hidden 4096, not 1024, layers 36, not 28"):
            Calibrated(part("model", "qwen3-0.6b"), H200, path=str(SHIPPED))

    def test_another_cut_is_told(self):
        with pytest.raises(
            ValueError, match=r"calibrated as single with layers \[36\], .* cut as tp2_pp2 with \[18, 18\]"
        ):
            Calibrated(QWEN, H200, tp=2, stages=2, path=str(SHIPPED))

    @pytest.mark.parametrize("form", ["profiled", "fitted"])
    def test_steps_beyond_the_calibrated_limits_are_told(self, form, recwarn):
        cost = Calibrated(QWEN, H200, path=str(SHIPPED), form=form)
        for beyond, told in ((shape((0, 9000)), "tokens=9000"), (decodes(300, 100), "sequences=300")):
            with pytest.raises(BeyondTable, match=rf"{told} lies beyond .*limits\.max_tokens, limits\.max_seqs"):
                cost.stage(beyond, 0)
        with pytest.warns(UserWarning, match="tokens=9000 .* extrapolated"):
            assert replace(cost, extrapolate=True).stage(shape((0, 9000)), 0).kernels > 0

    def test_a_form_that_there_is_not(self):
        with pytest.raises(ValueError, match=r"cost\.form=straight must be one of profiled, fitted"):
            Calibrated(QWEN, H200, path=str(SHIPPED), form="straight")

    def test_a_model_fitted_to_tables_says_so(self):
        assert Profile.load(SHIPPED).fitted.fitted_to == "tables"
        with pytest.warns(UserWarning, match="fitted to its own tables, not to measurements"):
            Calibrated(QWEN, H200, path=str(SHIPPED), form="fitted")


class TestFinding:
    def test_ones_own_goes_before_what_ships(self, own, content):
        assert Calibrated(QWEN, H200).file == str(SHIPPED)
        mine = own / "h200" / "mine" / "single.json"
        mine.parent.mkdir(parents=True)
        mine.write_text(json.dumps(content))
        assert Calibrated(QWEN, H200).file == str(mine)

    def test_where_there_is_none_those_that_there_are_are_named(self, own):
        with pytest.raises(
            ValueError, match=r"no profile of this model on device=H100 cut as single.*h200/qwen3-8b/single"
        ):
            Calibrated(QWEN, part("device", "h100"))

    def test_a_spoilt_one_is_named_and_not_passed_over(self, own):
        mine = own / "h200" / "mine" / "single.json"
        mine.parent.mkdir(parents=True)
        mine.write_text("{")
        with pytest.raises(ValueError, match=rf"cost\.path={mine}: no profile that this can read .*delete it"):
            Calibrated(QWEN, H200)


@pytest.mark.filterwarnings("ignore:cost.form=fitted")
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("form", ["profiled", "fitted"])
class TestTheCostModel:
    def test_ticks_are_steps_to_the_last_bit(self, form):
        cost = Calibrated(QWEN, H200, form=form)
        for starts in ([0], [17, 900, 3], range(1, 200), [2000] * 200):
            first = shape(*[(start, 1) for start in starts])
            stepped = [cost.stage(first.tick(ticks), 0).device_time for ticks in range(1, 70)]
            assert list(islice(cost.ticking(first), 69)) == stepped

    def test_ticks_beyond_what_was_timed_are_told(self, form):
        cost = Calibrated(QWEN, H200, form=form)
        ticking = cost.ticking(decodes(1, int(cost.profile.largest["decode_context"]) - 2))
        assert len([*islice(ticking, 2)]) == 2
        with pytest.raises(BeyondTable, match="decode_context"):
            next(ticking)

    def test_demands_never_exceed_the_time(self, form, tmp_path, content):
        for stage in content["stages"]:  # a device much faster than its sheet
            for part in ("prompts", "decodes"):
                stage[part]["seconds"] = [time / 20 for time in stage[part]["seconds"]]
        for line in content["fitted"]["stages"]:
            line["coefficients"] = {name: value / 20 for name, value in line["coefficients"].items()}
        (tmp_path / "fast.json").write_text(json.dumps(content))
        cost = Calibrated(QWEN, H200, path=str(tmp_path / "fast.json"), form=form)
        for one in (decodes(1, 10), decodes(256, 1000), shape((0, 4096)), shape((0, 30), (9, 1))):
            found = cost.stage(one, 0)
            assert 0 < found.compute <= found.kernels
            assert 0 < found.memory <= found.kernels

    def test_no_tokens_take_no_time(self, form):
        assert Calibrated(QWEN, H200, form=form).stage(Shape.of([]), 0).device_time == 0


# --- surfaces

SECONDS = st.floats(1e-5, 1e-1)


@st.composite
def stages(draw):
    """Tables that rise, as those do that are measured."""

    def rising(count):
        return sorted(draw(st.lists(SECONDS, min_size=count, max_size=count)))

    def nodes(low, high, least=1):
        return sorted(draw(st.sets(st.integers(low, high), min_size=least, max_size=6)))

    rows = nodes(1, 64)
    context_rows = nodes(1, 64)
    tables = []
    for _ in context_rows:
        keys = nodes(20, 4000)
        tables.append([[LEAST_KEYS, 0.0], *map(list, zip(map(float, keys), rising(len(keys)), strict=True))])
    tokens = nodes(2, 2048)
    cost = st.floats(0, 1e-6)
    prompts = Prompts(
        tokens, rising(len(tokens)), draw(cost), draw(cost), draw(cost), draw(cost), draw(cost), [[0.0, 0.0]], [],
        draw(st.sampled_from([1, 64])),
    )  # fmt: skip
    return Stage(Decodes(rows, rising(len(rows)), context_rows, tables, draw(cost)), prompts, Launch())


@given(stages())
def test_a_surface_is_exact_at_what_was_timed(stage):
    surface, table = Surface(stage, 0), stage.decodes
    for rows, seconds in zip(table.rows, table.seconds, strict=True):
        assert surface.seconds(decodes(rows, int(LEAST_KEYS))) == pytest.approx(seconds, rel=1e-9)
    for rows, points in zip(table.context_rows, table.contexts, strict=True):
        for keys, more in points:
            assert surface.contexts(decodes(rows, int(keys))) == pytest.approx(more, rel=1e-9)


@settings(max_examples=60)
@given(stages(), st.integers(1, 64), st.lists(st.integers(1, 4000), min_size=2, max_size=8))
def test_longer_contexts_never_take_less(stage, rows, keys):
    surface = Surface(stage, 0)
    times = [surface.seconds(decodes(rows, count)) for count in sorted(keys)]
    assert all(later >= before - 1e-12 for before, later in pairwise(times))


@settings(max_examples=60)
@given(stages(), st.lists(st.integers(2, 4000), min_size=2, max_size=8), st.integers(0, 4000))
def test_longer_chunks_and_histories_never_take_less(stage, lengths, start):
    surface = Surface(stage, 0)
    for times in (
        [surface.seconds(shape((start, length))) for length in sorted(lengths)],
        [surface.seconds(shape((length, 64))) for length in sorted(lengths)],
    ):
        assert all(later >= before - 1e-12 for before, later in pairwise(times))


def test_a_step_by_hand():
    """Rows and keys beyond the tables go on as they do at their ends; the costs of prompts add up."""
    table = Decodes([1, 8], [5e-3, 6e-3], [2, 8], [[[LEAST_KEYS, 0], [116, 2e-4]], [[LEAST_KEYS, 0], [116, 1e-3]]], 0.0)
    prompts = Prompts([64, 128], [8e-3, 9e-3], 1e-9, 3e-7, 2e-7, 4e-5, 5e-6, [[0, 0], [4, 4e-4]], [], 64)
    surface = Surface(Stage(table, prompts, Launch()), 0)
    rate = 1e-3 / 100 / 8  # seconds a key where most were read
    assert surface.seconds(decodes(8, 216)) == pytest.approx(6e-3 + 1e-3 + 100 * 8 * rate)
    assert surface.seconds(decodes(2, 216)) == pytest.approx(5e-3 + 1e-3 / 7 + 2e-4 + 100 * 2 * rate)
    assert surface.contexts(decodes(5, 116)) == pytest.approx((2e-4 + 1e-3) / 2)
    assert surface.contexts(decodes(12, 116)) == pytest.approx(1e-3 * 12 / 8)  # as much for each row
    alike = 8.5e-3 + 2e-4 * 3 / 2 + 2 * 4e-5  # 96 tokens are 128 of them, three rows of the head, two chunks
    short = surface.seconds(shape((0, 40), (0, 56), (15, 1)))
    assert short == pytest.approx(alike + 0.5e-3 + 2e-7 * 96 + 5e-6 + 3e-7 * 56)  # bound by the longest path
    long = surface.seconds(shape((4000, 40), (6000, 56), (15, 1)))
    pairs = 64 * (4000 + 20.5) + 64 * (6000 + 28.5)
    assert long == pytest.approx(alike + 0.5e-3 + 2e-7 * (4040 + 6056) + 5e-6 + max(1e-9 * pairs, 3e-7 * 6056))
    work = replace(prompts, work=1e-7)
    assert Surface(Stage(table, work, Launch()), 0).seconds(shape((4000, 40), (6000, 56), (15, 1))) == pytest.approx(
        alike + 0.5e-3 + 2e-7 * (4040 + 6056) + 5e-6 + 1e-7 * pairs
    )


def test_contexts_between_even_and_ragged_are_between_both():
    even, ragged = [[LEAST_KEYS, 0.0], [1016.0, 1e-3]], [[LEAST_KEYS, 0.0], [1016.0, 3e-3]]
    table = Decodes([4], [5e-3], [4], [even], 1e-6, [], [4], [ragged])
    surface = Surface(Stage(table, Prompts([1], [0.0], 0, 0, 0, 0, 0, [[0.0, 0.0]], []), Launch()), 0)

    def contexts(*keys):
        return surface.contexts(shape(*[(count - 1, 1) for count in keys]))

    assert contexts(516, 516, 516, 516) == pytest.approx(0.5e-3)
    assert contexts(100, 200, 216, 1548) == pytest.approx(1.5e-3)  # the longest reads three times as much
    assert contexts(16, 516, 500, 1032) == pytest.approx(1.0e-3)
    assert contexts(16, 16, 16, 2016) == pytest.approx(1.5e-3 + 1e-6 * (2016 - 3 * 516))


@given(st.lists(st.tuples(st.integers(0, 10_000), SECONDS), min_size=1, unique_by=lambda one: one[0]), st.data())
def test_a_curve_stays_between_its_points(points, data):
    curve, ordered = Curve(points), sorted(points)
    for x, y in points:
        assert curve.at(x) == pytest.approx(y, rel=1e-9)
    at = data.draw(st.integers(0, 10_000).filter(lambda x: x <= ordered[-1][0]))
    ys = [y for _, y in points]
    assert min(ys) * (1 - 1e-9) <= curve.at(at) <= max(ys) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("tokens", "tile", "found"), [(1, 64, 1), (64, 64, 64), (65, 64, 128), (128, 64, 128), (9, 1, 9)]
)
def test_tokens_in_tiles(tokens, tile, found):
    assert in_tiles(tokens, tile) == found


# --- heat


def test_heat_rises_with_products_and_falls_in_between():
    heat = Heat(Throttle(seconds=2.0, onset=0.25, slope=0.5))
    assert heat.factor(0.0, 1.0) == 1.0
    heat.spent(0.0, 2.0, 1.0)
    assert heat.at(2.0) == pytest.approx(1 - 2.718281828**-1)
    assert heat.at(4.0) == pytest.approx((1 - 2.718281828**-1) / 2.718281828)
    assert heat.factor(2.0, 0.8) == pytest.approx(1 + 0.5 * 0.8 * (heat.at(2.0) - 0.25))
    assert heat.factor(2.0, 0.0) == 1.0  # what multiplies nothing feels nothing
    assert heat.factor(200.0, 1.0) == 1.0


def test_every_device_has_heat_of_its_own():
    heats = Heats(Throttle(1.0, 0.0, 0.5))
    hot = [heats.pass_through("a", 0.1 * turn, 0.1, 0.1) for turn in range(20)]
    assert hot == sorted(hot)
    assert hot[-1] > 1.3
    assert heats.pass_through("b", 2.0, 0.1, 0.1) == 1.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_device_under_heat_is_the_same_merged_and_stepped(tmp_path, replicas, own):
    """Prompts in the middle of stretches of decodes, some of them after a pause in which it cools down."""
    cost = Calibrated(QWEN, H200)
    tables = []
    for repeats in (False, True):
        spec = Spec(2000, max_seqs=32, max_tokens=2048, ranks=replicas, forwards_tokens=True, repeats=repeats)
        requests = [Request(id, 0.13 * (id // 3), 1500 + 40 * id, 40, 10 + id) for id in range(18)]
        folder = tmp_path / str(repeats)
        with Trace(folder) as trace:
            scheduler = Scheduler(spec, Composed(ChunkedPrefill(2048)))
            serve(OpenLoop(requests), scheduler, SimBackend(spec, Modelled(cost)), trace)
        tables.append([table.to_pylist() for table in expand(folder, spec.block_size)])
    assert tables[0] == tables[1]
    assert max(check_by_hand(*tables[0], cost, rank) for rank in range(replicas)) > 1.05


def check_by_hand(steps, slices, cost, rank):
    """Every step takes what its shape does, and longer the hotter it is; by how much at most."""
    heat, hottest = Heat(cost.throttle), 1.0
    for step in [row for row in steps if row["group"] == rank]:
        parts = [one for one in slices if one["step"] == step["step"]]
        made = Shape.of([Slice(0, 0, 0, one["start"], one["length"], one["samples"], ()) for one in parts])
        found, factor = cost.stage(made, 0), 1.0
        if step["prefill_tokens"]:
            share = min(found.compute / found.device_time, 1.0)
            factor = heat.factor(step["started"], share)
            heat.spent(step["started"], found.device_time * factor, share)
        assert step["finished"] - step["started"] == pytest.approx(found.device_time * factor, rel=1e-6)
        hottest = max(hottest, factor)
    return hottest
