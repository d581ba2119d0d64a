"""Whole systems from the front door: what is composed is what runs, and wrong combinations are told in one line."""

import pytest
from hydra import compose, initialize_config_module

from experiments import launcher, settings
from experiments.build import build
from experiments.overrides import completing
from playground.loop import serve
from playground.sim.durations import Modelled
from playground.sim.system import System
from playground.trace import Trace, expand, read

MOE = "model=qwen3-30b-a3b"
DPA = "parallel=dp_attention"


class Ends:
    """A recorder of how requests ended."""

    def __init__(self) -> None:
        self.all = []

    def ended(self, ended) -> None:
        self.all.append(ended)

    def ignored(self, *_) -> None: ...

    arrived = looked = waits = launched = committed = happened = ignored


@pytest.fixture(autouse=True)
def hydra_ready():
    settings.register()
    launcher.register()
    with initialize_config_module("conf", version_base="1.3"):
        yield


def parts(*overrides: str):
    options = ["run_dir=nowhere", "workload.requests=12", "device=h200", *overrides]
    return build(settings.read(completing(lambda given: compose("config", given), options)))


def seconds(*overrides: str) -> float:
    """Mean end-to-end latency of a small run in which nothing is lost."""
    run = parts(*overrides)
    ends = Ends()
    serve(run.source, run.scheduler, run.backend, ends)
    run.scheduler.check()
    assert [one.outcome for one in ends.all] == ["finished"] * 12
    return sum(one.finished - one.request.arrival for one in ends.all) / 12


@pytest.mark.parametrize(
    "overrides",
    [
        (MOE, DPA, "parallel.replicas=4", "parallel.ep=4", "links=dgx_h200"),
        (MOE, DPA, "parallel.replicas=4", "parallel.ep=4", "links=dgx_h200", "parallel.exchange=padded_all_to_all"),
        (MOE, DPA, "parallel.replicas=2", "parallel.tp=2", "parallel.stages=2", "parallel.ep=4", "links=dgx_h200"),
        (MOE, DPA, "parallel.replicas=16", "parallel.ep=16", "links=dgx_h200", "parallel.overlap=two_batch"),
        (DPA, "parallel.replicas=3", "parallel.padding=always"),
        ("parallel=tp2_pp2", "links=pcie4_switch", "parallel.replicas=2", "policy/overlap=run_ahead"),
        ("parallel.layers=[20,12]", "links=ethernet", "parallel.overlap=lanes"),
        ("policy/overlap=prefill_decode", "backend/contention=partition"),
        ("backend.uploads=lane", "policy/overlap=run_ahead"),
        ("backend.uploads=before", "parallel=pp2"),
        ("policy/overlap=prefill_decode", "backend/contention=demands", "parallel=tp4", "links=dgx_h200"),
        ("policy/overlap=prefill_decode", "parallel=dp2"),
        ("policy/overlap=two_batch", "parallel=tp4", "links=dgx_h200"),
        ("policy/overlap=row_chunks", "parallel=tp4", "links=dgx_h200"),
        ("policy/overlap=single_batch", "model=deepseek-v2-lite", DPA, "parallel.ep=2", "links=dgx_h200"),
        ("policy/overlap=communication", "parallel=tp2_pp2", "links=pcie4"),
        ("parallel=dp4", "policy/route=vllm_dp", "queueing.report_steps=4", "queueing.report_delay=0.01"),
    ],
)
def test_it_serves(overrides):
    assert seconds(*overrides) > 0


def test_without_links_nothing_is_built_for_them():
    assert type(parts().backend.durations) is Modelled
    assert type(parts("parallel=tp4").backend.durations) is Modelled
    assert type(parts("parallel=dp4", "links=dgx_h200").backend.durations) is Modelled
    assert type(parts("parallel=tp4", "links=dgx_h200").backend.durations) is System


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel=pp4",),
        ("parallel=dp2",),
        (DPA, "parallel.replicas=2"),
        ("parallel=tp4", "links=dgx_h200"),
        ("parallel=pp2", "links=dgx_h200"),
        ("parallel=tp2_pp2", "links=pcie4_switch", "parallel.replicas=2"),
        ("backend.uploads=before", "parallel=pp2"),
        ("backend.uploads=lane",),
        ("policy=token_throttling", "parallel=pp4", "links=ethernet"),
    ],
    ids=str,
)
def test_whatever_the_system_quiet_stretches_are_what_stepping_gives(overrides, tmp_path):
    small = ("workload=normal", "workload.requests=12", "workload.rate=3", "workload.lengths.output.mean=40")
    tables = []
    for skip in ("true", "false"):
        made = parts(*small, *overrides, f"backend.skip_ahead={skip}")
        with Trace(tmp_path / skip) as trace:
            serve(made.source, made.scheduler, made.backend, trace)
        tables.append(expand(tmp_path / skip, made.backend.spec.block_size))
        rows = read(tmp_path / skip, "steps").num_rows
    stepped, _ = tables[1]
    assert rows == stepped.num_rows > 5 * read(tmp_path / "true", "steps").num_rows
    assert [table.to_pylist() for table in tables[0]] == [table.to_pylist() for table in tables[1]]


def test_a_slower_way_between_hosts_is_slower():
    pipeline = ("parallel.tp=8", "parallel.stages=2")
    near, far = seconds(*pipeline, "links=dgx_h200"), seconds(*pipeline, "links=ethernet")
    assert far > 1.5 * near


