"""The benchmark of decisions measures what it says; no time is judged here but by a wide margin."""

from functools import partial
from statistics import median

import pytest

from experiments.benchmarks import policies, tables
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.order import Fcfs
from policies.route import LeastOutstanding


class Seen:
    """Around a policy: what each draft was."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.drafts = []

    def fill(self, draft) -> None:
        before = (
            len(draft.decoding),
            len(draft.waiting),
            draft.seats,
            draft.blocks_free,
            next(iter(draft.waiting), None),
        )
        self.inner.fill(draft)
        self.drafts.append((*before, draft.tokens, draft.rows))


@pytest.mark.parametrize("where", ["full", "tight"])
def test_a_scene_is_the_same_at_every_step(where):
    """16 decodes, each of which is placed; nobody comes in, for want of a seat or of blocks; the queue moves."""
    seen = Seen(Composed(ChunkedPrefill()))
    scene_of = partial(policies.Scene, 16, 20, where)
    assert len(list(policies.fills(lambda: seen, scene_of, steps=40))) == 40
    for decoding, waiting, seats, free, _, tokens, rows in seen.drafts:
        assert (decoding, waiting, tokens, rows) == (16, 20, 16, 16)
        assert seats == (64 if where == "tight" else 0)
        assert free <= 16 if where == "tight" else free > 100


def test_where_there_is_room_prompts_come_in_and_as_many_end():
    seen = Seen(Composed(ChunkedPrefill()))
    list(policies.fills(lambda: seen, partial(policies.Scene, 16, 100, "room"), steps=40))
    heads = [head.id for *_, head, _, _ in seen.drafts]
    assert heads == sorted(heads) and len(set(heads)) > 20
    for decoding, waiting, _, _, _, tokens, _ in seen.drafts:
        assert decoding in (15, 16) and waiting == 100 and tokens == 2048


def test_oracles_are_told_of_everybody():
    make = policies.maker("admission=oracle_future_peak")
    assert len(list(policies.fills(make, partial(policies.Scene, 16, 20, "room"), steps=10))) == 10


def test_a_policy_that_changes_who_runs_is_given_a_new_scene():
    class Evicting:
        def fill(self, draft):
            draft.preempt(next(iter(draft.running)))

    seen = Seen(Evicting())
    list(policies.fills(lambda: seen, partial(policies.Scene, 4, 5), steps=3))
    assert [draft[:2] for draft in seen.drafts] == [(4, 5)] * 3


def test_prompts_that_begin_alike_do_and_half_of_their_families_are_cached():
    scene = policies.Scene(16, policies.ALIKE, "alike")
    for _ in range(20):
        scene.tighten()
        draft = scene.draft()
        hits = {one.request.id: draft.prefix_hit(one) for one in draft.waiting}
        assert len(hits) == policies.ALIKE
        found = sum(hit > 0 for hit in hits.values())
        assert abs(found - policies.ALIKE / 2) <= policies.FAMILIES / 2
        assert max(hits.values()) == policies.SHARED_BLOCKS * draft.spec.block_size
        assert len({one.keys[0] for one in draft.waiting}) == policies.FAMILIES
        scene.next()


def test_what_is_timed_is_the_decision():
    """An order that looks at everybody takes longer the more there wait, and the rest does not."""

    class Everybody(Fcfs):
        def __call__(self, draft):
            return sorted(draft.waiting, key=lambda one: (one.request.arrival, one.id))

    def growth(order):
        made = partial(Composed, ChunkedPrefill(), order=order)
        return policies.fill_time(made, 16, 2000, "tight") / policies.fill_time(made, 16, 20, "tight")

    assert growth(Everybody()) > 4 > growth(Fcfs())


def test_every_option_is_measured():
    names = policies.names()
    assert {"chunked_prefill", "order=fcfs", "route=preble", "placement=weighted"} <= set(names)
    assert set(policies.HEAVY) <= set(names)
    assert isinstance(policies.maker("route=vllm_dp")().route, LeastOutstanding)


def test_no_policy_is_far_above_the_limit_but_those_that_are_named():
    """Of all compositions; with a margin of three for a busy machine. The benchmark itself has none."""
    for name in (name for name in policies.names() if "=" not in name and name not in policies.HEAVY):
        times = policies.fills(policies.maker(name), partial(policies.Scene, 256, 1000, "tight"), steps=7)
        assert median(times) / 1e3 < 3 * policies.LIMIT, name


def test_the_table_has_the_dearest_first():
    times = dict.fromkeys(tables.DECISIONS, 10.0)
    rows = [
        {"name": name, "times": times, "worst": worst, "ratio": 2.0, "growth": 1.0, "heavy": heavy}
        for name, worst, heavy in (("cheap", 10.0, ""), ("dear", 200.0, "sorts"))
    ]
    record = {
        "rows": rows,
        "draft": {"16": 3.0},
        "routes": {"route=a": 1.0},
        "versions": {},
        "python": "3",
        "platform": "L",
    }
    lines = tables._policies(record).splitlines()
    assert lines[2].startswith("| `dear` | 10 |") and lines[2].endswith("| 2.0 | 1.00 | sorts |")
    assert lines[3].startswith("| `cheap` |")
