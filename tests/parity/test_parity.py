"""The same policy takes the same decisions in both backends, and a backend that cheats is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from engine.backend import TorchBackend
from engine.costed import CostedBackend
from engine.load import load_model
from engine.models.decoder import Decoder
from engine.tiny import tiny
from playground.backend import Backend
from playground.check.parity import Divergence, Recorded, replay, simulate
from playground.check.recording import Commit, Decision, Recording, load
from playground.core import COPY_OUT, Copy, Done, Spec, Step
from playground.draft import How
from playground.sim.backend import SimBackend
from playground.sim.durations import Durations, LaneTimes, StepTimes
from playground.trace import SCHEMAS, read
from policies.admission import FullPrompt, MaxLength
from policies.budget import ChunkedPrefill, Orca, PrefillFirst, Static, TokenThrottling, TokenThrottling2025, Unified
from policies.composed import Composed
from policies.overlap import Overlap
from policies.predictors import OracleLength
from policies.preemptive import Srtf
from policies.route import LeastOutstanding
from policies.victims import Largest, LastArrived
from tests.parity.runs import fresh, record, requests, simulated

POLICIES: dict[str, Callable[[], Composed]] = {
    "static": lambda: Composed(Static(8)),
    "orca": lambda: Composed(Orca(8), admission=MaxLength()),
    "vllm_v0": lambda: Composed(PrefillFirst(128)),
    "vllm_v1": lambda: Composed(Unified(64)),
    "chunked_prefill": lambda: Composed(ChunkedPrefill(48), admission=FullPrompt()),
    "token_throttling": lambda: Composed(TokenThrottling(64, 8, 4), victims=Largest()),
    "token_throttling_2025": lambda: Composed(TokenThrottling2025(64, 8, 4)),
    "swap": lambda: Composed(Unified(64), victims=LastArrived(How.SWAP)),
    "srtf_oracle": lambda: Composed(ChunkedPrefill(48), order=Srtf(OracleLength(), 4.0)),
    "run_ahead": lambda: Composed(Unified(64), overlap=Overlap(2)),
    "run_ahead_3_largest": lambda: Composed(ChunkedPrefill(48), victims=Largest(), overlap=Overlap(3)),
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(tiny("llama"))


def engine(model: Decoder) -> TorchBackend:
    """A pool of 24 blocks, so that every policy has to preempt or hold back."""
    return TorchBackend(model, blocks=24, host_blocks=16, max_seqs=12, max_tokens=256, max_length=512)


@pytest.mark.parametrize("name", POLICIES)
def test_engine_run_replays_in_the_simulator(name: str, model: Decoder, tmp_path: Path) -> None:
    record(tmp_path, POLICIES[name](), engine(model), requests(), aborts=[(0.02, 5), (0.05, 11)])
    report = replay(load(tmp_path), fresh(load(tmp_path).spec, POLICIES[name]()))
    assert report.steps > 10
    assert report.requests == 24


def test_replay_finds_another_policy(model: Decoder, tmp_path: Path) -> None:
    record(tmp_path, POLICIES["vllm_v1"](), engine(model), requests())
    with pytest.raises(Divergence, match=r"(?s)step \d+ is another.*recorded:.*replayed:.*sequence"):
        replay(load(tmp_path), fresh(load(tmp_path).spec, POLICIES["vllm_v0"]()))


class Tampered:
    """An engine whose reports somebody changes."""

    def __init__(self, inner: Backend, change: Callable[[Done], Done]) -> None:
        self.spec = inner.spec
        self._inner, self._change = inner, change

    def now(self) -> float:
        return self._inner.now()

    def launch(self, step: Step) -> None:
        self._inner.launch(step)

    def wait(self, until: float = inf) -> Done | None:
        done = self._inner.wait(until)
        return done and self._change(done)

    def close(self) -> None:
        self._inner.close()


def longer(done: Done) -> Done:
    return replace(done, finished=done.started + 1.2 * (done.finished - done.started))


def shorter(done: Done) -> Done:
    return replace(done, finished=done.started + 0.5 * (done.finished - done.started))


def ends_early(done: Done) -> Done:
    return replace(done, ended=tuple(done.tokens)) if done.step == 6 else done


@pytest.mark.parametrize("change", [longer, shorter, ends_early])
def test_engine_with_false_reports_is_found_out(change: Callable[[Done], Done], model: Decoder, tmp_path: Path) -> None:
    record(tmp_path, POLICIES["vllm_v1"](), Tampered(engine(model), change), requests())
    with pytest.raises(Divergence):
        replay(load(tmp_path), fresh(load(tmp_path).spec, POLICIES["vllm_v1"]()))


class Swapping(Tampered):
    """Two steps in flight come back in the wrong order."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, lambda done: done)
        self._in_flight = 0
        self._held: list[Done] = []

    def launch(self, step: Step) -> None:
        self._in_flight += 1
        super().launch(step)

    def wait(self, until: float = inf) -> Done | None:
        if not self._held and self._in_flight > 1:
            first, second = self._inner.wait(inf), self._inner.wait(inf)
            assert first
            self._held = [first]
            self._in_flight -= 1
            return second
        done = self._held.pop() if self._held else self._inner.wait(until)
        self._in_flight -= done is not None
        return done


