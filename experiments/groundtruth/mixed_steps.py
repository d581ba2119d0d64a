"""Mixed steps that a user of AIConfigurator measured on an H200 with vLLM 0.18 (its issue #1150).

The issue does not name the model. Its author's pull request #1151 of the same day is about Qwen3-8B on that machine,
and the predictions that the issue quotes (22 us a prompt token) are those of an 8B model.
"""

from __future__ import annotations

from experiments.groundtruth import data
from experiments.groundtruth.case import Case, Skipped
from experiments.groundtruth.costs import Hardware
from experiments.groundtruth.static import Mixed

SOURCE = "aiconfigurator #1150"
NAME = "vLLM 0.18.0"
HARDWARE = Hardware("qwen3-8b", "h200")


def cases() -> list[Case]:
    return [_case(row) for row in data.table("aiconfigurator/mixed_step_h200_issue1150.csv")]


def skipped() -> list[Skipped]:
    return []


def _case(row: dict[str, str]) -> Case:
    prompt, batch = int(row["isl"]), int(row["batch"])
    return Case(
        source=SOURCE,
        name=f"prompt of {prompt} with {batch - 1} decodes",
        split="test",
        engine=NAME,
        model=HARDWARE.model,
        device=HARDWARE.device,
        tp=1,
        load="static",
        measured={"step": float(row["mix_step_ms_actual"]) / 1e3},
        # Its output lengths were 30 and 128: the others are halfway through.
        trial=Mixed(HARDWARE, NAME, prompt, batch - 1, prompt + 40),
        assumed="the model; a whole prompt in one step",
    )
