"""What computing beside exchanges wins and loses, on one rank and on two that share every layer.

    python -m experiments.benchmarks.overlap [--out FILE.json] [--device cpu|cuda] [--rounds 7] [--commit SHA]

On a CPU two ranks exchange over Gloo; on GPUs over what the engine takes for them. With fewer than two GPUs the one
rank is measured alone: it is the negative control, for it exchanges nothing that could be hidden.

Method. Random weights of a shipped model's shape with fewer layers and a small vocabulary. A round is one prefill of 8
prompts, then decode steps of these 8 sequences; times are those from a step's begin to its end on the workers, of a
round's decode steps the median. All ways of a place take turns within a round; a ratio is the median over rounds of a
way's time by that of no overlap in the same round. `exposed`: what the time is longer than that of one rank which has
half of every layer and exchanges nothing, as a share of it, likewise. Below 0: that rank had less of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from engine.overlap import NONE, Overlap
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.launch import free_port, spawned
from engine.parallel.layout import Layout
from experiments import provenance
from experiments.benchmarks.ranks import shapes
from playground.backend import Backend
from playground.core import Request, Slice, Step

SEQUENCES = 8
DECODES = 8
"""Steps after each prefill."""
BLOCK = 16


class Sizes(NamedTuple):
    """What is measured on a device."""

    model: str
    layers: int
    prompt: int
    dtype: str


SIZES = {"cpu": Sizes("qwen3-0.6b", 2, 64, "float32"), "cuda": Sizes("qwen3-32b", 8, 1024, "bfloat16")}
VOCABULARY = 4096

APART = "apart"
"""One rank that computes what each of two does."""

WAYS = {
    "one rank": (Layout(), ("none", "two_batch")),
    "two ranks": (Layout(tp=2), ("none", "two_batch", "row_chunks")),
}


class Times(NamedTuple):
    """Seconds of one round."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over rounds, in milliseconds; `ratio`: by no overlap."""

    place: str
    work: str
    overlap: str
    ms: float
    ratio: float
    ratios: tuple[float, ...]
    """Of every round, sorted."""
    exposed: float | None = None


def played(backend: Backend, number: int, prompt: int) -> Times:
    """One round with sequences of its own, in the pool's first blocks."""
    ids, each = range(number * SEQUENCES, (number + 1) * SEQUENCES), -(-(prompt + DECODES + 1) // BLOCK)
    steps = number * (DECODES + 1)
    requests = tuple([Request(id, 0.0, prompt, DECODES + 1, DECODES + 1) for id in ids])
    blocks = [tuple(range(place * each, (place + 1) * each)) for place in range(SEQUENCES)]
    first = tuple([Slice(id, 0, 0, 0, prompt, True, own) for id, own in zip(ids, blocks, strict=True)])
    prefill = _timed(backend, Step(steps, 0, 0.0, first, starts=requests))
    spans = []
    for turn in range(DECODES):
        parts = tuple([Slice(id, 0, 0, prompt + turn, 1, True, ()) for id in ids])
        ends = tuple(ids) if turn == DECODES - 1 else ()
        spans.append(_timed(backend, Step(steps + turn + 1, 0, 0.0, parts, ends=ends)))
    return Times(prefill, statistics.median(spans))


def _timed(backend: Backend, step: Step) -> float:
    backend.launch(step)
    done = backend.wait()
    assert done is not None
    return done.finished - done.started


def measured(paths: Mapping[str, str], device: str, rounds: int, places: list[str]) -> list[Row]:
    """Every way of every place. `paths`: of the model's config, whole and `half`."""
    rows = []
    for place in places:
        layout, kinds = WAYS[place]
        ways = {kind: (paths["whole"], layout, Overlap(kind)) for kind in kinds}
        if layout.ranks > 1:
            ways[APART] = (paths["half"], Layout(), NONE)
        found = _rounds(ways, device, rounds)
        rows += [_row(place, work, kind, found) for work in Times._fields for kind in kinds]
    return rows


def _row(place: str, work: str, kind: str, found: Mapping[str, list[Times]]) -> Row:
    index = Times._fields.index(work)
    spans, none = ([times[index] for times in found[way]] for way in (kind, "none"))
    ratios = sorted(span / other for span, other in zip(spans, none, strict=True))
    apart = [times[index] for times in found.get(APART, ())]
    exposed = statistics.median(1 - alone / span for span, alone in zip(spans, apart, strict=True)) if apart else None
    return Row(place, work, kind, statistics.median(spans) * 1e3, statistics.median(ratios), tuple(ratios), exposed)


def _rounds(ways: Mapping[str, tuple[str, Layout, Overlap]], device: str, rounds: int) -> dict[str, list[Times]]:
    """Of workers that are all there at once and take turns; the first round is left out."""
    sizes = SIZES[device]
    with ExitStack() as stack:
        crews = {name: stack.enter_context(closing(_crew(*way, device))) for name, way in ways.items()}
        found: dict[str, list[Times]] = {name: [] for name in crews}
        for number in range(rounds + 1):
            for name, backend in crews.items():
                found[name].append(played(backend, number, sizes.prompt))
    return {name: times[1:] for name, times in found.items()}


def _crew(path: str, layout: Layout, overlap: Overlap, device: str) -> ParallelBackend:
    sizes = SIZES[device]
    blocks = SEQUENCES * -(-(sizes.prompt + DECODES + 1) // BLOCK)
    config = WorkerConfig(
        path=path,
        layout=layout,
        rendezvous=f"tcp://127.0.0.1:{free_port('127.0.0.1')}",
        weights="random",
        dtype=sizes.dtype,
        device=device,
        sizes={"blocks": blocks, "block_size": BLOCK, "max_seqs": SEQUENCES, "max_tokens": SEQUENCES * sizes.prompt},
        overlap=overlap,
    )
    return ParallelBackend(config, spawned(layout.ranks))


def table(rows: list[Row]) -> str:
    """A line a way."""
    lines = [f"{'':10} {'':8} {'overlap':11} {'ms':>9} {'by none':>8} {'exposed':>8}"]
    for row in rows:
        exposed = "" if row.exposed is None else f"{row.exposed:8.0%}"
        lines.append(f"{row.place:10} {row.work:8} {row.overlap:11} {row.ms:9.2f} {row.ratio:8.2f} {exposed}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write what was found as JSON")
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="", help="of this tree, where it lies without its history")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    places, name = list(WAYS), "cpu"
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: no CUDA device is visible; take --device cpu")
        places, name = places[: torch.cuda.device_count()], torch.cuda.get_device_name()
    sizes = SIZES[options.device]
    whole = shapes.config(sizes.model, tiny=False) | {"num_hidden_layers": sizes.layers, "vocab_size": VOCABULARY}
    with tempfile.TemporaryDirectory() as folder:
        halved = shapes.share(whole, 2)
        paths = {part: shapes.write(Path(folder), part, one) for part, one in (("whole", whole), ("half", halved))}
        rows = measured(paths, options.device, options.rounds, places)
    print(table(rows))
    if options.out:
        found = {"device": name, "commit": options.commit, "method": __doc__, "sizes": sizes._asdict()}
        provenance.write(options.out, provenance.facts() | found | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