def test_completions_in_another_order_are_found_out(model: Decoder, tmp_path: Path) -> None:
    prompts = [replace(request, max_tokens=1, output_length=1) for request in requests(12, spread=1e-6)]
    policy = Composed(PrefillFirst(128), overlap=Overlap(2))
    with pytest.raises(ValueError, match="came back before step"):  # by the scheduler itself
        record(tmp_path, policy, Swapping(engine(model)), prompts)


class Slow(SimBackend):
    """A simulator that takes a hundredth longer."""

    def __init__(self, spec: Spec, durations: Durations) -> None:
        super().__init__(spec, Stretched(durations))


class Stretched:
    def __init__(self, inner: Durations) -> None:
        self._inner = inner

    def of(self, step: Step) -> StepTimes:
        host, lanes = self._inner.of(step)
        return StepTimes(host, {n: LaneTimes(tuple(1.01 * t for t in lane.stages)) for n, lane in lanes.items()})


class TwoTokens(SimBackend):
    """A simulator that hands out two tokens where one was promised."""

    def wait(self, until: float = inf) -> Done | None:
        done = super().wait(until)
        return done and replace(done, tokens=dict.fromkeys(done.tokens, (0, 0)))


class LastInFirstOut(SimBackend):
    """A simulator that reports completions in the wrong order."""

    def wait(self, until: float = inf) -> Done | None:
        done = super().wait(until)
        if done and (later := super().wait(done.finished + 1.0)):
            self._ready.appendleft(done)
            return later
        return done


@pytest.mark.parametrize("faulty", [Slow, TwoTokens, LastInFirstOut])
def test_faulty_simulator_is_found_out(faulty: type[SimBackend], model: Decoder, tmp_path: Path) -> None:
    record(tmp_path, POLICIES["run_ahead"](), engine(model), requests())
    replay(load(tmp_path), fresh(load(tmp_path).spec, POLICIES["run_ahead"]()))
    with pytest.raises(Divergence):
        replay(load(tmp_path), fresh(load(tmp_path).spec, POLICIES["run_ahead"]()), simulated=faulty)


