import pytest

from engine.errors import EngineError
from engine.prompts import prompt_tokens
from playground.core import Request


def prompt(id=0, length=100, hashes=(), hash_block=16, **more):
    return prompt_tokens(Request(id, 0.0, length, 1, hashes=hashes, hash_block=hash_block, **more), 512).tolist()


def test_own_tokens_are_kept():
    assert prompt(length=3, prompt=(5, 511, 0)) == [5, 511, 0]


@pytest.mark.parametrize("token", [-1, 512])
def test_tokens_outside_the_vocabulary(token):
    with pytest.raises(EngineError, match="request 7: prompt has a token outside the vocabulary of 512"):
        prompt(id=7, length=2, prompt=(1, token))


def test_made_up_prompts_are_the_same_each_time_and_differ_by_id():
    assert prompt(3) == prompt(3) != prompt(4)
    assert len(prompt(3)) == 100 and set(map(type, prompt(3))) == {int}
    assert min(prompt(3, 5000)) >= 0 and max(prompt(3, 5000)) == 511


def test_a_longer_prompt_begins_alike():
    assert prompt(3, 150)[:100] == prompt(3, 100)


def test_equal_hashes_give_equal_prefixes():
    first = prompt(1, 90, hashes=(11, 22, 33, 44, 55, 66))
    second = prompt(2, 70, hashes=(11, 22, 99))
    assert first[:32] == second[:32]
    assert all(a != b for a, b in [(first[32:48], second[32:48]), (first[48:64], second[48:64])])


def test_a_partial_last_block_is_shared_too():
    assert prompt(1, 20, hashes=(11, 22)) == prompt(2, 31, hashes=(11, 22))[:20]


def test_own_blocks_do_not_meet_hash_ids():
    assert prompt(5, 16) != prompt(6, 16, hashes=(5,))


def test_hash_ids_may_be_any_integers():
    assert len(prompt(1, 40, hashes=(-3, 1 << 63, 1 << 80))) == 40
