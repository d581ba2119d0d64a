"""Cost models pad steps to the sizes that the engine captures: both are asked, and must say the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.graphs import Graphs
from engine.cuda.residents import Batch, Rows
from playground.graphs import CHUNKS, PREFILL_SIZES, Bucket, bucket, decode_sizes, mixed_sizes


def graphs(most):
    """What `Graphs.shape` looks at; nothing is captured."""
    made = object.__new__(Graphs)
    made._decodes, made._mixed, made._tokens = decode_sizes(most), mixed_sizes(most), PREFILL_SIZES
    return made


def batch(decodes, chunks):
    lengths = [1] * decodes + list(chunks)
    return Batch.of(Rows.of([]), [0] * len(lengths), lengths, [True] * len(lengths))


def both(decodes, chunks, most):
    found = graphs(most).shape(batch(decodes, chunks))
    engine = None if found is None else Bucket(found.decodes, found.tokens)
    return engine, bucket(decodes, sum(chunks), len(chunks), most)


@given(st.integers(0, 300), st.lists(st.integers(2, 400), max_size=CHUNKS + 2), st.sampled_from([1, 4, 60, 256, 300]))
def test_the_cost_model_pads_as_the_engine_does(decodes, chunks, most):
    if decodes or chunks:
        engine, model = both(decodes, chunks, most)
        assert engine == model


@pytest.mark.parametrize(
    ("decodes", "chunks", "padded"),
    [
        (1, [], Bucket(1)),
        (9, [], Bucket(16)),
        (257, [], None),
        (0, [79], Bucket(8, 80)),
        (0, [80], Bucket(8, 144)),  # one token more than there are, for a chunk whose successor nobody wants
        (33, [300, 227], Bucket(64, 528)),
        (33, [300, 228], None),
        (5, [2] * CHUNKS, Bucket(8, 80)),
        (5, [2] * (CHUNKS + 1), None),
        (256, [10], Bucket(256, 80)),
    ],
)
def test_by_hand(decodes, chunks, padded):
    assert both(decodes, chunks, 256) == (padded, padded)


def test_decodes_beside_chunks_are_read_eight_at_a_time():
    assert mixed_sizes(60) == (8, 32, 64)
    assert both(60, [10], 60) == (Bucket(64, 80),) * 2
