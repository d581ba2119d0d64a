"""Layers that change their stage while a simulation runs: what moves, how long it takes, and the room it needs.

Weights lie ready on every stage that may take a layer; its KV is sent while both stages go on with what they have, and
the layer changes hands when that has arrived (DynaPipe, NeurIPS'25). Who moves and when is a policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from playground.core import LayerMove
from playground.sim.capacity import Layout
from playground.sim.cluster import Cluster
from playground.sim.device import Device


def crossing(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """How many layers cross from each stage to the next, or back: stages hold consecutive ones."""
    return [abs(old - new) for old, new in zip(accumulate(before), accumulate(after), strict=True)][:-1]


def seconds(move: LayerMove, before: Sequence[int], cluster: Cluster, group: int, layer_block_bytes: float) -> float:
    """Until all KV has arrived: every boundary's layers at once, each over its own link."""
    size = move.blocks * layer_block_bytes
    crossed = enumerate(crossing(before, move.layers))
    return max((cluster.send(group, stage, count * size).time for stage, count in crossed if count), default=0.0)


def blocks_beside_spares(layout: Layout, spare: int, device: Device, block_size: int, room: float) -> int:
    """KV blocks that fit if every stage has weights and KV of `spare` layers more than it holds; `room` in bytes."""
    most = []
    for stage in range(layout.stages):
        heaviest = max(layout.layer_bytes(layer) for layer in range(layout.model.layers))
        weights = layout.weight_bytes(stage) + spare * heaviest
        token = layout.kv_bytes_per_token(stage) + spare * layout.kv_bytes_per_token_layer
        most.append(int((room - weights) // (block_size * token)))
    if min(most) < 1:
        raise ValueError(
            f"parallel.spare_layers={spare} leaves device={device.name} no room for KV: lower it, or raise "
            "parallel.tp or parallel.stages"
        )
    return min(most)
