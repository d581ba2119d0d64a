"""Penalties, min-p and logprobs on both backends: tokens are those of plain torch and transformers' own processors."""

import random

import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.cuda.state import SlotState
from engine.errors import StepFailed
from engine.kv import KvPool
from engine.runner import Pools, Runner
from engine.sequence import Sequence, token_counts
from engine.tiny import tiny
from kernels import reference
from kernels.batch import SamplingRows
from kernels.reference import COUNT_MASK, IN_PROMPT
from playground.core import Request, Sampling, Spec
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host
from tests.engine.driver import Driver

SIZE, BLOCKS, TOKENS = 4, 160, 20
PROMPT = (109, 252, 277, 261, 22, 295, 109)
"""Chosen with the penalties so that each of them changes what this model says."""

OPTIONS = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.9},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.2},
    "reward": {"presence_penalty": -2.0},
    "both ways": {"presence_penalty": 0.4, "frequency_penalty": -0.3},
    "all penalties": {
        "repetition_penalty": 1.15, "presence_penalty": 0.4, "frequency_penalty": 0.5, "logprobs": 2,
    },
    "no alternatives": {"logprobs": 0},
    "drawn": {"temperature": 1.5, "seed": 3, "top_k": 50, "logprobs": 20},
    "min_p": {"temperature": 2.0, "min_p": 0.3, "seed": 4},
    "min_p and top_k": {"temperature": 3.0, "min_p": 0.05, "top_k": 9, "seed": 1 << 65},
    "drawn with penalties": {
        "temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "seed": 5, "logprobs": 5,
    },
}  # fmt: skip


def how(name):
    return Sampling(ignore_eos=True, **OPTIONS[name])


# --- what is right


