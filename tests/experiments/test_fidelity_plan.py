"""Plans of hardware runs as data, and the points that come of them."""

from importlib.resources import files
from itertools import product

import pytest

from experiments.composing import composed
from experiments.fidelity.plan import read
from experiments.settings import SettingError

PLAN = """
base: [backend=sim]
policies: {one: [policy=vllm_v1], two: [policy=orca]}
pools: {full: [], capped: [kv.blocks=90]}
workloads:
  short: {overrides: [workload=poisson], rates: {below: 1, near: 2, past: 3}}
  long: {overrides: [workload=offline], rates: {below: 4, near: 5, past: 6}, pools: {capped: [kv.blocks=500]}}
runs:
  - {policies: [two], workloads: [short], loads: [past], pools: [full], repeats: 1}
  - {policies: all, workloads: all, loads: [past], pools: [capped]}
"""


@pytest.fixture
def plan(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "plan.yaml").write_text(text)
        return str(tmp_path / "plan.yaml")

    return write


def test_points_are_in_order_and_named_by_what_they_are(plan):
    assert [point.name for point in read(plan(PLAN))] == [
        "short-past-full-two",
        "short-past-full-two-1",
        "short-past-capped-one",
        "long-past-capped-one",
        "short-past-capped-two",
        "long-past-capped-two",
    ]


def test_a_point_holds_its_overrides(plan):
    points = {point.name: point.overrides for point in read(plan(PLAN))}
    assert points["short-past-full-two"] == ("backend=sim", "policy=orca", "workload=poisson", "workload.rate=3")
    assert points["short-past-capped-one"][-2:] == ("workload.rate=3", "kv.blocks=90")
    assert points["long-past-capped-one"][-2:] == ("workload.rate=6", "kv.blocks=500")


def test_repeats_are_one_group(plan):
    first, again, *_ = read(plan(PLAN))
    assert (first.group, first.repeat, again.repeat) == (again.group, 0, 1)
    assert first.overrides == again.overrides


def test_a_point_that_is_asked_for_twice_is_one(plan):
    twice = PLAN + "  - {policies: [two], workloads: [short], loads: [past], pools: [full]}\n"
    assert len(read(plan(twice))) == len(read(plan(PLAN)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PLAN.replace("[two]", "[three]"), "policies has no three; there are one, two"),
        (PLAN.replace("loads: [past]", "loads: [top]"), "loads has no top; there are below, near, past"),
        (PLAN.replace("runs:", "walks:"), "not a plan"),
        ("- 1", "not a plan"),
        ("a: [", "not a plan"),
    ],
)
def test_wrong_plans_are_told_in_a_line(plan, text, told):
    with pytest.raises(SettingError, match=told) as error:
        read(plan(text))
    assert "\n" not in str(error.value)


def test_what_ships_is_named():
    with pytest.raises(SettingError, match="cpu, h200"):
        read("nothing")


def test_the_plan_of_the_h200_lets_every_conclusion_be_tested():
    points = read("h200")
    once = [point for point in points if not point.repeat]
    assert len({point.group for point in points}) == len(once) >= 20
    assert len(points) - len(once) == 4

    def policies(*setting: str) -> set[str]:
        return {point.policy for point in once if point.setting == setting}

    assert len(policies("conversations", "near", "full")) == 6
    assert len(policies("conversations", "past", "full")) == 6
    assert len(policies("conversations", "past", "capped")) == 4
    loads = product(("conversations", "chat"), ("below", "near", "past"))
    assert {(point.workload, point.load) for point in once} == set(loads)


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_plans_that_ship_compose(name):
    """A point of every workload and pool, and every policy's file: composing takes time."""
    seen: set[str] = set()
    for point in reversed(read(name)):
        policy = next(part for part in point.overrides if part.startswith("policy="))
        assert files("conf").joinpath("policy", f"{policy.partition('=')[2]}.yaml").is_file()
        if not {point.workload, point.pool} <= seen:
            config = composed(point.overrides)
            assert config.workload.rate > 0
            assert (config.kv.blocks is None) == ("kv.blocks" not in " ".join(point.overrides))
        seen |= {point.workload, point.pool}
