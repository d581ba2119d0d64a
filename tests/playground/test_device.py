"""Device sheets: every file builds, no fraction beats its sheet, and a wrong figure is named."""

from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from playground.sim.device import Device

SHEETS = sorted(Path("conf/device").glob("*.yaml"))
DEVICE = Device("unit", 100.0, 10.0, 1000, 4.0, 2.0)


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.stem)
def test_every_sheet_builds(sheet):
    device = instantiate(OmegaConf.load(sheet))
    assert device.gemm_flops <= device.peak_flops
    assert device.bandwidth <= device.memory_bandwidth
    assert device.link <= device.link_bandwidth


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.stem)
def test_every_figure_of_a_sheet_names_its_source(sheet):
    lines = sheet.read_text().splitlines()
    above = ["#" in line for line in lines]
    figures = [index for index, line in enumerate(lines) if not line.startswith(("#", "_target_", "name"))]
    assert all("#" in lines[index] or above[index - 1] for index in figures)


def test_achievable_rates_by_hand():
    device = replace(DEVICE, gemm_fraction=0.5, bandwidth_fraction=0.25, link_fraction=0.5, host_fraction=1.0)
    assert (device.gemm_flops, device.bandwidth, device.link, device.host_link) == (50.0, 2.5, 2.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bandwidth": -1}, r"device\.memory_bandwidth=-1 must be greater than 0"),
        ({"peak_flops": 0}, r"device\.peak_flops=0 must be greater than 0"),
        ({"peak_flops": nan}, r"device\.peak_flops=nan must be greater than 0"),
        ({"gemm_fraction": 1.5}, r"device\.gemm_fraction=1\.5 must lie in \(0, 1\]"),
        ({"link_latency": -1e-6}, r"device\.link_latency=-1e-06 must be 0 or more seconds"),
        ({"gemm_tile": 0}, r"device\.gemm_tile=0 must be greater than 0"),
    ],
)
def test_a_wrong_figure_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(DEVICE, **changes)