def mix(word):
    z = (word + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def penalised(logits, tokens, output, sampling):
    """Hugging Face's penalty, then OpenAI's two, one token after another."""
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(torch.tensor([tokens]), logits[None])[
        0
    ]
    for token in set(output):
        logits[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return logits


def drawn(logits, sampling, position):
    """At the running sum of what transformers' warpers leave."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    sums = scores[0].double().softmax(-1).cumsum(-1)
    number = (mix((mix(sampling.seed % 2**64) + position) % 2**64) >> 11) * 2.0**-53
    return int((sums <= number * sums[-1]).sum())


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def right(theirs):
    """name, prompt -> tokens, and of each its log share and those of all tokens."""
    known = {}

    @torch.inference_mode()
    def answer(name, prompt=PROMPT):
        if (name, prompt) in known:
            return known[name, prompt]
        sampling, tokens, shares = how(name), list(prompt), []
        for _ in range(TOKENS):
            raw = theirs(torch.tensor([tokens])).logits[0, -1].float()
            changed = penalised(raw.clone(), tokens, tokens[len(prompt) :], sampling)
            greedy = sampling.temperature == 0
            token = int(changed.argmax()) if greedy else drawn(changed, sampling, len(tokens))
            shares.append(raw.log_softmax(-1))
            tokens.append(token)
        known[name, prompt] = tokens[len(prompt) :], shares
        return known[name, prompt]

    return answer


# --- what is tested


@pytest.fixture(scope="module")
def twin():
    return load_on_host(tiny("llama"))


def on_cpu(model):
    pools = Pools(*(KvPool(model.shape, blocks, SIZE, model.dtype) for blocks in (BLOCKS, 64)))
    return Driver(Runner(model, {0: pools}), shuffled(), SIZE, range(64))


def on_gpu(twin, **options):
    backend = CudaBackend(
        twin, timeline=HostTimeline(), **dict(blocks=BLOCKS, block_size=SIZE, host_blocks=64, max_seqs=8,
                                              max_tokens=64, max_length=64) | options,
    )  # fmt: skip
    backend.now()
    backend._pool.data.fill_(float("nan"))
    return BackendDriver(backend, shuffled(), range(64))


def shuffled():
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    return order


@pytest.fixture(params=["cpu", "graphs", "eager"])
def driver(request, llama, twin):
    if request.param == "cpu":
        yield on_cpu(llama)
        return
    driver = on_gpu(twin, graphs=request.param == "graphs")
    yield driver
    driver.backend.close()


@pytest.fixture
def device(twin):
    driver = on_gpu(twin)
    yield driver
    driver.backend.close()


def add(driver, name, id=0, prompt=PROMPT):
    driver.add(id, prompt, TOKENS, how(name))


def check(driver, right, name, id=0, prompt=PROMPT):
    """Tokens and logprobs are right."""
    tokens, shares = right(name, prompt)
    live, top = driver.live[id], how(name).logprobs
    assert live.output == tokens, name
    assert len(live.logprobs) == (0 if top is None else TOKENS)
    for told, token, share in zip(live.logprobs, tokens, shares, strict=False):
        assert told.value == pytest.approx(float(share[token]), abs=1e-4)
        assert [value for _, value in told.top] == pytest.approx(share.topk(top).values.tolist(), abs=1e-4)
        assert [value for _, value in told.top] == pytest.approx([float(share[id]) for id, _ in told.top], abs=1e-4)
        assert len({id for id, _ in told.top}) == top


def test_the_options_matter(right):
    """Else the tests below would say nothing."""
    names = [name for name in OPTIONS if name != "no alternatives"]
    answers = {tuple(right(name)[0]): name for name in names}
    assert [*answers.values()] == names
    assert right("no alternatives")[0] == right("plain")[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_alone(driver, right, name):
    add(driver, name)
    driver.decode(0)
    check(driver, right, name)


def test_together(driver, right):
    """Each row gets what it asks for, and no more."""
    names = list(OPTIONS)[-8:]
    for id, name in enumerate(names):
        add(driver, name, id)
    driver.run(*(driver.slice(id) for id in range(3)))
    driver.decode(*range(len(names)))
    for id, name in enumerate(names):
        check(driver, right, name, id)


PENALISED = ("frequency", "all penalties", "drawn with penalties")


def disturbed(driver):
    """In chunks, one of which samples nothing, preempted, swapped, and beside others."""
    for id, name in enumerate(PENALISED):
        add(driver, name, id)
    driver.run(driver.slice(0, 2), driver.slice(1, 3))
    driver.run(*(driver.slice(id) for id in range(3)))
    for round in range(5):
        driver.run(*(driver.slice(id) for id in range(3)))
        driver.preempt(round % 3)
    driver.run(*(driver.slice(id) for id in range(3)))
    driver.run(driver.slice(0), driver.swap_out(1))
    driver.run(driver.slice(0), driver.swap_in(1))
    driver.run(driver.slice(1), driver.slice(2))


def test_disturbed(driver, right):
    disturbed(driver)
    driver.decode(*range(3))
    for id, name in enumerate(PENALISED):
        check(driver, right, name, id)


@pytest.mark.parametrize("name", PENALISED)
def test_shared_prefix(driver, right, name):
    """What the prefix cache spares the model is counted nevertheless."""
    add(driver, "plain")
    driver.run(driver.slice(0))
    add(driver, name, 1)
    driver.run(driver.share(1, 0, SIZE))
    driver.decode(1)
    check(driver, right, name, 1)


@pytest.mark.parametrize("name", PENALISED)
def test_a_position_that_is_sampled_again(driver, right, name):
    """Its first token is not counted beside the second."""
    add(driver, name)
    for _ in range(5):
        driver.run(driver.slice(0))
    driver.preempt(0)
    del driver.live[0].output[-2:], driver.live[0].logprobs[-2:]
    driver.decode(0)
    check(driver, right, name)


def test_lost_slots(twin, right):
    """A sequence that gave its slot to another gets counts of its own again, whatever the other left there."""
    driver = on_gpu(twin, max_seqs=1)
    ids = range(len(PENALISED))
    for id, name in enumerate(PENALISED):
        add(driver, name, id)
    for _ in range(4):
        for id in ids:
            driver.run(driver.slice(id))
            driver.preempt(id)
    for id, name in enumerate(PENALISED):
        driver.decode(id)
        check(driver, right, name, id)
    driver.backend.close()


def test_slots_of_those_who_ended(device, right):
    for id, name in enumerate(["all penalties", "plain", "min_p", "frequency"] * 6):
        add(device, name, id)
        device.decode(id)
        check(device, right, name, id)
        device.backend._residents.end((id,))
        device.free += device.live[id].blocks


def test_run_ahead(device, right):
    """All is launched before any token has come back: what penalties count is what the device itself sampled."""
    backend, names = device.backend, ("plain", *PENALISED)
    ids = range(len(names))
    for id, name in enumerate(names):
        add(device, name, id)
    backend._timeline.hold = True
    steps = [device.step(*(device.slice(id) for id in ids))]
    for _ in range(TOKENS - 1):
        for id in ids:
            device.live[id].output.append(-1)  # promised
        steps.append(device.step(*(device.slice(id) for id in ids)))
    for step in steps:
        backend.launch(step)
    for id in ids:
        device.live[id].output.clear()
    backend._timeline.let_go()
    for _ in steps:
        device.take_back(backend.wait())
    for id, name in enumerate(names):
        check(device, right, name, id)


def test_tokens_after_the_end_have_no_logprobs(device):
    device.add(0, PROMPT, 8, Sampling(logprobs=1), output_length=2)
    backend = device.backend
    backend._timeline.hold = True
    for _ in range(4):
        backend.launch(device.step(device.slice(0)))
        device.live[0].output.append(-1)
    backend._timeline.let_go()
    assert [(len(done.tokens), len(done.logprobs)) for done in (backend.wait() for _ in range(4))] == [
        (1, 1), (1, 1), (0, 0), (0, 0),
    ]  # fmt: skip


# --- what it costs


def test_nothing_is_made_for_those_who_do_not_ask(device):
    backend = device.backend
    captured, held = backend._timeline.captured, backend.memory.state
    for id, name in enumerate(("plain", "drawn")):
        device.add(id, PROMPT, 3, Sampling(temperature=OPTIONS[name].get("temperature", 0.0), ignore_eos=True))
        device.decode(id)
    assert backend._timeline.captured == captured + 2  # a prefill and a decode that draw
    assert backend._state.counts is backend._graphs._found is None
    assert backend.memory.state == held


def test_rare_options_share_one_graph_a_shape(device, monkeypatch):
    """However they are combined."""
    timeline, forward, passes = device.backend._timeline, device.backend._forward, []
    add(device, "all penalties")
    device.decode(0)
    captured, body = timeline.captured, forward.body
    monkeypatch.setattr(forward, "body", lambda *arguments: passes.append(1) or body(*arguments))
    for id, name in enumerate(("frequency", "min_p", "no alternatives", "drawn with penalties"), 1):
        add(device, name, id)
        device.decode(id)
    assert timeline.captured == captured
    assert len(passes) == 4 * TOKENS  # picking outside of the graph does not mean computing outside of it
    assert not device.backend._state.counts[-1].any()  # padding is counted for nobody
    assert device.backend._state.counts.shape == (2 * 8 + 1, 512)


def test_counts_that_do_not_fit(device, monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError

    add(device, "presence")
    monkeypatch.setattr(torch, "zeros", full)
    device.launch(device.step(device.slice(0)))
    with pytest.raises(StepFailed, match=r"penalties need 0.00 GB to count 512 tokens in 17 slots, .* lower gpu_mem"):
        device.backend.wait()


def test_counts():
    request = Request(0, 0.0, 3, 20000, prompt=(5, 1, 5))
    sequence = Sequence(request, 6)
    sequence.tokens[3:] = 2
    sequence.tokens[4] = 5
    assert token_counts(sequence, 3, 6).tolist() == [0, IN_PROMPT, 0, 0, 0, IN_PROMPT]
    assert token_counts(sequence, 7, 6).tolist() == [0, IN_PROMPT, 3, 0, 0, IN_PROMPT + 1]
    assert token_counts(sequence, 20003, 6)[2] == COUNT_MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_in_numbers(dtype):
    """Tokens: unseen, in the prompt only, sampled once, sampled three times and in the prompt; of both signs."""
    counts = torch.tensor([[0, IN_PROMPT, 1, IN_PROMPT + 3] * 2, [7] * 8], dtype=torch.int16)
    logits = torch.tensor([[4.0] * 4 + [-4.0] * 4] * 2, dtype=dtype)
    ones = torch.ones(2)
    rows = SamplingRows(
        0 * ones, torch.zeros(2).long(), torch.zeros(2).long(), counts=counts, slots=torch.tensor([0, -1]),
        repetition=2 * ones, presence=0.5 * ones, frequency=0.25 * ones,
    )  # fmt: skip
    expected = [4.0, 2.0, 1.25, 0.75, -4.0, -8.0, -8.75, -9.25]
    assert reference.penalise(logits, rows).tolist() == [expected, logits[1].tolist()]


def test_a_slot_forgets_the_options_of_the_one_before():
    state = SlotState(Spec(blocks=9, max_length=64), 4, torch.device("cpu"))
    for sampling in (how("all penalties"), how("plain")):
        places, words = state.sampling_words(2, sampling)
        state.write(torch.from_numpy(places), torch.from_numpy(words))
    floats = {name.partition("_penalty")[0]: float(part[2]) for name, part in state._floats.items()}
    off = {"temperature": 0, "top_p": 1, "min_p": 0, "repetition": 1, "presence": 0, "frequency": 0}
    assert floats == off