def test_lanes_relieve_decodes_as_far_as_the_law_lets_them():
    """Laws from none to all: what needs other resources than decodes do slows them less."""
    lanes = ("policy/overlap=prefill_decode", "workload.rate=20", "workload.requests=12")
    laws = ("turns", "partition", "demands")
    times = [seconds(*lanes, f"backend/contention={law}") for law in laws]
    assert times[0] > times[1] > times[2]


def test_on_one_device_two_batches_lose():
    """The negative control: there is nothing to hide, and the weights are read twice."""
    assert seconds("policy/overlap=two_batch") > 1.2 * seconds()


RAPIDLLM = {  # tokens/s that it recorded: 4 H100, FP8, eager, 16 requests of 16 tokens
    (): 320.3,
    (DPA, "parallel.exchange=padded_all_gather"): 196.0,
    (DPA, "parallel.exchange=padded_all_to_all"): 168.0,
    (DPA, "parallel.exchange=padded_all_gather", "parallel.tp=2"): 164.2,
    (DPA, "parallel.exchange=padded_all_to_all", "parallel.tp=2"): 155.1,
}


def test_rapidllms_dp_attention_comes_out_in_its_order_and_twice_as_fast_at_most():
    """One free number, what it takes to launch a layer, from the first row. How far the others are off: the docs."""
    lengths = [f"workload.lengths.{of}={value}" for of, value in (("prompt.mean", 64), ("output.mean", 16))]
    lengths += ["workload.lengths.prompt.sigma=0.001", "workload.lengths.output.sigma=0.001"]
    setting = ("device=h100", "links=dgx_h100", MOE, "model.weights=fp8", "+backend.cost.graph_rows=0", *lengths)
    setting += ("workload=offline", "workload.requests=16", "device.eager_launch=1.01439e-3")
    found = {}
    for row in RAPIDLLM:
        ep = "parallel.ep=4" if "parallel.tp=2" in row else "parallel.ep=2" if row else "parallel.ep=1"
        run, ends = parts(*setting, *row, ep), Ends()
        serve(run.source, run.scheduler, run.backend, ends)
        found[row] = 256 / max(one.finished for one in ends.all)
    one, gather, to_all, gather_tp, to_all_tp = found.values()
    assert one == pytest.approx(320.3, rel=0.01)
    assert one > gather > to_all and gather > gather_tp > to_all_tp and to_all > to_all_tp
    assert all(1.5 < found[row] / recorded < 2.0 for row, recorded in RAPIDLLM.items() if row)


def test_skipping_ahead_changes_nothing_on_links():
    tp = ("parallel=tp4", "links=dgx_h200", "workload=offline")
    assert seconds(*tp) == seconds(*tp, "backend.skip_ahead=false")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("parallel.ep=4",), "parallel.ep=4: the model has no experts; set parallel.ep=1 or choose one that has"),
        ((MOE, DPA, "parallel.replicas=3", "parallel.ep=3"), "parallel.ep=3 must divide the model's 128 experts"),
        ((MOE, DPA, "parallel.ep=4"), "parallel.ep=4 must divide the 2 devices that share experts"),
        ((MOE, DPA, "parallel.exchange=all_to_all"), "parallel.exchange=all_to_all needs experts of its own on every"),
        (("parallel.tp=3",), "parallel.tp=3 must divide the model's 32 heads"),
        (
            ("parallel.tp=16", "links=pcie4", "model=qwen3-32b"),
            "parallel.tp=16: 16 devices need more than one host of 8",
        ),
        (
            (DPA, "parallel.replicas=16", "links=pcie4"),
            "parallel.tp=1, parallel.replicas=16: 16 devices need more than",
        ),
        (("parallel.stages=16", "links=pcie4"), "parallel.stages=16: stages of 1 devices need more than one host of 8"),
        (("parallel.layers=[20,11]",), "parallel.layers=[20, 11] sum to 31; the model has 32"),
        (
            ("parallel.layers=[20,12]", "parallel.stages=3"),
            "parallel.layers=[20, 12] are 2 stages and parallel.stages=3",
        ),
        ((DPA, "parallel.padding=some"), "parallel.padding=some must be one of graphs, always, never"),
        (
            ("policy/overlap=row_chunks",),
            "parallel.overlap=row_chunks: sums over tensor-parallel devices are chunked, and",
        ),
        (
            ("policy/overlap=single_batch",),
            "parallel.overlap=single_batch: the way to the experts is hidden behind shared",
        ),
        (
            (MOE, DPA, "policy/overlap=single_batch"),
            "parallel.overlap=single_batch: the way to the experts is hidden behind shared experts, and the mo",
        ),
        (("parallel=tp4", "parallel.overlap_threshold=1"), "parallel.overlap_threshold=1.0 must lie in [0, 0.5]"),
        (
            ("policy/overlap=prefill_decode", "parallel=pp2"),
            "policy.overlap=prefill_decode and parallel.stages=2 do not",
        ),
        (
            ("policy/overlap=prefill_decode", DPA, MOE),
            "policy.overlap=prefill_decode and parallel.dp_attention=true do",
        ),
        (("queueing.report_delay=1",), "queueing.report_delay=1.0: say when reports are taken"),
        (
            ("links.all_reduce=one_shot", "links=pcie4", "parallel=tp4"),
            "links.all_reduce=one_shot needs links.direct=true",
        ),
    ],
)
def test_wrong_combinations_are_told_in_one_line(overrides, message):
    with pytest.raises(settings.SettingError) as caught:
        parts(*overrides)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
