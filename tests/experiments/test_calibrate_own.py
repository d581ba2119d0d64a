"""The second half of the demo, with a simulated device for this machine: without noise there is next to no error."""

from dataclasses import replace

import pytest
from hydra import initialize_config_module

from experiments import launcher, plugins, settings
from experiments.calibrate import study
from experiments.calibrate.own import OwnMachine
from experiments.calibrate.study import Calibrate
from experiments.settings import SettingError

DEVICE = (
    "backend=sim",
    "backend.skip_ahead=false",
    "++backend.cost.graph_rows=0",
    "model=llama-3.1-8b",
    "device=h100",
    "kv.blocks=512",
    "limits.max_seqs=16",
    "limits.max_tokens=512",
)
WORKLOAD = (
    "workload=poisson",
    "workload.requests=60",
    "workload.lengths.prompt.mean=128",
    "workload.lengths.output.mean=32",
    "workload.max_length=512",
)
OWN = OwnMachine(DEVICE, WORKLOAD, ("vllm_v1", "vllm_v0"), Calibrate(("vllm_v1", "vllm_v0"), 1, 1024, 12))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(result, stdout)"""
    import contextlib
    import io

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(study, "OWN", tmp_path_factory.mktemp("own"))
        for registering in (settings, plugins, launcher):
            registering.register()
        with initialize_config_module("conf", version_base="1.3"):
            result = OWN.run(tmp_path_factory.mktemp("runs") / "own", [])
    return result, out.getvalue()


def test_the_simulation_is_what_it_was_calibrated_with(told):
    result, _ = told
    for policy in OWN.policies:
        for metric, row in result[policy].items():
            assert row["error"] == pytest.approx(row["simulated"] / row["engine"] - 1)
            assert row["spread"] == 0.0  # a simulated device repeats itself
            assert abs(row["error"]) < 0.05, metric  # who meets the end of a step is chance: medians of sixty jump
    assert result["vllm_v0"]["tpot_p90"]["engine"] > result["vllm_v1"]["tpot_p90"]["engine"]


def test_the_load_is_a_share_of_what_the_profile_foresees(told):
    result, _ = told
    throughput = result["vllm_v1"]["throughput"]["engine"]
    assert throughput == pytest.approx(result["rate"], rel=0.3)  # sixty requests, and the tail of the last


def test_a_newcomer_reads_what_was_done_and_found(told):
    result, out = told
    for text in (
        "1. Timing steps",
        "2. Serving at",
        "60% of the simulated capacity",
        "3. The same in simulation",
        "TTFT P90 (ms)",
        "identical in 4 of 4 runs",
        f"Profile: {result['profile']}",
        "playground backend/cost=calibrated model=llama-3.1-8b device=h100 kv.blocks=512",
    ):
        assert text in out
    assert "something else used" not in out


@pytest.mark.parametrize(
    ("changed", "problem"),
    [({"policies": ()}, r"study\.policies=\[\] must name"), ({"load": 0}, r"study\.load=0 must be more than 0")],
)
def test_options_that_cannot_be(changed, problem):
    with pytest.raises(SettingError, match=problem):
        replace(OWN, **changed)
