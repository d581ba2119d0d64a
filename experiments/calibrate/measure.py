"""All samples of a design, pass by pass, kept as they come: an interrupted calibration goes on where it was."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from experiments.calibrate.design import Probe
from experiments.calibrate.drive import Driver, Sample
from experiments.progress import Meter
from experiments.settings import SettingError
from playground.backend import Backend

SAMPLES = "samples.jsonl"
WARM = -1
"""The pass before the first: kernels of new shapes are compiled in it, and nothing of it is kept."""


def measure(backend: Backend, probes: Sequence[Probe], passes: int, folder: Path, seed: int, meter: Meter) -> None:
    """Every probe once in each pass, each pass in an order of its own: what drifts meanwhile meets all of them."""
    kept = read(folder)
    wanted = [(turn, probe) for turn in range(passes) for probe in _shuffled(probes, seed + turn)]
    missing = [(turn, probe) for turn, probe in wanted if turn not in kept.get(probe.name, {})]
    if not missing:
        return
    fresh = {probe.name: probe for _, probe in missing}
    work = [*((WARM, probe) for probe in fresh.values()), *missing]
    driver, size = Driver(backend), backend.spec.block_size
    blocks = max(probe.blocks(size) + probe.copied_blocks for probe in fresh.values())
    total = blocks + len(work)
    for filled in driver.fill(blocks):
        meter.update(filled, total, backend.now())
    with (folder / SAMPLES).open("a", encoding="utf-8") as lines:
        for done, (turn, probe) in enumerate(work, 1):
            sample = driver.time(probe)
            if turn != WARM:
                print(json.dumps({"pass": turn, "probe": probe.name, **sample._asdict()}), file=lines, flush=True)
            meter.update(blocks + done, total, backend.now())


def _shuffled(probes: Sequence[Probe], seed: int) -> list[Probe]:
    return Random(seed).sample(probes, len(probes))


def read(folder: Path) -> Mapping[str, Mapping[int, Sample]]:
    """By probe and pass. A last line that was cut off is left out."""
    found: dict[str, dict[int, Sample]] = defaultdict(dict)
    file = folder / SAMPLES
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            sample = Sample(tuple(row["stages"]), tuple(row["links"]), row["host"])
            found[row["probe"]][row["pass"]] = sample
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise SettingError(
                    f"{file}, line {number}: no sample ({error}); delete the file to begin anew"
                ) from None
            _cut(file, lines[:-1])
    return found


def _cut(file: Path, lines: Sequence[str]) -> None:
    """What comes next must begin on a line of its own."""
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
