"""What every policy decides on one small trace, as exact integers. `make golden` rewrites them: read the diff.

A line that changed without a policy having been changed on purpose is a bug.
"""

import json
from pathlib import Path

import pytest

from tests.golden.run import POLICIES, cases, outcome, requests

FILE = Path(__file__).with_name("golden.json")


def recorded() -> dict[str, dict[str, int]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(golden: dict[str, dict[str, int]]) -> None:
    """A line a case, so that a diff shows which changed."""
    lines = (f"  {json.dumps(case)}: {json.dumps(golden[case])}" for case in sorted(golden))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def difference(old: dict[str, int], new: dict[str, int]) -> list[str]:
    names = dict.fromkeys([*old, *new])
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]


@pytest.mark.parametrize("case", cases())
def test_decisions(case, rewrite_golden):
    new = outcome(case)
    assert new["finished"] == len(requests())
    if rewrite_golden:
        write(recorded() | {case: new})
    changed = difference(recorded().get(case, {}), new)
    assert not changed, f"{case}, golden -> now (make golden, if it is meant): " + "; ".join(changed)


def test_every_line_belongs_to_a_case(rewrite_golden):
    golden = recorded()
    if rewrite_golden:
        write({case: line for case, line in golden.items() if case in cases()})
    assert sorted(recorded()) == cases()


ALIKE = {
    1: [
        {"chunked_prefill", "vllm_v1", "implicit_grouping", "balanced_decode", "sarathi_dynamic", "scorpio"},
        {"orca", "trtllm"},
    ],
    4: [{"chunked_prefill", "vllm_v1", "implicit_grouping", "scorpio"}, {"orca", "trtllm"}],
}
"""Of `vllm_v1` see the next test; `implicit_grouping` is its other name. Nobody here has objectives for `scorpio`. One
stage has nothing to balance, and few prompts here are so long that chunks would shrink. No step fills Orca's 16 rows
or TensorRT-LLM's 8192 tokens, and these two are otherwise the same, but that prompts of the latter may wait."""


def test_the_policies_differ():
    """Else the trace would tell nothing."""
    golden = recorded()
    for depth, alike in ALIKE.items():
        decisions: dict[int, set[str]] = {}
        for policy in POLICIES:
            decisions.setdefault(golden[f"{policy} @ {depth}"]["slices_crc"], set()).add(policy)
        same = [policies for policies in decisions.values() if len(policies) > 1]
        assert sorted(map(sorted, same)) == sorted(map(sorted, alike))
    assert golden["trtllm budget.wait_steps=5 budget.wait_share=0.5 @ 1"] != golden["trtllm @ 1"]


def test_vllm_v1_decides_as_chunked_prefill_until_prompts_are_capped_or_over_admitted():
    """A prompt in chunks is the last admitted, so list order puts all decodes before it, just as Sarathi does."""
    crc = {case: line["slices_crc"] for case, line in recorded().items()}
    for setting in ("@ 1", "@ 4", "budget.tokens=128 @ 1", "budget.tokens=128 @ 4"):
        assert crc[f"vllm_v1 {setting}"] == crc[f"chunked_prefill {setting}"]
    others = {crc["vllm_v1 budget.long_prefill_threshold=128 @ 1"], crc["vllm_v1 admission=always @ 1"]}
    assert len(others | {crc["chunked_prefill @ 1"]}) == 3
