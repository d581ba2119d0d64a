"""Whatever a user gets wrong: one line that names option, value and fix, exit code 2, no traceback."""

import shutil

import pytest
import torch

from engine.tiny import tiny
from playground.workload.errors import WorkloadError
from tests.engine.cuda_host import HostTimeline, load_on_host

CASES = {
    # groups
    ("policy=foo",): "policy=foo: no such option; choose one of: andes",
    ("policy=chunked_prefil",): "did you mean chunked_prefill?",
    ("policy/victims=larges",): "policy/victims=larges: no such option; did you mean largest?",
    ("policy/victim=largest",): "there is no group policy/victim",
    ("polcy=orca",): "polcy=orca: unknown option; did you mean policy?",
    ("device=h999",): "device=h999: no such option; choose one of: a100_40",
    ("backend=gpu",): "backend=gpu: no such option",
    ("model=nope",): "model=nope: no such option",
    ("+experiment=nope",): "experiment=nope: no such option",
    ("experiment=quickstart",): "add it with +experiment=",
    ("+policy=orca",): "policy is set twice",
    ("policy=orca,static",): "policy=orca,static: several values are a sweep: add -m",
    ("policy=null",): "policy=null: a group takes the name of one of its options",
    ("~policy",): "policy is required",
    # options
    ("workload.rat=3",): "workload.rat=3: unknown option; did you mean rate?",
    ("policy.budget={a: 1}",): "policy.budget={a: 1}: unknown option a; choose one of: tokens",
    ("kv={bloks: 1}",): "kv={bloks: 1}: unknown option bloks; did you mean blocks?",
    ("kv.blok=3",): "kv.blok=3: unknown option; did you mean blocks?",
    ("+policy.foo=1",): "policy.foo: Composed has no such option",
    ("policy.budget.token=3",): "policy.budget.token=3: unknown option; did you mean tokens?",
    ("seed=abc",): "seed=abc must be a whole number",
    ("limits.max_seqs=1.5",): "limits.max_seqs=1.5 must be a whole number",
    ("kv.prefix_cache=perhaps",): "kv.prefix_cache=perhaps must be true or false",
    ("foo",): "'foo' cannot be read: write GROUP=OPTION or KEY.PATH=VALUE",
    ("workload.rate=[1",): "'workload.rate=[1' cannot be read",
    ("--frobnicate",): "--frobnicate: no such flag",
    ("--config-dir", "/no/such"): "--config-dir: Additional config directory '/no/such' not found",
    ("--cfg", "foo"): "--cfg foo: choose one of: job, hydra, all",
    ("policy=orca", "--config-dir"): "--config-dir needs a value",
    # impossible settings
    ("kv.block_size=0",): "kv.block_size=0 must be at least 1",
    ("kv.blocks=0",): "kv.blocks=0 must be at least 1",
    ("seed=-1",): "seed=-1 must be 0 or more",
    ("workload.rate=0",): "workload.rate=0 must be greater than 0",
    ("workload.rate=-1",): "workload.rate=-1 must be greater than 0",
    ("workload.rate=abc",): "workload.rate=abc must be a number",
    ("workload.requests=0",): "workload.requests=0 must be at least 1",
    ("parallel.tp=3",): "parallel.tp=3 must divide the model's 32 heads",
    ("parallel.stages=99",): "parallel.stages=99 must lie in 1..32",
    ("parallel.stages=0",): "parallel.stages=0 must be at least 1",
    ("parallel.replicas=100000",): "parallel.replicas=100000 must be at most 4096",
    ("run_dir=",): "run_dir= is empty: give run_dir=FOLDER",
    ("limits.max_tokens=0",): "limits.max_tokens=0 must be at least 1",
    ("device.peak_flops=0",): "device.peak_flops=0 must be greater than 0",
    ("model=llama-3.1-70b", "device=rtx4090"): "device=RTX4090 has 23.2 GB to use",
    ("queueing.requeue=middle",): "queueing.requeue=middle must be front or back",
    ("slo.ttft=-1",): "slo.ttft=-1.0 must be more than 0 seconds",
    ("policy.overlap.run_ahead=0",): "policy.overlap.run_ahead=0 must be at least 1",
    ("policy.budget.tokens=-5",): "policy.budget.tokens=-5 must be at least 1",
    ("backend.cost.skew=7",): "backend.cost.skew=7 must lie in 0..1",
    ("backend/contention=gain", "backend.contention.gain=2"): "backend.contention.gain=2 must lie in [0, 1]",
    ("logger=wandb", "logger.mode=loud"): "logger.mode=loud must be offline, online or disabled",
    (
        "backend=engine",
        "model=tiny",
        "parallel.tp=3",
    ): "parallel.tp=3 does not divide the model's 8 heads; take a tp that does",
    (
        "backend=engine",
        "model=tiny",
        "parallel.ep=2",
    ): "parallel.ep=2 must divide the 1 ranks that share experts",
    (
        "backend=engine",
        "model=tiny",
        "policy/overlap=row_chunks",
    ): "parallel.overlap=row_chunks: sums over tensor-parallel devices are chunked, and parallel.tp=1",
    ("backend=engine", "model=llama-3.1-8b"): "model.path=llama-3.1-8b: the engine needs a Hugging Face folder",
    ("backend=engine", "model=tiny", "backend.device=tpu"): "device=tpu: the engine has no such device; take cpu, cuda",
    ("backend=engine", "model=tiny", "backend.dtype=int8"): "dtype=int8 is not supported; choose one of auto, float32",
    ("backend=engine", "backend.gpu_memory_utilization=2"): "backend.gpu_memory_utilization=2 must lie in (0, 1]",
    ("backend=engine", "model=tiny", "kv.host_blocks=99999999999"): "kv.host_blocks=99999999999: no memory for a KV",
    # a prompt that can never fit
    ("kv.blocks=1", "workload.requests=5"): "5 of 5 requests were rejected, the first since prompt",
    # values of the wrong type
    ("policy.budget.tokens=1.5",): "policy.budget.tokens=1.5 must be a whole number",
    ("policy.budget.tokens=abc",): "policy.budget.tokens=abc must be a whole number",
    ("policy.budget.tokens={a: 1, b: [x, null]}",): "policy.budget.tokens={a: 1, b: [x, null]} must be a whole number",
    ("policy.budget.tokens={_target_: a.b}",): "policy.budget.tokens={_target_: a.b} must be a whole number",
    ("policy.budget={_target_: {a: 1}}",): "policy.budget._target_={a: 1} must be text, the name of a class",
    ("policy._target_=3",): "policy._target_=3 must be text, the name of a class",
    ("policy.budget._target_=[]",): "policy.budget._target_=[] must be text, the name of a class",
    ("slo.ttft={a: 1}",): "slo.ttft={a: 1} must be a number",
    ("policy.budget.tokens=null",): "policy.budget.tokens=null must be a whole number",
    ("policy.budget=null",): "policy.budget=null must be a part: give it a _target_",
    ("workload.requests=null",): "workload.requests=null must be a whole number",
    ("workload.lengths=5",): "workload.lengths=5 must be a part: give it a _target_",
    ("workload.prefixes=3",): "workload.prefixes=3 must be a part: give it a _target_ or null",
    ("workload.lengths.prompt.mean=inf",): "workload.lengths.prompt.mean=inf must be a number",
    ("device.memory_bytes=inf",): "device.memory_bytes=inf must be a number",
    ("model.path=null",): "model.path=null must be text or a path",
    ("backend.skip_ahead=maybe",): "backend.skip_ahead=maybe must be true or false",
    ("study=foo",): "study=foo names no _target_",
    ("slo.ttft=nan",): "slo.ttft=nan must be more than 0 seconds",
    ("queueing.report_interval=nan",): "queueing.report_interval=nan must be 0 (always fresh) or more seconds",
    # parts that are something else
    ("workload._target_=os.getcwd",): "workload._target_=os.getcwd is no workload: it has no source",
    ("policy._target_=builtins.int",): "policy._target_=builtins.int is no policy: it has no fill",
    ("policy.budget._target_=policies.order.Fcfs",): "policy.budget._target_=policies.order.Fcfs is no budget: it has",
    ("policy.order._target_=policies.budget.Orca",): "policy.order._target_=policies.budget.Orca is no order: it",
    ("logger._target_=builtins.dict",): "logger._target_=builtins.dict is no logger: it has no publish",
    # files and imports
    ("workload=saved",): "workload.path is required: give workload.path=...",
    ("workload=saved", "workload.path=/no/file.jsonl"): "workload.path=/no/file.jsonl: there is no such file",
    ("model.path=/no/such",): "model.path=/no/such: no such folder, file or model",
    ("run_dir=/proc/nope",): "run_dir=/proc/nope: No such file or directory; choose a folder",
    ("hydra.run.dir=/proc/nope",): "hydra.run.dir=/proc/nope: No such file or directory",
    ("policy._target_=mypkg.Mine",): "policy._target_=mypkg.Mine: cannot be imported (No module named 'mypkg')",
    ("policy.budget._target_=policies.budget.Nope",): "policy.budget._target_=policies.budget.Nope: cannot be imported",
}


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_one_line_and_exit_code_2(playground, arguments):
    outcome = playground(*arguments)
    assert outcome.code == 2, outcome.err
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert CASES[arguments] in lines[0]


