"""A GPU, or a host, that is too small: one line that says what to change, and nothing half-made kept alive."""

import weakref

import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.cuda.graphs import Graphs
from engine.cuda.timeline import CudaTimeline
from engine.cuda.warmup import measured
from engine.errors import EngineError, StepFailed
from engine.load import load_model, random_model
from engine.models.decoder import Decoder
from engine.tiny import tiny
from engine.weights import Checkpoint
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host
from tests.engine.test_load import change_tensors, folder, refused  # noqa: F401 - a fixture

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


def fail(*_, **__):
    raise OUT_OF_MEMORY


def must_not_be_called(*_, **__):
    pytest.fail("it could be known that this is in vain")


@pytest.fixture
def gpu(monkeypatch):
    """A device of 10 GB, 9 of them free, as far as torch is asked about it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (9 * 10**9, 10**10))


@pytest.fixture(scope="module")
def model():
    return load_on_host(tiny("llama"))


def backend(model, **options):
    options = dict(blocks=40, block_size=4, max_seqs=4, max_tokens=64, max_length=64) | options
    return CudaBackend(model, timeline=HostTimeline(), **options)


def told(call, *parts, error=EngineError):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# --- weights


def test_weights_that_can_never_fit_are_not_even_drawn(gpu, monkeypatch):
    monkeypatch.setattr("engine.load.random_weights", must_not_be_called)
    told(
        lambda: random_model("qwen3-8b", device="cuda"),
        "16.4 GB of weights in torch.bfloat16 do not fit the memory of cuda, 9.0 GB; take a smaller model",
    )


def test_nor_on_the_host(monkeypatch):
    monkeypatch.setattr("engine.load.random_weights", must_not_be_called)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4096}[name])
    told(lambda: random_model("qwen3-8b"), "do not fit the memory of cpu, 4.1 GB")


@pytest.mark.parametrize(
    "error", [OUT_OF_MEMORY, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), MemoryError()]
)
def test_weights_that_do_not_fit_after_all(gpu, monkeypatch, error):
    def draw(*_, **__):
        raise error

    monkeypatch.setattr("engine.load.random_weights", draw)
    told(lambda: random_model("qwen3-0.6b", device="cuda"), "1.2 GB of weights", "do not fit the memory of cuda")


def test_other_errors_stay_what_they_are(monkeypatch):
    monkeypatch.setattr("engine.load.random_weights", lambda *_, **__: [][1])
    with pytest.raises(IndexError):
        random_model("tiny")


def test_a_number_that_no_device_has(gpu):
    told(lambda: random_model("tiny", device="cuda:2"), "device=cuda:2: there are 2 CUDA devices, numbered from 0")


@pytest.mark.parametrize(
    ("capability", "said"), [((9, 0), "triton: head size 512, at most 256"), ((7, 5), "compute capability 7.5")]
)
def test_what_no_kernel_takes_is_told_before_anything_is_read(gpu, folder, monkeypatch, capability, said):  # noqa: F811
    from tests.engine.test_load import edit

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
    monkeypatch.setattr("engine.load.read_weights", must_not_be_called)
    edit(folder / "config.json", head_dim=512)
    refused(
        folder,
        "kernels.attention: no implementation on a GPU takes",
        said,
        call=lambda at: load_model(at, device="cuda"),
    )


# --- the backend


def test_kv_pool(model, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr("torch.zeros", lambda size, **like: fail() if isinstance(size, tuple) else zeros(size, **like))
    told(lambda: backend(model, blocks=1000), "kv.blocks=1000: no memory for a KV pool of 0.0 GB", "fewer blocks")


def test_state_of_slots(model, monkeypatch):
    monkeypatch.setattr("engine.cuda.backend.SlotState", fail)
    told(lambda: backend(model), "limits.max_seqs=4: no GPU memory for the state of so many sequences; lower it")


def test_staging_of_swaps(model, monkeypatch):
    monkeypatch.setattr("engine.cuda.backend.Swap", fail)
    told(lambda: backend(model, host_blocks=5), "kv.host_blocks=5: no GPU memory left for swapping; lower kv.blocks")


def test_activations(gpu, monkeypatch):
    for name in ("memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: 0)
    monkeypatch.setattr("engine.cuda.warmup.run_idle", fail)
    told(
        lambda: measured(None, None, 8192, 4096, 4, torch.device("cuda")),
        "limits.max_tokens=8192: a step of so many tokens does not fit the 9.0 of 10.0 GB", "lower it",
    )  # fmt: skip


def test_first_steps(model, monkeypatch):
    monkeypatch.setattr("engine.cuda.backend.run_idle", fail)
    told(backend(model).now, "no GPU memory left for a step; lower kv.blocks, backend.gpu_memory_utilization")


def test_graphs(model, monkeypatch):
    monkeypatch.setattr(Graphs, "capture_all", fail)
    told(backend(model).now, "no GPU memory left for graphs; lower kv.blocks", "or backend.cuda_graphs=false")


def test_a_capture_that_fails_is_ended_and_its_first_error_told(model, monkeypatch):
    """CUDA then says that the capture was invalidated, which hides why."""

    class Broken:
        def capture_begin(self, pool, capture_error_mode):
            pass

        def capture_end(self):
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    class Once:
        calls = 0

        def __call__(self):
            self.calls += 1
            if self.calls > 1:
                fail()

    timeline = HostTimeline()
    timeline._pool, timeline._replays = None, {"another graph"}
    monkeypatch.setattr("torch.cuda.CUDAGraph", Broken)
    monkeypatch.setattr(Graphs, "capture_all", lambda *_: CudaTimeline.capture(timeline, Once()))
    told(backend(model).now, "no GPU memory left for graphs")


def test_a_step(model, monkeypatch):
    made = backend(model, graphs=False)
    driver = BackendDriver(made, range(40))
    made.now()
    monkeypatch.setattr(made, "_forward", fail)
    driver.add(0, (5, 6, 7), 4)
    told(lambda: driver.run(driver.slice(0)), "step 0 failed: no GPU memory left; lower kv.blocks", error=StepFailed)


# --- what is left behind


def test_a_failed_load_leaves_no_tensor(folder, monkeypatch):  # noqa: F811
    """Though somebody keeps the error, as an interactive session does."""
    change_tensors(folder, **{"lm_head.weight": None})
    alive, take = [], Checkpoint.take

    def watched(*arguments):
        tensor = take(*arguments)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Checkpoint, "take", watched)
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing") as kept:
        load_model(folder)
    assert kept.value is not None and len(alive) > 20
    assert not [tensor for tensor in alive if tensor() is not None]


def test_a_backend_that_fails_leaves_no_model(monkeypatch):
    from experiments.llm import LLM

    alive, initialise = [], Decoder.__init__

    def watched(self, *arguments):
        alive.append(weakref.ref(self))
        initialise(self, *arguments)

    monkeypatch.setattr(Decoder, "__init__", watched)
    with pytest.raises(EngineError, match=r"kv\.blocks=99999999999") as kept:
        LLM("tiny", kv_blocks=99999999999)
    assert kept.value is not None and len(alive) == 1
    assert alive[0]() is None
