import pandas as pd

from analysis.metrics import Tables
from analysis.plots import save_all


def test_every_plot_is_written(tmp_path):
    requests = pd.DataFrame(
        {
            "arrival": [0.0, 1.0], "first_token": [1.0, 2.0], "finished": [3.0, 90.0], "output_length": [3, 1],
            "outcome": ["finished", "finished"],
        }
    )  # fmt: skip
    steps = pd.DataFrame(
        {
            "step": [0, 1], "group": [0, 0], "planned": [0.0, 1.0], "started": [0.0, 1.0], "finished": [1.0, 3.0],
            "prefill_tokens": [4, 0], "decode_tokens": [0, 2], "blocks_free": [9, 8],
            "count": [1, 1],
        }
    )  # fmt: skip
    tables = Tables(requests, steps, pd.DataFrame(), 10, pd.DataFrame())
    paths = save_all({"one": tables, "two": tables}, tmp_path / "plots")
    assert sorted(path.name for path in paths) == ["kv_usage.png", "latency.png", "tokens_per_step.png"]
    assert all(path.stat().st_size > 5_000 for path in paths)
