"""Every format: the shipped files against the statistics of their study, other formats by hand, errors by the line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from playground.core import Request, Sampling, Slo
from playground.workload import saved
from playground.workload.errors import WorkloadError
from playground.workload.fields import ReadOptions
from playground.workload.rows import Row
from playground.workload.shipped import TRACES, find
from playground.workload.tracefile import FORMATS, TraceFile

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SHARE = '{"input_toks":40,"output_toks":5,"arrival_time_ns":1500000000,"hash_ids":[1,2]}\n'
MOON = '{"timestamp": 500, "input_length": 1000, "output_length": 3, "hash_ids": [7, 8]}\n'
SAVED = '{"arrival": 0.5, "prompt_length": 3, "max_tokens": 2, "output_length": 2}\n'


def rows(folder: Path, text: str, format: str, dropped: Counter[str] | None = None, **options: Any) -> list[Row]:
    file = folder / "trace"
    file.write_text(text)
    return list(TraceFile(file, format, ReadOptions(**options)).rows(dropped))


def jsonl(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


# Counts, means and maxima of data.md, section 1.3, and the last arrival in seconds.
SHIPPED = {
    "azure_code": (8819, 2047.85, 27.88, 7437, 1899, 3435.9),
    "azure_conv": (19366, 1154.70, 211.13, 14050, 1000, 3501.7),
    "mooncake_conversation": (12031, 12035.06, 342.62, 126195, 2000, 3537.0),
    "mooncake_synthetic": (3993, 15325.48, 149.12, 191378, 893, 1022.0),
    "miniswe": (402, 6317.26, 110.08, 47021, 356, 552.1),
    "magagent": (673, 2286.21, 360.89, 11259, 3039, 6448.6),
    "sharegpt_timed_llama": (300, 857.46, 652.51, 3998, 1021, 29.2),
    "sharegpt_timed_qwen": (300, 862.30, 664.95, 4570, 1224, 29.2),
    "sharegpt": (30731, 2340, 439, 8141, 1024, None),
    "arxiv": (28257, 2588, 291, 4054, 4056, None),
    "bwb": (33768, 1067, 1613, 3504, 2858, None),
}


@pytest.mark.parametrize("name", TRACES)
def test_shipped_traces_are_what_their_study_says(name: str) -> None:
    read = list(find("workload.trace", name, None).rows())
    count, prompt, output, longest_prompt, longest_output, last = SHIPPED[name]
    prompts = np.array([row.prompt_length for row in read])
    outputs = np.array([row.output_length for row in read])
    assert len(read) == count
    assert prompts.mean() == pytest.approx(prompt, abs=0.5)
    assert outputs.mean() == pytest.approx(output, abs=0.5)
    assert (prompts.max(), outputs.max()) == (longest_prompt, longest_output)
    arrivals = [row.arrival for row in read]
    assert arrivals[-1] == (None if last is None else pytest.approx(last, abs=0.1))
    if last is not None:
        assert arrivals == sorted(arrivals)


def test_lmcache_counts_what_it_leaves_out() -> None:
    dropped: Counter[str] = Counter()
    list(find("workload.trace", "magagent", None).rows(dropped))
    assert dropped == {"an empty prompt": 53, "an output as long as the recording allowed": 20}


@pytest.mark.parametrize(("name", "block"), [("mooncake_conversation", 512), ("miniswe", 16)])
def test_prefix_ids_cover_the_prompt(name: str, block: int) -> None:
    for row in find("workload.trace", name, None).rows():
        assert row.hash_block == block
        assert row.prompt_length // block <= len(row.hashes) <= -(-row.prompt_length // block)


def leading_hits(read: list[Row]) -> float:
    """Share of prompt tokens whose blocks an unlimited cache has seen."""
    seen: set[int] = set()
    hit = total = 0
    for row in read:
        known = next((n for n, block in enumerate(row.hashes) if block not in seen), len(row.hashes))
        hit += min(known * row.hash_block, row.prompt_length)
        total += row.prompt_length
        seen.update(row.hashes)
    return hit / total


@pytest.mark.parametrize(
    ("name", "share"), [("mooncake_conversation", 0.374), ("mooncake_synthetic", 0.651), ("miniswe", 0.934)]
)
def test_prefix_sharing_is_what_the_study_says(name: str, share: float) -> None:
    assert leading_hits(list(find("workload.trace", name, None).rows())) == pytest.approx(share, abs=0.006)


def test_azure_2024_has_a_time_zone(tmp_path: Path) -> None:
    text = AZURE + "2024-05-10 23:59:59.500000+00:00,10,2\n2024-05-11 00:00:00.009930+00:00,11,3\n"
    assert [row.arrival for row in rows(tmp_path, text, "azure")] == [0.0, pytest.approx(0.50993)]


def test_burstgpt_is_read_by_column_name_and_drops_failures(tmp_path: Path) -> None:
    dropped: Counter[str] = Counter()
    old = rows(tmp_path, BURST + "5,ChatGPT,472,18,490,C\n45,GPT-4,1087,0,1087,C\n", "burstgpt", dropped)
    assert old == [Row(5.0, 472, 18, tenant="ChatGPT")]
    assert dropped == {"no output token": 1}
    new = BURST.replace("Model", "Session ID,Elapsed time,Model")
    assert rows(tmp_path, new + "5,s1,2.5,GPT-4,472.0,18,490,C\n", "burstgpt") == [
        Row(5.0, 472, 18, session="s1", tenant="GPT-4")
    ]


def test_qwen_chats_share_a_session(tmp_path: Path) -> None:
    base = {"timestamp": 61.5, "input_length": 40, "output_length": 2, "type": "text", "hash_ids": [1, 2, 3]}
    text = jsonl(
        base | {"chat_id": 159, "parent_chat_id": -1, "turn": 1},
        base | {"chat_id": 160, "parent_chat_id": 159, "turn": 2},
        base | {"chat_id": 161, "parent_chat_id": 160, "turn": 3},
        base | {"chat_id": 170, "parent_chat_id": 5, "turn": 2},
    )
    read = rows(tmp_path, text, "qwen")
    assert [row.session for row in read] == ["159", "159", "159", "5"]
    assert read[0] == Row(61.5, 40, 2, (1, 2, 3), 16, session="159", tenant="text")


def test_vllm_custom_counts_text_and_takes_token_ids(tmp_path: Path) -> None:
    text = jsonl({"prompt": "x" * 41, "output_tokens": 9}, {"prompt": [5, 6, 7]})
    read = rows(tmp_path, text, "vllm", output_length=128)
    assert read == [Row(None, 10, 9), Row(None, 3, 128, prompt=(5, 6, 7))]


def test_vllm_timed_trace_takes_mooncakes_units(tmp_path: Path) -> None:
    assert rows(tmp_path, MOON, "vllm", hash_block=512, time_unit=0.001) == [Row(0.5, 1000, 3, (0, 1), 512)]
    with pytest.raises(WorkloadError, match="line 1: hash_ids has 2 ids, input_length=1000 takes 63 of 16 tokens"):
        rows(tmp_path, MOON, "vllm")


def test_ids_of_contents_become_ids_of_prefixes(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    read = rows(tmp_path, jsonl(row | {"hash_ids": [1, 2]}, row | {"hash_ids": [3, 2]}), "aiperf")
    assert len({*read[0].hashes, *read[1].hashes}) == 4
    read = rows(tmp_path, jsonl(row | {"hash_ids": [1, 2]}, row | {"hash_ids": [1, 4]}), "aiperf")
    assert read[0].hashes[0] == read[1].hashes[0]


def test_aiperf_rows(tmp_path: Path) -> None:
    text = jsonl(
        {"timestamp": 105, "input_length": 655, "output_length": 52, "hash_ids": [0, 1, 2]},
        {"session_id": "a", "delay": 2000, "text_input": "x" * 40, "output_length": 4},
        {"text": "x" * 8, "timestamp": 7.5, "output_length": 4},
        {"messages": [{"role": "user", "content": "x" * 16}], "output_length": 3},
    )
    assert rows(tmp_path, text, "aiperf") == [
        Row(0.105, 655, 52, (0, 1), 512),
        Row(None, 10, 4, session="a", gap=2.0),
        Row(0.0075, 2, 4),
        Row(None, 4, 3),
    ]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bytes])
def test_compression_is_told_by_content(tmp_path: Path, pack: Any) -> None:
    (tmp_path / "trace").write_bytes(pack(MOON.encode()))
    assert len(list(TraceFile(tmp_path / "trace", "mooncake").rows())) == 1


MALFORMED = [
    (
        "azure",
        AZURE + "2023-11-16 18:15:46,374,44\nyesterday,3,4\n",
        "line 3: TIMESTAMP='yesterday' must be a UTC time",
    ),
    ("azure", AZURE + "2023-11-16 18:15:46,many,44\n", "line 2: ContextTokens='many' must be a whole number"),
    ("azure", AZURE + "2023-11-16 18:15:46,3,-4\n", "line 2: GeneratedTokens='-4' must be at least 0"),
    ("azure", AZURE + "2023-11-16 18:15:46,3\n", "line 2: GeneratedTokens is missing; the fields here are: TIMESTAMP"),
    ("azure", AZURE + "2023-11-16 18:15:46,3,4,5\n", "line 2: has more values than the header has columns"),
    ("azure", "A,B\n1,2\n", "line 2: TIMESTAMP is missing; the fields here are: A, B"),
    ("azure", AZURE, "holds no request; dropped: nothing"),
    ("azure", AZURE + "2023-11-16 18:15:46,3,0\n", "holds no request; dropped: 1 with no output token"),
    ("azure", AZURE + "NaT,3,4\n", "line 2: TIMESTAMP='NaT' must be a UTC time"),
    ("burstgpt", BURST + "nan,ChatGPT,4,1,5,C\n", "line 2: Timestamp='nan' must be a finite number"),
    ("burstgpt", BURST + "x,ChatGPT,4,1,5,C\n", "line 2: Timestamp='x' must be a number"),
    ("burstgpt", BURST + "1,ChatGPT,4.5,1,5,C\n", "line 2: Request tokens='4.5' must be a whole number"),
    ("lengths", "num_prefill_tokens,num_decode_tokens\n7,\n", "line 2: num_decode_tokens is missing"),
    ("mooncake", MOON + "{oops\n", "line 2: is not JSON: "),
    ("mooncake", MOON + "\n[1]\n", r"line 3: must be a JSON object, not \[1\]"),
    ("mooncake", MOON.replace("[7, 8]", "[7, 8.5]"), "line 1: hash_ids=.* must hold whole numbers only, not 8.5"),
    ("mooncake", MOON.replace("[7, 8]", '"7"'), "line 1: hash_ids='7' must be a list of whole numbers"),
    ("mooncake", MOON.replace("[7, 8]", "[7]*".rstrip("*")).replace("1000", "9000"), "line 1: hash_ids has 1 ids"),
    ("mooncake", MOON.replace("500", "-1"), "line 1: timestamp=-1 must be a finite number of at least 0"),
    ("mooncake", MOON.replace("1000", "true"), "line 1: input_length=True must be a whole number"),
    ("qwen", MOON, "line 1: chat_id is missing"),
    ("lmcache", MOON, "line 1: session_id is missing"),
    ("sharegpt_timed", SHARE.replace("40", "null"), "line 1: input_toks is missing"),
    ("vllm", jsonl({"prompt": "hi"}), "line 1: output_tokens is missing; add it, or set workload.output_length"),
    ("vllm", jsonl({"prompt": {"a": 1}, "output_tokens": 3}), "line 1: prompt=.* must be a text"),
    ("aiperf", jsonl({"timestamp": 3, "output_length": 3}), "line 1: input_length is missing"),
    ("aiperf", jsonl({"messages": [3], "output_length": 3}), "line 1: messages=.* must be a list of objects"),
    ("playground", SAVED.replace("3", "0"), "line 1: prompt_length=0 must be at least 1"),
    (
        "playground",
        SAVED.replace('"output_length": 2', '"output_length": 5'),
        "output_length=5 must not exceed max_tokens",
    ),
    ("playground", SAVED.replace("}", ', "prompt": [1]}'), "line 1: prompt_length=3 must equal the number of tokens"),
    ("playground", SAVED.replace("}", ', "slo": {"tfft": 1}}'), "line 1: slo=.* must be an object with some of ttft"),
    ("playground", SAVED.replace("}", ', "slo": {"ttft": "1"}}'), "line 1: slo=.* must hold numbers of seconds"),
    ("playground", SAVED.replace("}", ', "sampling": {"top_p": 2}}'), "sampling=.* is not valid: sampling.top_p=2"),
    ("playground", SAVED.replace("}", ', "sampling": {"min_p": -1}}'), "sampling=.* is not valid: sampling.min_p=-1"),
]


@pytest.mark.parametrize(("format", "text", "message"), MALFORMED)
def test_a_malformed_row_is_one_line(tmp_path: Path, format: str, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as error:
        rows(tmp_path, text, format)
    assert str(error.value).startswith(str(tmp_path / "trace"))
    assert "\n" not in str(error.value)


def test_every_format_has_a_malformed_row() -> None:
    assert {format for format, _, _ in MALFORMED} == set(FORMATS)


@pytest.mark.parametrize("content", [gzip.compress(MOON.encode() * 99)[:-9], b"\x1f\x8bnonsense", b"\xff\xfe{}"])
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(WorkloadError, match="trace: cannot be read: "):
        list(TraceFile(tmp_path / "trace", "mooncake").rows())


def test_a_missing_file_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError, match=r"workload.path=/no/such: there is no such file, nor a shipped trace: azure"
    ):
        find("workload.path", "/no/such", "azure")
    (tmp_path / "mine").write_text(MOON)
    with pytest.raises(WorkloadError, match=r"workload.format=None must be one of aiperf, azure"):
        find("workload.path", str(tmp_path / "mine"), None)


REQUESTS = [
    Request(0, 0.0, 3, 2, 2),
    Request(3, 0.1 + 0.2, 4, 8, None, prompt=(1, 2, 3, 4), hashes=(9, 1 << 40), hash_block=2, priority=-1),
    Request(
        7, 1e-9, 5, 5, 1, tenant="t", session="s", slo=Slo(ttft=0.5), sampling=Sampling(0.7, 5, 0.9, 1, True, (2,))
    ),
    Request(8, 2e-9, 5, 5, 1, sampling=Sampling(0.7, 0, 1.0, 0, False, (), 0.05, 1.1, -0.5, 0.25, 3)),
]


@pytest.mark.parametrize("suffix", saved.SUFFIXES)
def test_saved_requests_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"load{suffix}"
    saved.write(path, iter(REQUESTS))
    assert list(saved.read(path)) == REQUESTS
    content = path.read_bytes()
    saved.write(path, list(saved.read(path)))
    assert path.read_bytes() == content


def test_saved_workloads_have_known_suffixes(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"must end in one of .jsonl, .jsonl.gz, .parquet"):
        saved.write(tmp_path / "load.csv", REQUESTS)
    (tmp_path / "load.parquet").write_text("no parquet")
    with pytest.raises(WorkloadError, match=r"load.parquet: cannot be read"):
        list(saved.read(tmp_path / "load.parquet"))
