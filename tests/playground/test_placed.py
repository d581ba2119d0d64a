"""What a draft has placed, field by field."""

from playground.core import MAIN, Columns, Request, Slice, Step
from playground.placed import Placed
from playground.sequence import Sequence


def sequence(id: int, epoch: int = 0) -> Sequence:
    made = Sequence(Request(id, 0.0, 8, 4), rank=1)
    made.epoch = epoch
    return made


def test_decodes_bring_their_blocks_wherever_they_stand():
    placed = Placed()
    placed.add(sequence(7), 0, 5, False, (1, 2), "prefill")
    placed.add_decodes([sequence(8), sequence(9, epoch=2)], [3, 4], {1: (5,)}, MAIN)
    chunk = Slice(7, 0, 1, 0, 5, False, (1, 2), "prefill")
    decodes = Slice(8, 0, 1, 3, 1, True, (), MAIN), Slice(9, 2, 1, 4, 1, True, (5,), MAIN)
    assert placed.columns(rank=1).slices == (chunk, *decodes)
    assert placed.columns(rank=1) == Columns.of((chunk, *decodes))


def test_withdrawing_a_sequence_takes_all_its_slices_and_no_others():
    placed = Placed()
    placed.add(sequence(7), 0, 5, False, (1, 2), MAIN)
    placed.add(sequence(8), 0, 4, True, (3,), MAIN)
    placed.add(sequence(7), 5, 3, True, (), MAIN)
    assert placed.withdraw(7) == (8, 1)
    assert placed.columns(rank=0).slices == (Slice(8, 0, 0, 0, 4, True, (3,), MAIN),)


def test_a_step_is_the_same_of_slices_and_of_columns():
    slices = (Slice(0, 0, 0, 4, 1, True, (), "a"), Slice(1, 0, 0, 0, 3, False, (6,), "b"))
    step = Step(3, 0, 1.5, Columns.of(slices), repeat=4)
    assert step == Step(3, 0, 1.5, slices, repeat=4) and step.slices == slices
    other = step.with_blocks(((9,), ()))
    assert [part.blocks for part in other.slices] == [(9,), ()] and other.columns.start == (4, 0)
    assert (other.id, other.planned, other.lanes, other.repeat) == (3, 1.5, ("a", "b"), 4)
    assert step.slices == slices, "the step that it was made of stays as it is"