TOPOLOGIES = {
    "one": Spec(blocks=24, max_seqs=12, max_tokens=256),
    "pipeline of 2": Spec(blocks=24, max_seqs=12, max_tokens=256, stages=2),
    "pipeline of 4": Spec(blocks=24, max_seqs=12, max_tokens=256, stages=4),
    "2 replicas": Spec(blocks=16, max_seqs=8, max_tokens=256, ranks=2),
    "3 replicas of 2 stages": Spec(blocks=16, max_seqs=8, max_tokens=256, ranks=3, stages=2),
    "2 ranks in lockstep": Spec(blocks=16, max_seqs=8, max_tokens=256, ranks=2, lockstep=True),
    "run-ahead 2": Spec(blocks=24, max_seqs=12, max_tokens=256, forwards_tokens=True),
    "run-ahead 2, pipeline of 2": Spec(blocks=24, max_seqs=12, max_tokens=256, stages=2, forwards_tokens=True),
    "host pool": Spec(blocks=24, max_seqs=12, max_tokens=256, host_blocks=24),
}


def chosen(topology: str) -> Composed:
    run_ahead = Overlap(2 if "run-ahead" in topology else 1)
    how = How.SWAP if topology == "host pool" else How.RECOMPUTE
    return Composed(TokenThrottling(64, 8, 4), victims=LastArrived(how), route=LeastOutstanding(), overlap=run_ahead)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_real_tensors_on_the_simulated_clock_change_nothing(topology: str, model: Decoder, tmp_path: Path) -> None:
    """Every table of the trace is equal, byte for byte, with and without a model behind it."""
    spec = replace(TOPOLOGIES[topology], max_length=512)
    record(tmp_path / "sim", chosen(topology), simulated(spec), requests())
    record(tmp_path / "costed", chosen(topology), CostedBackend(model, simulated(spec)), requests())
    for table in SCHEMAS:
        assert read(tmp_path / "sim", table).equals(read(tmp_path / "costed", table)), table


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_simulated_run_replays(topology: str, tmp_path: Path) -> None:
    record(tmp_path, chosen(topology), simulated(TOPOLOGIES[topology]), requests())
    recording = load(tmp_path)
    assert replay(recording, fresh(recording.spec, chosen(topology))).lag == pytest.approx(0, abs=1e-9)


def test_killed_run_replays_as_far_as_it_goes(model: Decoder, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def dies(done: Done) -> Done:
        if done.step == 20:
            raise Killed
        return done

    with pytest.raises(Killed):
        record(tmp_path, POLICIES["vllm_v1"](), Tampered(engine(model), dies), requests())
    recording = replace(load(tmp_path), whole=False)
    assert replay(recording, fresh(recording.spec, POLICIES["vllm_v1"]())).steps == 20


def test_stages_that_copy_beside_one_another() -> None:
    """The first stage is done with a later copy before the last one is with an earlier."""
    spec, copied = Spec(10, 1, host_blocks=10, stages=2), [(1.0, 2.0), (1.5, 2.5)]
    commits = [Commit(id, COPY_OUT, id / 10, id / 10, stages[-1], stages) for id, stages in enumerate(copied)]
    decisions = {id: Decision(0.0, 0, (), 1) for id in range(2)}
    backend = simulate(spec, Recorded(Recording(spec, {}, [], commits, decisions, {}, True)))
    for id in range(2):
        backend.launch(Step(id, 0, 0.0, (), (Copy(id, 0, 0, (id,), (id,), COPY_OUT),)))
    assert [done.finished for _ in copied if (done := backend.wait())] == pytest.approx([2.0, 2.5])


def test_merged_steps_are_refused(tmp_path: Path) -> None:
    record(tmp_path, POLICIES["vllm_v1"](), simulated(Spec(blocks=24, repeats=True)), requests())
    with pytest.raises(ValueError, match=r"backend\.skip_ahead=false"):
        load(tmp_path)


def test_spec_travels_with_the_run(tmp_path: Path) -> None:
    spec = Spec(blocks=24, stages=2)
    record(tmp_path, POLICIES["vllm_v1"](), simulated(spec), requests(4))
    assert json.loads((tmp_path / "run.json").read_text())["spec"]["stages"] == 2
    assert load(tmp_path).spec == spec
