"""The specification: every operation in plain torch, as short as it can be said.

Shapes: T tokens of a flat batch, H query heads, K key-value heads, D elements of a head, S slices or rows, V
vocabulary, E experts. One layer's KV pool is [blocks, block_size, 2, K, D]: index 0 of the third axis is the key, 1 the
value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import PagedBatch, SamplingRows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; `weight` broadcasts against x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of x [T, heads, D], in place; element i is paired with element i + D/2.

    `cos` and `sin` are [T, 1, D]; the first half of `sin` is negated, see `rope_table`.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).add_(swapped.mul_(sin))


def rope_table(frequencies: Tensor, length: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of cos and signed sin for positions 0 .. length, each [length, 1, D]; `frequencies` is [D/2] in radians."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rope_halves(frequencies: Tensor, length: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of cos and sin for positions 0 .. length, each [length, R/2], as `place_qkv` wants them."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def place_qkv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    heads: int,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Queries, keys and values of a projection made ready: qkv [T, (H + 2K) * D] -> queries [T, H, D].

    Queries and keys are normed by `norm` [H + K, D] if given, and rotated: element i < R/2 with element i + R/2, by
    row `positions[i]` of `cos` and `sin` [positions, R/2]; elements from R on pass. Keys and values are stored in the
    pool at each token's slot (block * block_size + offset); a slot below 0 is padding and nothing is stored. May
    overwrite qkv.
    """
    kv_heads, head_dim = pool.shape[3], pool.shape[4]
    wide = qkv.float().unflatten(1, (heads + 2 * kv_heads, head_dim))
    turned, values = wide.split((heads + kv_heads, kv_heads), 1)
    if norm is not None:
        turned = rms_norm(turned, norm.float(), eps)
    half = cos.shape[1]
    left, right, rest = turned.split((half, half, head_dim - 2 * half), -1)
    turns, tilts = (table[positions].float()[:, None] for table in (cos, sin))
    turned = torch.cat((left * turns - right * tilts, right * turns + left * tilts, rest), -1)
    stored = torch.cat((turned[:, heads:], values), 1).unflatten(1, (2, kv_heads)).to(pool.dtype)
    kept = (slots >= 0).nonzero()[:, 0]
    places = slots[kept]
    pool[places // pool.shape[1], places % pool.shape[1]] = stored[kept]
    return turned[:, :heads].to(qkv.dtype)


def place_latent(
    q: Tensor, latents: Tensor, positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, norm: Tensor,
    eps: float,
) -> None:  # fmt: skip
    """Queries and compressed keys of latent attention made ready (DeepSeek-V2, arXiv 2405.04434, 2.1).

    q [T, H, D]: the last R elements of each head are rotated in place, by row `positions[i]` of `cos` and `sin`
    [positions, R/2]: element i with element i + R/2. latents [T, C + R]: the first C elements are normed by `norm` [C],
    the last R rotated, and both stored in the pool [blocks, block_size, C + R] at each token's slot; a slot below 0 is
    padding and nothing is stored.
    """
    half, rank = cos.shape[1], len(norm)
    turns, tilts = (table[positions].float() for table in (cos, sin))

    def turned(x: Tensor, turns: Tensor, tilts: Tensor) -> Tensor:
        left, right = x.float().split(half, -1)
        return torch.cat((left * turns - right * tilts, right * turns + left * tilts), -1)

    rotating = q[..., -2 * half :]
    rotating.copy_(turned(rotating, turns[:, None], tilts[:, None]))
    normed = rms_norm(latents[:, :rank].float(), norm.float(), eps)
    stored = torch.cat((normed, turned(latents[:, rank:], turns, tilts)), 1).to(pool.dtype)
    kept = (slots >= 0).nonzero()[:, 0]
    places = slots[kept]
    pool[places // pool.shape[1], places % pool.shape[1]] = stored[kept]


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, W] by tokens [T] -> [T, W]; an id that is no row gives zeros."""
    known = (tokens >= 0) & (tokens < len(table))
    return F.embedding(tokens * known, table) * known[:, None]


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x [T, 2 * width], which holds gate and up side by side."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def write_kv(kv: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Store kv [T, 2 * K * D] (keys, then values) of each token at its slot: block * block_size + offset."""
    blocks, block_size = pool.shape[:2]
    pool.view(blocks * block_size, -1).index_copy_(0, slots, kv)


class Linear:
    """A projection x [T, in] -> [T, out] by weight [out, in] and bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def route(logits: Tensor, active: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The `active` likeliest experts of each token by logits [T, E]: shares in float32 and ids in int32, [T, active].

    Shares are of all experts together, or, to `normalise`, of those that were picked. Equals rank by id.
    """
    shares, ids = logits.float().softmax(-1).sort(descending=True, stable=True)
    shares, ids = shares[:, :active], ids[:, :active].int()
    return (shares / shares.sum(-1, keepdim=True) if normalise else shares), ids


class Experts:
    """Gated MLPs of which each token goes through some: gate_up [E, 2 * width, in], down [E, out, width].

    `held` [experts of the model] int32 says where each expert is in these two, -1: not on this rank, whose sum then
    lacks it; None: all are here, in order.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, held: Tensor | None = None) -> None:
        self._gate_up = gate_up
        self._down = down
        self._held = held_in_order(gate_up) if held is None else held

    def __call__(self, x: Tensor, shares: Tensor, picks: Tensor, residual: Tensor) -> Tensor:
        """residual [T, out] + the sum of the picked experts of x [T, in] by share, which overwrites the residual.

        `shares` [T, active] float32 and `picks` [T, active] int32, as `route` has them.
        """
        places = self._held[picks.long()]
        total = torch.zeros(residual.shape, dtype=torch.float32, device=x.device)
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            tokens, picked = (places == expert).nonzero(as_tuple=True)
            out = F.linear(silu_mul(F.linear(x[tokens], gate_up)), down)
            total.index_add_(0, tokens, out.float() * shares[tokens, picked, None])
        return residual.add_(total)


def held_in_order(weights: Tensor) -> Tensor:
    """Where each expert is, if all are here."""
    return torch.arange(len(weights), dtype=torch.int32, device=weights.device)


class Attention:
    """Causal attention of a batch over its pages, slice by slice in float32."""

    def __init__(self, batch: PagedBatch) -> None:
        self._batch = batch

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [T, H, D] -> [T, H * D]. The batch's own keys and values are in the pool already.

        With a `window`, a query sees that many tokens at most, itself included.
        """
        queries = q.split(list(self._batch.lengths))
        parts = [self._slice(part, index, pool, scale, window) for index, part in enumerate(queries)]
        return torch.cat(parts).flatten(1).to(q.dtype)

    def _slice(self, q: Tensor, index: int, pool: Tensor, scale: float, window: int | None) -> Tensor:
        start, length = self._batch.starts[index], self._batch.lengths[index]
        positions = torch.arange(start + length, device=q.device)
        size = self._batch.block_size
        kv = pool[self._batch.tables[index][positions // size], positions % size].float()  # [context, 2, K, D]
        group = q.shape[1] // kv.shape[2]
        keys, values = (kv[:, part].repeat_interleave(group, 1) for part in (0, 1))  # [context, H, D]
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        hidden = positions > positions[start:, None]
        if window is not None:
            hidden |= positions <= positions[start:, None] - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


class MlaAttention:
    """Causal latent attention of a batch over its compressed pages, with the expansion absorbed into the queries."""

    def __init__(self, batch: PagedBatch) -> None:
        self._batch = batch

    def __call__(self, q: Tensor, pool: Tensor, rank: int, scale: float) -> Tensor:
        """q [T, H, C + R], pool [blocks, block_size, C + R] -> [T, H, C], where C is `rank`.

        All heads see the same keys, the pool's rows, whose first C elements are the values. The batch's own are in the
        pool already.
        """
        one_head = pool[:, :, None, None].expand(-1, -1, 2, -1, -1)
        attended: Tensor = Attention(self._batch)(q, one_head, scale)
        return attended.unflatten(1, q.shape[1:])[..., :rank]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """One token for each row of logits [S, V], by the inverse of its distribution at `uniform` [S] in [0, 1).

    First the temperature [S] (above 0), then the tokens of at least the share `min_p` [S] of the likeliest, of these
    the top_k [S] likeliest (V keeps all), then the fewest of these that together have at least the share top_p [S].
    Equal probabilities rank by id. The distribution is inverted in order of id. Returns ids [S].
    """
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature[:, None]
    shares, ids = scaled.softmax(-1).sort(descending=True, stable=True)
    ranks = torch.arange(shares.shape[1], device=logits.device)
    dropped = ranks >= top_k[:, None]
    if min_p is not None:
        dropped |= scaled.gather(1, ids) < min_p[:, None].double().log()
    shares = shares.masked_fill(dropped, 0.0)
    shares = shares / shares.sum(-1, keepdim=True)
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill((before >= top_p[:, None]) & (ranks > 0), 0.0)
    return _invert(torch.empty_like(shares).scatter_(1, ids, shares), uniform)[:, 0]


def _invert(shares: Tensor, uniform: Tensor) -> Tensor:
    """The first place [S, 1] at which the running sum of shares [S, V] exceeds `uniform` of its total."""
    sums = shares.cumsum(-1)
    places = torch.searchsorted(sums, uniform[:, None].double() * sums[:, -1:], right=True)
    positions = torch.arange(shares.shape[1], device=shares.device)
    last = torch.where(shares > 0, positions, 0).amax(-1, keepdim=True)  # a product may round up to the total
    return torch.minimum(places, last)


def pick(logits: Tensor, rows: SamplingRows | None = None) -> Tensor:
    """Ids [S] of rows of logits [S, V]: the likeliest token (the first of equals), or one drawn as `rows` say."""
    if rows is None:
        return logits.argmax(-1)
    if rows.counts is not None:
        logits = penalise(logits, rows)
    vocabulary = logits.shape[1]
    full = torch.full_like(rows.temperature, vocabulary, dtype=torch.int64)
    top_k = full if rows.top_k is None else torch.where(rows.top_k > 0, rows.top_k, full)
    top_p = torch.ones_like(rows.temperature) if rows.top_p is None else rows.top_p
    greedy = rows.temperature == 0
    heat = rows.temperature.double().masked_fill(greedy, 1.0)
    drawn = sample(logits, heat, top_k, top_p, uniform(rows.seeds, rows.positions), rows.min_p)
    return torch.where(greedy, logits.argmax(-1), drawn)


IN_PROMPT = 1 << 14
"""Bit of a token's count that says it is in the prompt."""

COUNT_MASK = IN_PROMPT - 1
"""Bits of a token's count that say how often it was generated; the count stays there once it is reached."""


def penalise(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [S, V] in float32 with the penalties of `rows`, in the order of Hugging Face's and OpenAI's definitions.

    Repetition divides positive logits and multiplies negative ones of all tokens seen, prompt included; frequency
    is subtracted for every time that a token was generated, presence once if it was at all.
    """
    assert rows.counts is not None and rows.slots is not None
    assert rows.repetition is not None and rows.presence is not None and rows.frequency is not None
    counts = rows.counts[rows.slots.clamp(min=0).long()].int().masked_fill((rows.slots < 0)[:, None], 0)
    wide, factor = logits.float(), rows.repetition[:, None]
    wide = torch.where(counts != 0, torch.where(wide > 0, wide / factor, wide * factor), wide)
    often = counts & COUNT_MASK
    return wide - often * rows.frequency[:, None] - (often > 0) * rows.presence[:, None]


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """One more of tokens[i] in row slots[i] of counts [slots, V] int16; a slot below 0 is padding. Slots differ."""
    kept = (slots >= 0).nonzero()[:, 0]
    places = (slots[kept].long(), tokens[kept])
    seen = counts[places]
    counts[places] = torch.where((seen & COUNT_MASK) < COUNT_MASK, seen + 1, seen)


def logprobs(logits: Tensor, ids: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Of raw logits [S, V]: log shares of `ids` [S], and of the `top` likeliest tokens [S, top], with their ids."""
    shares = logits.float().log_softmax(-1)
    values, places = shares.topk(top, -1)
    return shares.gather(1, ids[:, None])[:, 0], values, places


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Number `counters[i]` of stream `seeds[i]` (int64), in [0, 1) in float64: SplitMix64 as a counter's function."""
    mixed = _mix(_mix(seeds) + counters)
    return _shifted(mixed, 11).double() * 2.0**-53


def _mix(words: Tensor) -> Tensor:
    """A bijection of 64-bit words that looks like chance (Steele, Lea, Flood 2014)."""
    z = words + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's shift would bring in copies of the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