SPOILT = {
    "model.safetensors": "model.safetensors: not a whole safetensors file",
    "config.json": "(in {folder}/config.json)",
    "generation_config.json": "generation_config.json: not valid JSON",
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_broken_checkpoint(playground, tmp_path, name):
    folder = shutil.copytree(tiny(), tmp_path / "checkpoint")
    file = folder / name
    file.write_bytes(file.read_bytes()[:-7])
    outcome = playground("backend=engine", f"model.path={folder}", "kv.blocks=100")
    assert outcome.code == 2
    (line,) = outcome.err.strip().splitlines()
    assert line.startswith("error: ") and SPOILT[name].format(folder=folder) in line


def test_a_gpu_without_room_for_graphs(playground, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate more.")

    monkeypatch.setattr("experiments.engines.Engine.load", lambda *_: load_on_host(tiny()))
    monkeypatch.setattr("engine.cuda.backend.CudaTimeline", lambda _: HostTimeline())
    monkeypatch.setattr("engine.cuda.graphs.Graphs.capture_all", fail)
    outcome = playground("backend=engine", "model=tiny", "backend.device=cuda", "kv.blocks=100", "workload.requests=2")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "error: backend: no GPU memory left for graphs; lower kv.blocks" in outcome.err


def test_the_outer_of_two_messages_is_told(playground, tmp_path):
    """The inner one does not know which file it speaks of."""
    (tmp_path / "config.json").write_text("{}")
    outcome = playground(f"model.path={tmp_path}")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: model.path={tmp_path}: ")
    assert f"(in {tmp_path}/config.json)" in outcome.err


def test_a_folder_without_results_says_why(playground):
    outcome = playground("workload.rate=0", "hydra.run.dir=here")
    assert outcome.code == 2
    assert (outcome.folder / "here" / "error.txt").read_text() == "workload.rate=0 must be greater than 0\n"


def test_a_bug_keeps_its_traceback(playground, monkeypatch):
    monkeypatch.setattr("experiments.run.serve", None)
    with pytest.raises(TypeError, match="not callable"):
        playground()


def test_a_workload_that_fails_late_is_explained(playground, monkeypatch):
    def late(*_: object) -> None:
        raise WorkloadError("workload.path=x: row 7 is broken")

    monkeypatch.setattr("experiments.run.serve", late)
    outcome = playground()
    assert (outcome.code, outcome.err) == (2, "error: workload.path=x: row 7 is broken\n")


def test_advice_on_blocks_only_where_blocks_are_short(playground):
    outcome = playground("workload.requests=5", "workload.max_length=null", "workload.lengths.prompt.mean=1e8")
    assert outcome.code == 2
    assert "5 of 5 requests were rejected" in outcome.err
    assert "raise kv.blocks" not in outcome.err
