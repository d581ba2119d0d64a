"""One offline replay by NVIDIA Dynamo's mocker (ai-dynamo-runtime, Rust), timed. Runs under the interpreter that it is
installed for and imports nothing of ours:

    VENV/bin/python dynamo_worker.py '{"trace": ..., "blocks": ..., "seqs": ..., "tokens": ...}'

`trace`: Mooncake's format. vLLM's scheduler with chunked prefill and no prefix cache, step times by its own polynomial,
no record of single requests. The last line of stdout is one JSON object: CPU seconds and counts; it does not tell how
many steps it made.
"""

from __future__ import annotations

import json
import sys
from time import process_time


def main() -> None:
    """Run what the only argument says."""
    # Late: it is part of its start-up, and nothing of ours can import it.
    from dynamo import _core  # type: ignore[import-not-found]

    wanted = json.loads(sys.argv[1])
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": wanted["blocks"],
        "block_size": 16,
        "max_num_seqs": wanted["seqs"],
        "max_num_batched_tokens": wanted["tokens"],
        "enable_prefix_caching": False,
        "timing_model": {"type": "polynomial"},
    }
    ready = process_time()
    result = _core.run_mocker_trace_replay(
        [wanted["trace"]], extra_engine_args={"engine": engine}, capture_planner_details=False, trace_block_size=512
    )
    served = process_time() - ready
    summary = result.summary
    counts = {"requests": summary["completed_requests"], "steps": None, "finished": summary["duration_ms"] / 1e3}
    print(json.dumps({"start_up": ready, "serving": served, **counts}))


if __name__ == "__main__":
    main()
