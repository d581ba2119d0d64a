"""All samples of a design, pass by pass, kept as they come: an interrupted calibration goes on where it was."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TextIO

from experiments.calibrate.design import Probe, Ramp
from experiments.calibrate.drive import Driver, Sample
from experiments.progress import Meter
from experiments.settings import SettingError
from playground.backend import Backend

SAMPLES = "samples.jsonl"
REST = 1.0
"""Seconds before a ramp."""
WARM = -1
"""The pass before the first: kernels of new shapes are compiled in it, and nothing of it is kept."""


def measure(
    backend: Backend,
    probes: Sequence[Probe],
    ramps: Sequence[Ramp],
    passes: int,
    folder: Path,
    seed: int,
    meter: Meter,
) -> None:
    """Every probe once in each pass, each pass in an order of its own: what drifts meanwhile meets all of them."""
    kept = read(folder)
    missing = [(n, probe) for n in range(passes) for probe in _shuffled(probes, seed + n) if n not in kept[probe.name]]
    rising = [ramp for ramp in ramps if len(kept[_name(ramp)]) < len(ramp.probes)]
    fresh = {probe.name: probe for _, probe in missing} | {p.name: p for ramp in rising for p in ramp.probes}
    if not fresh:
        return
    work = [*((WARM, probe) for probe in fresh.values()), *missing]
    driver, size = Driver(backend), backend.spec.block_size
    blocks = max(probe.blocks(size) + probe.copied_blocks for probe in fresh.values())
    total = blocks + len(work) + sum(len(ramp.probes) for ramp in rising)
    for done in driver.fill(blocks):
        meter.update(done, total, backend.now())
    with (folder / SAMPLES).open("a", encoding="utf-8") as lines:
        for turn, probe in work:
            sample = driver.time(probe)
            if turn != WARM:
                _keep(lines, turn, probe.name, sample)
            done += 1
            meter.update(done, total, backend.now())
        for ramp in rising:
            driver.rest(REST)
            for turn, probe in enumerate(ramp.probes):
                _keep(lines, turn, _name(ramp), driver.time(probe))
                done += 1
                meter.update(done, total, backend.now())


def _name(ramp: Ramp) -> str:
    return f"ramp {ramp.name}"


def _keep(lines: TextIO, turn: int, name: str, sample: Sample) -> None:
    print(json.dumps({"pass": turn, "probe": name, **sample._asdict()}), file=lines, flush=True)


def _shuffled(probes: Sequence[Probe], seed: int) -> list[Probe]:
    return Random(seed).sample(probes, len(probes))


def read(folder: Path) -> defaultdict[str, dict[int, Sample]]:
    """By probe and pass. A last line that was cut off is left out."""
    found: defaultdict[str, dict[int, Sample]] = defaultdict(dict)
    file = folder / SAMPLES
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            sample = Sample(row["at"], tuple(row["stages"]), tuple(row["links"]), row["host"])
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
