"""Offline scheduling in rounds: who is to be served, and what there is room for.

A round is one step. A request that is served alone takes its prompt in its first round, which samples its first token,
and samples one more in each round after that. In round k (0, 1, ...) of its service it holds KV of prompt + k tokens.
Source of the setting: MC-SF, arXiv 2502.07115 (2025); blocks, seats and tokens a step are this simulator's accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
METRICS = ("latency", "ttft", "makespan")


@dataclass(frozen=True, slots=True)
class Job:
    """A request: the round at whose beginning it is there, its prompt's tokens, and how many tokens it samples."""

    id: int
    arrival: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Room:
    """What a round has: KV blocks of `block_size` tokens, seats for sequences, tokens of a step."""

    blocks: int
    block_size: int
    seats: int
    tokens: int


def held(job: Job, room: Room) -> Array:
    """KV blocks in each round of its service."""
    return -(-(job.prompt + np.arange(job.output)) // room.block_size)


def computed(job: Job) -> Array:
    """Tokens of the step in each round of its service: the prompt, then one at a time."""
    tokens = np.ones(job.output, dtype=np.int64)
    tokens[0] = job.prompt
    return tokens


def misfit(job: Job, room: Room) -> str:
    """Why nobody could serve it with its prompt in one round; nothing if somebody could."""
    if (need := int(held(job, room)[-1])) > room.blocks:
        return f"request {job.id} needs {need} of {room.blocks} KV blocks"
    if job.prompt > room.tokens:
        return f"request {job.id} has a prompt of {job.prompt} tokens, a step has {room.tokens}"
    return ""


def value(metric: str, jobs: Sequence[Job], starts: Sequence[int]) -> float:
    """Of a schedule without pauses, in rounds: mean latency, mean time to first token, or makespan."""
    pairs = list(zip(jobs, starts, strict=True))
    if metric == "makespan":
        return float(max(start + job.output for job, start in pairs) - min(job.arrival for job in jobs))
    if metric == "ttft":
        return float(np.mean([start + 1 - job.arrival for job, start in pairs]))
    return float(np.mean([start + job.output - job.arrival for job, start in pairs]))
