"""Layers that change their stage while a model serves: weights and KV are sent to the stage that takes them.

Weights travel, too, rather than lie ready wherever a layer may come to be: then a stage needs room for as many layers
as it ever has at once, whichever these are. The pool's part of a layer is sent as it is, all blocks of it: free ones
may hold prefixes that somebody will share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.kv import KvPool
from engine.models.decoder import Decoder
from engine.parallel.hops import hops
from engine.parallel.layout import Layout
from engine.parts import assembled, tensors
from engine.weights import LayerWeights

PIECE = 64 << 20
"""Bytes that are on their way through a buffer at a time, where tensors cannot be sent from where they are."""


class Link:
    """To one rank of another stage, both ways; what is sent comes in the same order. It holds up who calls it."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """`device`: of the model. Over Gloo, which ranks that share a GPU meet on, all goes through the host."""
        self._rank = rank
        self._device = torch.device("cpu") if dist.get_backend() == "gloo" else device

    def send(self, x: Tensor) -> None:
        """x may be overwritten when this returns, or by what follows on the stream."""
        for piece in self._pieces(x):
            dist.send(piece.to(self._device).contiguous(), self._rank)

    def receive(self, x: Tensor) -> None:
        """Fill x with what is sent, which has its shape and dtype."""
        for piece in self._pieces(x):
            if piece.device == self._device and piece.is_contiguous():
                dist.recv(piece, self._rank)
                continue
            buffer = torch.empty(piece.shape, dtype=piece.dtype, device=self._device)
            dist.recv(buffer, self._rank)
            piece.copy_(buffer)

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that is sent, where messages arrive."""
        x = torch.empty(shape, dtype=dtype, device=self._device)
        self.receive(x)
        return x

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """As both ends cut it, wherever theirs is."""
        return x.split(max(PIECE * len(x) // max(x.nbytes, 1), 1)) if len(x) else (x,)


class Mover:
    """One rank's side of all moves. All stages' ranks of one replica and number do the same, each with its partners.

    They all go through the same list of crossings, so whoever waits, waits for one that is ahead of everybody else's:
    no two can wait for one another.
    """

    def __init__(self, stage: int, layers: tuple[int, ...], spare: int, links: Mapping[int, Link]) -> None:
        """`layers`: how many each stage has at first; `links`: to the stages beside this one."""
        self.layers = layers
        self.spare = spare
        self._stage = stage
        self._room = [count + spare for count in layers]
        self._links = links

    @torch.inference_mode()
    def move(self, layers: tuple[int, ...], model: Decoder, pool: KvPool, *others: Tensor) -> bool:
        """See `engine.models.decoder.Mover`. What cannot be is an `EngineError`, on all ranks."""
        mine = [hop for hop in hops(self.layers, layers, self._room) if self._stage in hop]
        for hop in mine:
            if hop.source == self._stage:
                link, first = self._links[hop.target], not hop.onward
                layer, window = model.give(first)
                send_layer(link, layer, window)
                place = pool.give(first)
                for kv in (pool.data, *others):
                    link.send(kv[place])
            else:
                link, first = self._links[hop.source], hop.onward
                model.take(*receive_layer(link, model.device), first)
                place = pool.take(first)
                for kv in (pool.data, *others):
                    link.receive(kv[place])
        self.layers = layers
        return bool(mine)


def mover(layout: Layout, rank: int, layers: int, device: torch.device) -> Mover | None:
    """Of a rank that has joined; None where layers stay where they are. `layers`: the model's."""
    if not layout.spare_layers:
        return None
    place = layout.place(rank)
    beside = [stage for stage in (place.stage - 1, place.stage + 1) if 0 <= stage < layout.stages]
    links = {stage: Link(layout.rank(place._replace(stage=stage)), device) for stage in beside}
    return Mover(place.stage, layout.cut(layers), layout.spare_layers, links)


# --- weights


def send_layer(link: Link, layer: LayerWeights, window: int | None) -> None:
    """What it is made of, first; layers of one model differ: some have experts."""
    parts = dict(tensors(layer))
    sizes = {name: [str(part.dtype).removeprefix("torch."), *part.shape] for name, part in parts.items()}
    told = torch.tensor(list(json.dumps({"window": window, "sizes": sizes}).encode()), dtype=torch.uint8)
    link.send(torch.tensor([len(told)]))
    link.send(told)
    for part in parts.values():
        link.send(part)


def receive_layer(link: Link, device: torch.device) -> tuple[LayerWeights, int | None]:
    """What `send_layer` was given, on this device."""
    length = link.made((1,), torch.int64)
    told = json.loads(bytes(link.made((int(length),), torch.uint8).tolist()))
    parts = {
        name: link.made(shape, getattr(torch, dtype)).to(device) for name, (dtype, *shape) in told["sizes"].items()
    }
    return assembled(parts), told["window"]
