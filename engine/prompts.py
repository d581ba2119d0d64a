"""Prompts for requests of which a trace knows lengths only: made up, the same each time, equal where it says so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.randomness import mix, words
from playground.core import Request

Tokens = NDArray[np.int64]


def prompt_tokens(request: Request, vocabulary: int) -> Tokens:
    """The request's prompt, [prompt_length]: its own tokens, or pseudo-random ones.

    Made-up tokens follow the request's hash ids block by block, so that prompts with equal leading ids begin with
    equal tokens, and its own id beyond them.
    """
    if request.prompt is None:
        return _made_up(request, vocabulary)
    tokens = np.array(request.prompt, dtype=np.int64)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise EngineError(
            f"request {request.id}: prompt has a token outside the vocabulary of {vocabulary}; re-tokenize"
        )
    return tokens


def _made_up(request: Request, vocabulary: int) -> Tokens:
    # Own blocks get streams from the request's id, marked so that they never meet a hash id's.
    size = request.hash_block
    own = range(len(request.hashes), -(-request.prompt_length // size))
    streams = np.concatenate((mix(words(request.hashes)), mix(~mix(words([request.id] * len(own))) + words(own))))
    counters = np.arange(size, dtype=np.uint64)
    mixed = mix(streams[:, None] + counters)
    return (mixed.reshape(-1)[: request.prompt_length] % np.uint64(vocabulary)).astype(np.int64)
