"""Exchanges by peer loads against plain sums, in the interpreter: one process plays all ranks, half a round each."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.triton import peers, ring
from tests.kernels.paged import interpreted

pytestmark = interpreted()

CAPACITY, PROGRAMS = 1 << 17, 3
PUBLISH, COLLECT, BOTH = peers.PUBLISH.value, peers.COLLECT.value, peers.BOTH
SIZES = [1, 3]
SHAPES = [(1, 8), (5, 100), (1, 2048), (3, 5001)]
"""Of one tile and less, of many; as float32 the last goes round the grid's three programs more than once."""


class Team:
    """All ranks' windows on this process's memory, which is dirty where nobody may rely on it."""

    def __init__(self, size: int) -> None:
        self.memory = [
            torch.zeros(peers.window_bytes(CAPACITY, size, PROGRAMS), dtype=torch.uint8) for _ in range(size)
        ]
        for memory in self.memory:
            memory[: peers.SLOTS.value * CAPACITY] = 255  # NaN in every format
        addresses = torch.tensor([memory.data_ptr() for memory in self.memory])
        self.windows = [
            peers.Window(rank, size, addresses, torch.zeros(2, dtype=torch.int64), CAPACITY, PROGRAMS)
            for rank in range(size)
        ]

    def round(self, call, *each):
        """`call(window, *arguments, phase)` of every rank; `each`: the ranks' arguments, a list for each argument."""
        for phase in (PUBLISH, COLLECT):
            found = [call(window, *own, phase=phase) for window, *own in zip(self.windows, *each, strict=True)]
        return found

    def rounds(self):
        return [window.state.tolist() for window in self.windows]


def parts(size, shape, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for _ in range(size)]


def in_order(tensors):
    total = torch.zeros(tensors[0].shape)
    for tensor in tensors:
        total += tensor.float()
    return total


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_in_the_order_of_ranks(size):
    team = Team(size)
    for turn, shape in enumerate([*SHAPES, SHAPES[0]]):
        dtype = torch.float16 if turn % 2 else torch.float32
        partials, x = parts(size, shape, dtype), torch.randn(shape).to(dtype)
        totals = [x.clone() for _ in range(size)]
        team.round(peers.add_sum, partials, totals)
        wanted = (in_order(partials) + x.float()).to(dtype)
        assert all(torch.equal(total, wanted) for total in totals)
        assert team.rounds() == [[turn + 1, 0]] * size


def test_sums_in_bf16_are_the_same_everywhere():
    team, partials, x = Team(3), parts(3, (4, 700), torch.bfloat16), torch.randn(4, 700).bfloat16()
    totals = [x.clone() for _ in range(3)]
    team.round(peers.add_sum, partials, totals)
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])
    wanted = in_order(partials) + x.float()  # the interpreter cuts off where a device rounds
    assert ((totals[0].float() - wanted).abs() <= wanted.abs() / 128).all()


@pytest.mark.parametrize("size", SIZES)
def test_sums_with_a_norm(size):
    team = Team(size)
    for turn, shape in enumerate([(1, 8), (5, 100), (7, 2048)]):
        partials, x, weight = parts(size, shape), torch.randn(shape), torch.randn(shape[1])
        totals = [x.clone() for _ in range(size)]
        normed = team.round(peers.add_sum_norm, partials, totals, [weight] * size, [1e-5] * size)
        wanted = in_order(partials) + x
        assert all(torch.equal(total, wanted) for total in totals)
        assert all(torch.equal(one, normed[0]) for one in normed)
        assert torch.allclose(normed[0], reference.rms_norm(wanted, weight, 1e-5), atol=1e-5)
        assert team.rounds() == [[turn + 1, 0]] * size


@pytest.mark.parametrize("size", SIZES)
def test_gathers(size):
    team = Team(size)
    for dtype, shape in zip((torch.bfloat16, torch.int64, torch.float32), SHAPES[1:], strict=True):
        given = [(one * 100).to(dtype) for one in parts(size, shape)]
        assert all(torch.equal(one, torch.cat(given, 1)) for one in team.round(peers.gather, given))
        assert all(torch.equal(one, torch.cat(given, 0)) for one in team.round(peers.gather_rows, given))


@pytest.mark.parametrize("size", SIZES)
def test_scattered_sums(size):
    team = Team(size)
    for n, width in [(1, 8), (5, 100), (2, 5001)]:
        given = parts(size, (size * n, width))
        found = team.round(peers.scatter_sum, given)
        assert torch.equal(torch.cat(found), in_order(given))


