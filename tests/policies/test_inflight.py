"""TensorRT-LLM: decodes, then whole prompts; prompts may wait for more of them."""

import pytest

from policies.admission import MaxLength
from policies.composed import Composed
from policies.inflight import InFlight
from tests.policies.scene import Machine


def machine(spec=None, **options):
    return Machine(Composed(InFlight(**options), admission=MaxLength()), **(spec or {}))


def test_prompts_enter_whole_beside_decodes():
    engine = machine(tokens=100)
    engine.arrive(prompt=60, output=4, count=3)
    assert engine.turn() == {0: 60}
    assert engine.turn() == {0: 1, 1: 60}  # 39 tokens are left: the third is not cut
    assert engine.turn() == {0: 1, 1: 1, 2: 60}


def test_prompts_wait_for_a_full_step_but_not_for_ever():
    engine = machine(tokens=100, wait_steps=2, wait_share=0.9)
    engine.arrive(prompt=40, output=9)
    assert engine.turn() == {0: 40}  # nobody decodes: nothing to wait with
    engine.arrive(prompt=40, output=9)
    assert engine.turn() == {0: 1}
    assert engine.turn() == {0: 1}
    assert engine.turn() == {0: 1, 1: 40}  # after two steps
    engine.arrive(prompt=40, output=9)
    assert engine.turn() == {0: 1, 1: 1}
    engine.arrive(prompt=48, output=9)
    assert engine.turn() == {0: 1, 1: 1, 2: 40, 3: 48}  # 90 tokens: nine tenths of a step


def test_every_prompt_may_wait_anew():
    engine = machine(tokens=100, wait_steps=1, wait_share=0.9)
    engine.arrive(prompt=40, output=9)
    engine.turn()
    for number in (1, 2):
        engine.arrive(prompt=20, output=9)
        assert len(engine.turn()) == number
        assert len(engine.turn()) == number + 1


def test_what_has_no_seat_is_not_held_back():
    """Or the count would depend on how many steps of a quiet stretch were skipped."""
    engine = machine(spec={"max_seqs": 2}, tokens=100, wait_steps=2, wait_share=0.9)
    engine.arrive(prompt=20, output=5)
    engine.arrive(prompt=20, output=20)
    engine.turn()
    engine.arrive(prompt=20, output=9)
    turns = [engine.turn() for _ in range(7)]
    assert [len(turn) for turn in turns] == [2, 2, 2, 2, 1, 1, 2]


@pytest.mark.parametrize("option", [{"tokens": 0}, {"wait_steps": -1}, {"wait_share": 1.5}])
def test_refuses(option):
    (name, value), *_ = option.items()
    with pytest.raises(ValueError, match=rf"policy\.budget\.{name}={value} must"):
        InFlight(**option)
