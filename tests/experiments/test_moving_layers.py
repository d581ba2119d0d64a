"""Layers that move between real stages, as a user asks for it."""

from engine.tiny import tiny
from experiments.parity import prove
from playground.trace import read

RUN = ("backend=engine", "model=tiny", "run_dir=mine", "kv.blocks=200", "workload.requests=12", "workload.rate=inf")
SHORT = ("workload.lengths.output.mean=20", "workload.lengths.prompt.mean=40")
EAGER = ("policy.placement.sample_base=1", "policy.placement.window=3", "policy.placement.least_decodes=1")
"""DynaPipe, to which sampling seems so slow that the last stage is to be rid of its layers."""


def test_dynapipe_moves_layers_and_the_run_replays(playground):
    tiny()
    outcome = playground(*RUN, *SHORT, "parallel=pp2", "parallel.spare_layers=1", "policy/placement=dynapipe", *EAGER)
    assert outcome.code == 0, outcome.err
    assert outcome.last["completed"] == 12
    events = read(outcome.run_dir, "events").to_pylist()
    assert [event["detail"].split(",")[0] for event in events if event["kind"] == "layers"] == ["to 3-1"]
    assert prove(outcome.run_dir).requests == 12
