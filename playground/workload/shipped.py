"""The traces that come with the playground: names, files, and what is odd about them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from playground.workload.fields import USUAL, ReadOptions
from playground.workload.files import existing
from playground.workload.tracefile import TraceFile


@dataclass(frozen=True, slots=True)
class Shipped:
    """`path` is relative to `data/`. `slot`: seconds that the recording rounded arrivals to, 0 where it did not."""

    path: str
    format: str
    slot: float = 0.0


TRACES: dict[str, Shipped] = {
    "azure_code": Shipped("azure_2023/AzureLLMInferenceTrace_code.csv.xz", "azure"),
    "azure_conv": Shipped("azure_2023/AzureLLMInferenceTrace_conv.csv.xz", "azure"),
    "mooncake_conversation": Shipped("mooncake_fast25/conversation_trace.jsonl.xz", "mooncake", slot=3.0),
    "mooncake_synthetic": Shipped("mooncake_fast25/synthetic_trace.jsonl.xz", "mooncake"),
    "miniswe": Shipped("lmcache_agent/miniswe_blksz16.jsonl.xz", "lmcache"),
    "magagent": Shipped("lmcache_agent/magagent_blksz16.jsonl.xz", "lmcache"),
    "sharegpt_timed_llama": Shipped(
        "sharegpt_timed/sharegpt-llama-3.1-8b-300-sps10_blksz16.jsonl.xz", "sharegpt_timed"
    ),
    "sharegpt_timed_qwen": Shipped("sharegpt_timed/sharegpt-qwen3-32b-300-sps10_blksz16.jsonl.xz", "sharegpt_timed"),
    "sharegpt": Shipped("lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv.xz", "lengths"),
    "arxiv": Shipped("lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.xz", "lengths"),
    "bwb": Shipped("lengths/bwb_stats_llama2_tokenizer_filtered_v2.csv.xz", "lengths"),
}
POOLS = ("deepseek-r1", "m-large")


def data(path: str) -> Traversable:
    """A file of the package's data."""
    return files("playground.workload").joinpath("data", *path.split("/"))


def find(option: str, trace: str, format: str | None, options: ReadOptions = USUAL) -> TraceFile:
    """The file of a shipped trace, or of a path (which needs a format); `option` is what the user set."""
    if trace in TRACES:
        shipped = TRACES[trace]
        return TraceFile(data(shipped.path), shipped.format, options)
    file = existing(option, trace, instead=f", nor a shipped trace: {', '.join(TRACES)}")
    return TraceFile(file, str(format), options)


def slot(trace: str) -> float:
    """Seconds that the arrivals of a trace were rounded to; 0 for a trace that is not ours."""
    return TRACES[trace].slot if trace in TRACES else 0.0