def test_kinds_of_rounds_share_slots():
    """Grids of one program and of three by turns: a round must not find another's flags or slot."""
    team = Team(2)
    for turn in range(3):
        small, large = parts(2, (1, 4)), parts(2, (3, 4000))
        totals = [torch.zeros(3, 4000) for _ in range(2)]
        team.round(peers.add_sum, large, totals)
        gathered = team.round(peers.gather, small)
        assert torch.equal(totals[1], in_order(large)) and torch.equal(gathered[0], torch.cat(small, 1))
        assert team.rounds() == [[2 * turn + 2, 0]] * 2


def test_a_rank_that_is_ahead_leaves_what_others_still_read():
    """Rank 0 publishes for the next round before rank 1 has read anything of this one."""
    team, (first, second) = Team(2), [parts(2, (2, 3000)) for _ in range(2)]
    found = [[torch.zeros(2, 3000) for _ in range(2)] for _ in range(2)]
    ahead, behind = team.windows
    for window, partial, x in zip(team.windows, first, found[0], strict=True):
        peers.add_sum(window, partial, x, PUBLISH)
    peers.add_sum(ahead, first[0], found[0][0], COLLECT)
    peers.add_sum(ahead, second[0], found[1][0], PUBLISH)
    peers.add_sum(behind, first[1], found[0][1], COLLECT)
    peers.add_sum(behind, second[1], found[1][1], BOTH)
    peers.add_sum(ahead, second[0], found[1][0], COLLECT)
    for given, totals in zip((first, second), found, strict=True):
        assert all(torch.equal(total, in_order(given)) for total in totals)


def test_nobody_exchanges_nothing():
    team, none = Team(2), torch.zeros(0, 16)
    team.round(peers.add_sum, [none] * 2, [none.clone()] * 2)
    assert team.round(peers.add_sum_norm, [none] * 2, [none.clone()] * 2, [torch.ones(16)] * 2, [0.1] * 2)[0].shape == (
        0, 16,
    )  # fmt: skip
    assert team.round(peers.gather, [none] * 2)[0].shape == (0, 32)
    assert team.round(peers.gather_rows, [none] * 2)[0].shape == (0, 16)
    assert team.round(peers.scatter_sum, [none] * 2)[0].shape == (0, 16)
    assert team.rounds() == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: peers.add_sum(w, torch.zeros(2, 3), torch.zeros(3, 2)), "one shape and dtype"),
        (lambda w: peers.add_sum(w, torch.zeros(2, 3), torch.zeros(2, 3).half()), "one shape and dtype"),
        (lambda w: peers.add_sum(w, torch.zeros(2, 3).T, torch.zeros(3, 2)), "must be contiguous"),
        (lambda w: peers.add_sum(w, *torch.zeros(2, 1, 40000)), "add_sum: 160000 bytes do not fit a slot of 131072"),
        (lambda w: peers.add_sum_norm(w, torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), 1.0), "weight [2]"),
        (lambda w: peers.gather(w, torch.zeros(3)), "must be [rows, width]"),
        (lambda w: peers.scatter_sum(w, torch.zeros(3, 4)), "n rows for each of 2 ranks"),
        (lambda w: peers.scatter_sum(w, torch.zeros(20, 2000)), "160000 bytes do not fit"),
    ],
)  # fmt: skip
def test_what_is_refused(call, says):
    with pytest.raises(ValueError) as caught:
        call(Team(2).windows[0])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def ends(slots):
    """The putter's end and the taker's."""
    counter = torch.zeros(1, dtype=torch.int64)
    memory = torch.zeros(ring.ring_bytes(CAPACITY, slots, PROGRAMS), dtype=torch.uint8)
    memory[: slots * CAPACITY] = 255
    places = torch.tensor([counter.data_ptr()]), torch.tensor([memory.data_ptr()])
    states = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    return [ring.Ring(*places, state, CAPACITY, slots, PROGRAMS) for state in states], counter, memory


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_ring_keeps_order_and_is_filled_to_the_brim(slots):
    (putter, taker), counter, _memory = ends(slots)
    messages = [torch.randn(SHAPES[turn % len(SHAPES)]) for turn in range(4 * slots)]
    sent = 0
    for taken in range(len(messages)):
        while sent < min(taken + slots, len(messages)):
            ring.put(putter, messages[sent])
            sent += 1
        assert torch.equal(ring.take(taker, torch.empty_like(messages[taken])), messages[taken])
        assert counter.item() == taken + 1
    assert putter.state.tolist() == taker.state.tolist() == [len(messages), 0]


def test_a_ring_carries_any_dtype_and_nothing():
    (putter, taker), _counter, _memory = ends(2)
    for message in (torch.arange(7), torch.randn(3, 50).bfloat16(), torch.zeros(0, 9)):
        ring.put(putter, message)
        assert torch.equal(ring.take(taker, torch.empty_like(message)), message)
    assert putter.state.tolist() == [2, 0]
    with pytest.raises(ValueError, match="160000 bytes do not fit a slot of 131072"):
        ring.put(putter, torch.zeros(40000))
