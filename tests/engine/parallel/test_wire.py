"""What goes over the wire comes out as it went in, and is small."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.wire import (
    Kind,
    Pong,
    Token,
    WireError,
    decode_pong,
    decode_report,
    decode_step,
    encode_pong,
    encode_report,
    encode_step,
    kind,
    plain,
    value,
)
from playground.core import (
    COPY_IN,
    COPY_OUT,
    MAIN,
    Copy,
    Done,
    LayerMove,
    Logprob,
    Request,
    Sampling,
    Slice,
    Slo,
    Step,
)

ids = st.integers(0, 1 << 40)
small = st.integers(0, (1 << 31) - 1)
blocks = st.lists(small, max_size=5).map(tuple)
lanes = st.sampled_from([MAIN, "prefill", "über"])
slices = st.builds(Slice, ids, small, st.just(0), small, small, st.booleans(), blocks, lanes, small)
copies = st.builds(Copy, ids, small, st.just(0), blocks, blocks, st.sampled_from([COPY_IN, COPY_OUT]))
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 3),
    top_k=small,
    seed=st.integers(-(1 << 63), 1 << 64),
    stop_token_ids=blocks,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)


@st.composite
def requests(draw):
    prompt = draw(st.none() | st.lists(small, min_size=1, max_size=9).map(tuple))
    hashes = draw(st.lists(st.integers(-(1 << 70), 1 << 70), max_size=3)) if prompt is None else []
    length = draw(st.integers(1, 99)) if prompt is None else len(prompt)
    return Request(
        draw(ids), 0.0, length, 9, draw(st.none() | st.integers(1, 9)), prompt, tuple(hashes), sampling=draw(samplings)
    )


steps = st.builds(
    Step,
    ids,
    st.just(0),
    st.floats(0, 1e9),
    st.lists(slices, max_size=6).map(tuple),
    st.lists(copies, max_size=3).map(tuple),
    st.lists(requests(), max_size=3).map(tuple),
    st.lists(ids, max_size=3).map(tuple),
    move=st.none() | st.builds(LayerMove, blocks, small),
)


counts = st.lists(small, max_size=4).map(tuple)
crowds = st.dictionaries(st.sampled_from(["main", "decode", COPY_OUT]), st.lists(counts, max_size=2).map(tuple))


@given(steps, st.lists(st.builds(Token, ids, small, small), max_size=4), crowds)
def test_steps(step, known, crowd):
    came, told, others = decode_step(encode_step(step, known, crowd))
    assert (came, told, others) == (step, known, crowd)
    assert list(others) == list(crowd)
    assert came.slices == step.slices
    assert came.lanes == step.lanes


def test_ranks_and_what_devices_need_not_know_are_left_out():
    request = Request(1, 5.0, 2, 3, prompt=(4, 5), hashes=(9,), tenant="a", priority=3, slo=Slo(ttft=1.0))
    part = Slice(1, 0, 3, 0, 2, True, (7,))
    copy = Copy(2, 1, 3, (1,), (2,), COPY_OUT)
    came, _, _ = decode_step(encode_step(Step(8, 3, 1.0, (part,), (copy,), (request,))))
    assert came == Step(8, 0, 1.0, (part._replace(rank=0),), (copy._replace(rank=0),), came.starts)
    assert came.starts == (Request(1, 0.0, 2, 3, prompt=(4, 5)),)


numbers = st.floats(allow_nan=False)
logprobs = st.builds(Logprob, numbers, st.lists(st.tuples(small, numbers), max_size=3).map(tuple))


@given(
    st.dictionaries(ids, blocks, max_size=4),
    st.lists(ids, max_size=3).map(tuple),
    st.dictionaries(ids, st.lists(logprobs, max_size=3).map(tuple), max_size=3),
    lanes,
)
def test_reports(tokens, ended, logprobs, lane):
    done = Done(1 << 40, lane, 0.25, 0.5, 0.75, tokens, ended, 0.125, logprobs=logprobs)
    came = decode_report(encode_report(done, 1000.0))
    assert came == Done(
        1 << 40, lane, 1000.5, 1000.5, 1000.75, tokens, ended, 0.125, logprobs=logprobs
    )  # `launched` the driver knows
    assert list(came.tokens) == list(tokens)


def test_a_decode_takes_few_bytes():
    """Nothing of a sequence is said twice: 31 bytes for one that goes on, and 12 for a token that comes back."""
    parts = tuple(Slice(id, 0, 0, 1000, 1, True, (), MAIN) for id in range(100))
    assert len(encode_step(Step(1, 0, 0.0, parts))) < 31 * 100 + 200
    done = Done(1, MAIN, 0.0, 0.0, 0.0, dict.fromkeys(range(100), (5,)))
    assert len(encode_report(done, 0.0)) < 16 * 100 + 100


def test_words_said_once():
    assert value(plain(Kind.READY, {"a": [1, None, 0.5]})) == {"a": [1, None, 0.5]}
    assert kind(plain(Kind.STOP)) is Kind.STOP
    assert decode_pong(encode_pong(Pong(1.5, -1, 7))) == Pong(1.5, -1, 7)


def test_other_versions_are_an_error_in_words():
    with pytest.raises(WireError, match="no such kind; run one version"):
        kind(b"Zzz")
    message = encode_step(Step(1, 0, 0.0, (Slice(1, 0, 0, 0, 2, True, (7,)),)))
    with pytest.raises(WireError, match="shorter than it says"):
        decode_step(message[:-3])


def test_infinite_logprobs_pass():
    done = Done(1, MAIN, 0.0, 0.0, 0.0, {1: (2,)}, logprobs={1: (Logprob(-inf, ((3, -inf),)),)})
    assert decode_report(encode_report(done, 0.0)).logprobs == done.logprobs
