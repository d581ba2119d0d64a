"""One run of Vidur 0.0.26, timed. Runs under the interpreter that Vidur is installed for and imports nothing of ours:

    VENV/bin/python -P vidur_worker.py '{"trace": .., "tables": .., "blocks": .., "seqs": .., "tokens": .., "out": ..}'

`trace`: requests as Vidur's trace replay reads them. `tables`: a folder of predictions in Vidur's own format, which its
own loader reads in place of those it would download: the cost model is warm, and the C++ one, a seventh faster than the
other. Sarathi on one Llama-3-8B with tp 1, with the metrics that Vidur's own search keeps, neither plots nor a Chrome
trace. The last line of stdout is one JSON object: CPU seconds of this process and its children (`start_up`: until the
first event, `serving`: events and output), and how many requests and steps there were.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def main() -> None:
    """Run what the only argument says."""
    wanted = json.loads(sys.argv[1])
    simulator = _simulator(wanted)
    ready = _cpu_seconds()
    simulator.run()
    served = _cpu_seconds() - ready
    print(json.dumps({"start_up": ready, "serving": served, **_counts(simulator)}))


def _cpu_seconds() -> float:
    """Of this process and of those that load its tables."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _simulator(wanted: dict[str, Any]) -> Any:
    # Late: to import Vidur is part of its start-up, and nothing of ours can.
    import vidur.config as c  # type: ignore[import-not-found]
    from vidur.config.config import TraceRequestGeneratorConfig  # type: ignore[import-not-found]
    from vidur.execution_time_predictor import (  # type: ignore[import-not-found]
        sklearn_execution_time_predictor as predictor,
    )
    from vidur.simulator import Simulator  # type: ignore[import-not-found]
    from vidur.utils.random import set_seeds  # type: ignore[import-not-found]

    predictor.snapshot_download = lambda cache_dir, **_: f"{wanted['tables']}/{cache_dir.rstrip('/').split('/')[-1]}"
    replica = c.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1)
    cluster = c.ClusterConfig(
        replica_config=replica,
        cache_config=c.CacheConfig(num_blocks=wanted["blocks"]),
        replica_scheduler_config=c.SarathiSchedulerConfig(batch_size_cap=wanted["seqs"], chunk_size=wanted["tokens"]),
    )
    requests = TraceRequestGeneratorConfig(
        trace_file=wanted["trace"], prefill_scale_factor=1, time_scale_factor=1, date="any"
    )
    metrics = c.MetricsConfig(enable_chrome_trace=False, store_plots=False, output_dir=wanted["out"])
    set_seeds(0)
    return Simulator(
        c.SimulationConfig(
            log_level="error",
            cluster_config=cluster,
            request_generator_config=requests,
            execution_time_predictor_config=c.RandomForrestExecutionTimePredictorConfig(
                cache_dir=wanted["out"], use_native_execution_time_predictor=True
            ),
            metrics_config=metrics,
        )
    )


def _counts(simulator: Any) -> dict[str, float]:
    from vidur.entities import Batch, Request  # type: ignore[import-not-found]

    return {"requests": Request._id + 1, "steps": Batch._id + 1, "finished": simulator._time}


if __name__ == "__main__":
    main()
