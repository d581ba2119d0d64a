"""Exchanges behind kernels within one step, in closed form: two batches in turns, and row chunks.

Arithmetic on seconds and on counts of tokens; whose kernels and whose exchanges they are it does not know. What the
policy of a step puts into lanes is `contention`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from math import hypot
from typing import NamedTuple

from playground.halves import cut
from playground.model import ModelShape
from playground.sim.cost import Shape
from playground.sim.device import Device


class Half(NamedTuple):
    """Seconds of half a batch in one layer: its kernels, then its exchanges."""

    kernels: float
    exchange: float


def in_turns(first: Half, second: Half, layers: int) -> float:
    """Seconds of so many layers in which each half exchanges while the other computes.

    The first begins alone; then kernels of the second run beside exchanges of the first, and the reverse; the second's
    last exchange ends alone. Equal halves of k and c: 2 L max(k, c) + min(k, c). (SGLang's two-batch overlap,
    RapidLLM's L2; DeepSeek-V3's inference takes two micro-batches likewise.)
    """
    there, back = max(second.kernels, first.exchange), max(first.kernels, second.exchange)
    return first.kernels + layers * there + (layers - 1) * back + second.exchange


def in_chunks(product: float, reduce: float, chunks: int) -> float:
    """Seconds of a product whose rows are computed in chunks, each summed over devices while the next is computed.

    `product`, `reduce`: of one chunk. All but the last chunk's sum hide behind products as far as these are longer:
    exposed are reduce + (chunks - 1) max(0, reduce - product). (RapidLLM's L3.)
    """
    return chunks * product + reduce + (chunks - 1) * max(0.0, reduce - product)


def split(shape: Shape, threshold: float) -> tuple[Shape, Shape]:
    """The two batches of a step, cut as `halves.cut` says. A side may be empty."""
    lengths = [length for _, length in shape.chunks]
    all_rows = shape.tokens - sum(lengths)
    place = cut(lengths, all_rows, threshold)
    first, second = shape.chunks[: place.prompts], shape.chunks[place.prompts :]
    if place.inside:
        (start, length), *others = second
        first = (*first, (start, place.inside))
        second = ((start + place.inside, length - place.inside), *others)
    share = place.rows / all_rows if all_rows else 0.0
    decodes, context = round(shape.decodes * share), round(shape.decode_context * share)
    sampled = min(shape.sampled, decodes + min(max(shape.sampled - shape.decodes, 0), place.prompts))
    later = (all_rows - place.rows, shape.decodes - decodes, shape.decode_context - context, shape.sampled - sampled)
    return _side(shape, first, place.rows, decodes, context, sampled), _side(shape, second, *later)


def _side(
    shape: Shape, chunks: tuple[tuple[int, int], ...], rows: int, decodes: int, context: int, sampled: int
) -> Shape:
    return Shape(
        sum([length for _, length in chunks]) + rows,
        len(chunks) + decodes,
        sampled,
        decodes,
        context,
        shape.decode_longest if decodes else 0,
        sum([length * start + length * (length + 1) // 2 for start, length in chunks]),
        sum([start + length for start, length in chunks]),
        chunks,
    )


Seconds = Callable[[int], float]
"""Of matrices for so many tokens, as the roofline takes them."""


def shared_experts(model: ModelShape, device: Device, tp: int) -> Seconds | None:
    """Of the shared experts of one layer; None without them."""
    if model.experts is None or not model.experts.shared:
        return None
    return _matrices(model, device, 3 * model.hidden * model.experts.shared / tp)


def row_products(model: ModelShape, device: Device, tp: int) -> tuple[Seconds, Seconds]:
    """Of what comes before each sum of a dense layer: the attention's output, and the MLP's last product."""
    width = model.latent.value if model.latent else model.head_dim
    return (
        _matrices(model, device, model.heads * width * model.hidden / tp),
        _matrices(model, device, model.intermediate * model.hidden / tp),
    )


def _matrices(model: ModelShape, device: Device, weights: float) -> Seconds:
    memory = weights * model.dtype_bytes / device.bandwidth

    def seconds(tokens: int) -> float:
        return hypot(2 * weights * tokens / device.gemm_flops, memory)

    return seconds
