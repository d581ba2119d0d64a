"""What the benchmark of exchanges prints; the measuring itself needs GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from experiments.benchmarks.gpu.peers import table


def test_a_line_a_shape_and_a_column_a_way():
    found = (([1, 8], "peers", 4.04), ([1, 8], "nccl", 42.0), ([2, 8], "peers", 5.0), ([2, 8], "nccl", 43.0))
    rows = [{"operation": "add_sum", "by": by, "shape": shape, "us": us} for shape, by, us in found]
    head, *lines = table(rows).splitlines()
    assert head.split("  ")[0] == "us a call" and head.index("(peers)") < head.index("(nccl)")
    assert [line.split() for line in lines] == [["1", "x", "8", "4.0", "42.0"], ["2", "x", "8", "5.0", "43.0"]]
