"""One run of this simulator, timed, trace written as in any run: python -m experiments.peers.ours_worker OVERRIDE ...

The last line of stdout is one JSON object like those of the peers' workers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from time import process_time

import pyarrow.parquet as pq

from experiments.peers.load import parts
from playground.loop import serve
from playground.trace import Trace


def main() -> None:
    """Run what the arguments say."""
    run = parts(sys.argv[1:])
    ready = process_time()
    with tempfile.TemporaryDirectory() as folder:
        with Trace(folder) as trace:
            serve(run.source, run.scheduler, run.backend, trace)
        served = process_time() - ready
        requests = pq.read_metadata(f"{folder}/requests.parquet").num_rows
        steps = int(pq.read_table(f"{folder}/steps.parquet", columns=["count"])["count"].to_numpy().sum())
    times = {"start_up": ready, "serving": served}
    print(json.dumps({**times, "requests": requests, "steps": steps, "finished": run.backend.now()}))


if __name__ == "__main__":
    main()
