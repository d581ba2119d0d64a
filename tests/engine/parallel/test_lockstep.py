"""What each replica is told of a step that all take part in."""

from hypothesis import given
from hypothesis import strategies as st

from engine.overlap import Overlap
from engine.parallel.lockstep import pooled, share
from playground.core import COPY_OUT, Copy, Request, Slice, Step

PARTS = (
    Slice(1, 0, 0, 0, 5, True, (7,)),
    Slice(2, 0, 2, 3, 1, True, (), lane="decode"),
    Slice(3, 0, 2, 0, 4, False, (1,)),
    Slice(4, 0, 0, 9, 2, True, ()),
)
COPY = Copy(5, 1, 1, (1,), (2,), COPY_OUT)


def test_everybody_hears_how_much_others_compute_and_only_its_own_slices():
    starts = (Request(1, 0.0, 5, 2), Request(3, 0.0, 9, 2), Request(5, 0.0, 9, 2))
    step = Step(8, 0, 1.0, PARTS, (COPY,), starts, ends=(6,), dummies=(1,))
    assert pooled(step, 3) == {"main": ((7, 0, 4),), "decode": ((0, 0, 1),), COPY_OUT: ()}
    first, second, third = (share(step, rank) for rank in range(3))
    assert first.slices == (PARTS[0], PARTS[3]) and first.starts == starts[:1] and first.copies == ()
    assert second.slices == () and second.copies == (COPY,) and second.starts == starts[2:]
    assert third.slices == (PARTS[1], PARTS[2]) and third.starts == starts[1:2]
    assert {first.ends, second.ends, third.ends} == {(6,)}


def test_of_halves_everybody_hears_how_others_cut_theirs():
    """Where a rank has enough, all halve; a lane of one token is computed at once."""
    step = Step(8, 0, 1.0, PARTS, (COPY,))
    assert pooled(step, 3, Overlap("two_batch", rows=5)) == {
        "main": ((3, 0, 2), (4, 0, 2)),
        "decode": ((0, 0, 1),),
        COPY_OUT: (),
    }
    assert pooled(step, 3, Overlap("two_batch", rows=8))["main"] == ((7, 0, 4),)


def test_rows_beside_prompts_are_padded_where_a_device_pads_them():
    parts = [Slice(id, 0, id // 4, 5, 1, True, ()) for id in range(7)]
    step = Step(8, 0, 1.0, (*parts, Slice(9, 0, 1, 0, 5, True, ())))
    assert pooled(step, 2, multiple=8)["main"] == ((4, 13),)
    assert pooled(step, 2)["main"] == ((4, 8),)
    assert pooled(step, 2, Overlap("two_batch"), multiple=4)["main"] == ((2, 4), (2, 4))  # a prompt's last token is one


slices = st.builds(
    Slice, st.integers(0, 9), st.just(0), st.integers(0, 3), st.just(0), st.integers(1, 9), st.booleans(), st.just(())
)


@given(st.lists(slices, max_size=8, unique_by=lambda part: part.sequence))
def test_nothing_is_lost_or_told_twice(parts):
    step = Step(0, 0, 0.0, tuple(parts), starts=tuple([Request(part.sequence, 0.0, 9, 1) for part in parts]))
    shares = [share(step, rank) for rank in range(4)]
    assert sorted(part for one in shares for part in one.slices) == sorted(parts)
    assert sorted(new.id for one in shares for new in one.starts) == sorted(part.sequence for part in parts)
    for lane, (tokens,) in pooled(step, 4).items():
        assert tokens == tuple(sum(part.length for part in one.slices if part.lane == lane) for one in shares)
