"""What the parts of the playground say to each other: requests, slices, copies, steps, completions.

Values only. Nothing here knows a policy, a clock, a device or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import NamedTuple

LONGEST = (1 << 31) - 1
"""Tokens of a prompt or an answer that a request may have."""

MAIN = "main"
"""The lane of a slice that no policy put anywhere else."""

COPY_IN, COPY_OUT = "copy_in", "copy_out"
"""Lanes of swap copies: host to device, device to host."""

MOST_LOGPROBS = 20
"""Alternatives that may be told of each token, as many as OpenAI's API and vLLM allow by default."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of one request, in seconds; `inf` where it has none."""

    ttft: float = inf
    tpot: float = inf
    e2el: float = inf


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine picks tokens, and what it tells of them. The defaults are greedy, and tell nothing.

    First the penalties change the logits, for greedy requests too. `repetition_penalty` divides positive logits and
    multiplies negative ones of all tokens seen, prompt included, as in Hugging Face's `generate`; for each time that a
    token was sampled `frequency_penalty` is subtracted, and `presence_penalty` once if it was at all, as in OpenAI's
    API. Then come `temperature` (0: the likeliest token), `min_p` (the least share kept, relative to the likeliest
    token's), `top_k` (0: all) and `top_p`, as in vLLM.

    `logprobs`: with every token comes the log of its share in the model's own distribution, before penalties and
    temperature, and those of so many likeliest tokens; None: neither.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ValueError(f"sampling.temperature={self.temperature} must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k={self.top_k} must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p} must lie in (0, 1]; 1 is off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"sampling.min_p={self.min_p} must lie in [0, 1]; 0 is off")
        if not 0 < self.repetition_penalty < inf:
            raise ValueError(f"sampling.repetition_penalty={self.repetition_penalty} must be above 0; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                raise ValueError(f"sampling.{name}={value} must lie in [-2, 2]; 0 is off")
        if self.logprobs is not None and not (isinstance(self.logprobs, int) and 0 <= self.logprobs <= MOST_LOGPROBS):
            raise ValueError(
                f"sampling.logprobs={self.logprobs} must be None (off) or a whole number up to {MOST_LOGPROBS}"
            )

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before change what comes next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request. It has no output length: the oracle boundary is this type."""

    id: int
    arrival: float
    prompt_length: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    session: str = ""
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    `arrival` is in seconds since the run began, lengths are in tokens. `max_tokens` is what the client allows and
    everybody sees; `output_length` is what will really come, where a trace knows it, and only backends read it.
    `hashes` are chained prefix ids, one for every `hash_block` tokens of the prompt: equal ids mean equal prefixes.
    """

    id: int
    arrival: float
    prompt_length: int
    max_tokens: int
    output_length: int | None = None
    prompt: tuple[int, ...] | None = None
    hashes: tuple[int, ...] = ()
    hash_block: int = 16
    priority: int = 0
    tenant: str = ""
    session: str = ""
    slo: Slo = field(default_factory=Slo)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if max(self.prompt_length, self.max_tokens) > LONGEST:
            raise ValueError(f"request {self.id}: more than {LONGEST} tokens: the trace counts in 32 bits")
        if self.prompt_length < 1:
            raise ValueError(f"request {self.id}: prompt_length={self.prompt_length} must be at least 1")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens={self.max_tokens} must be at least 1")
        if self.output_length is not None and not 1 <= self.output_length <= self.max_tokens:
            raise ValueError(
                f"request {self.id}: output_length={self.output_length} must lie in 1..max_tokens={self.max_tokens}"
            )
        if self.prompt is not None and len(self.prompt) != self.prompt_length:
            raise ValueError(
                f"request {self.id}: prompt has {len(self.prompt)} tokens, prompt_length={self.prompt_length}"
            )

    def view(self) -> RequestView:
        return RequestView(
            self.id,
            self.arrival,
            self.prompt_length,
            self.max_tokens,
            self.priority,
            self.tenant,
            self.session,
            self.slo,
        )


class Slice(NamedTuple):
    """One sequence's share of one step: prefill, chunk, decode and verification are the same thing.

    The tokens at positions `start .. start+length` are computed. `blocks` are the KV blocks appended to the
    sequence's table by this slice (in a sequence's first slice of an epoch: with the ones found in the prefix cache).
    `samples`: the last position yields a token. `drafted`: how many of the tokens are guesses to verify.
    """

    sequence: int
    epoch: int
    rank: int
    start: int
    length: int
    samples: bool
    blocks: tuple[int, ...]
    lane: str = MAIN
    drafted: int = 0


class Columns(NamedTuple):
    """Slices by field: where every slice of a step is looked at, a column at once takes a fraction of the time."""

    sequence: tuple[int, ...]
    epoch: tuple[int, ...]
    rank: tuple[int, ...]
    start: tuple[int, ...]
    length: tuple[int, ...]
    samples: tuple[bool, ...]
    blocks: tuple[tuple[int, ...], ...]
    lane: tuple[str, ...]
    drafted: tuple[int, ...]

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Columns:
        columns = list(zip(*slices, strict=True))
        return cls(*columns) if columns else NO_SLICES

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """One after another."""
        return cls(*[tuple(chain.from_iterable(fields)) for fields in zip(*parts, strict=True)])

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(map(Slice._make, zip(*self, strict=True)))


NO_SLICES = Columns((), (), (), (), (), (), (), (), ())


class Copy(NamedTuple):
    """KV blocks of one sequence that move between two pools; block i of `source` goes to block i of `target`.

    Lane `copy_out` reads the device's pool and writes the host's, `copy_in` the reverse. The sources are held until
    the copy is done. `epoch` is the one the sequence has when the copy ends.
    """

    sequence: int
    epoch: int
    rank: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    lane: str


class LayerMove(NamedTuple):
    """Stages are to hold so many layers each; `blocks`: KV blocks in use, of which the layers' part moves along."""

    layers: tuple[int, ...]
    blocks: int


@dataclass(init=False, slots=True)
class Step:
    """All that a backend gets: what to compute and what to move, decided before. Nobody changes it afterwards.

    `starts` are the requests that no earlier step of this group named, `ends` the sequences that no later one will.
    `dummies` are ranks of a lockstep group that have nothing to do and must take part nevertheless.
    `repeat`: the step may be done up to so many times in a row, every slice one token further each time; how
    often it was done is `Done.count`. Only a backend whose `Spec.repeats` holds ever sees a repeat above 1.
    `move`: layers that change their stage.
    """

    # Not frozen, and by a constructor of its own: a simulation makes one for every row of its trace.

    id: int
    group: int
    planned: float
    columns: Columns
    """The slices, by field."""
    copies: tuple[Copy, ...]
    starts: tuple[Request, ...]
    ends: tuple[int, ...]
    dummies: tuple[int, ...]
    repeat: int
    move: LayerMove | None
    lanes: tuple[str, ...]
    """Lanes in use, in order of first use: one `Done` comes back for each."""
    _slices: tuple[Slice, ...] | None = field(repr=False, compare=False)

    def __init__(
        self,
        id: int,
        group: int,
        planned: float,
        slices: tuple[Slice, ...] | Columns,
        copies: tuple[Copy, ...] = (),
        starts: tuple[Request, ...] = (),
        ends: tuple[int, ...] = (),
        dummies: tuple[int, ...] = (),
        repeat: int = 1,
        move: LayerMove | None = None,
    ) -> None:
        self.id = id
        self.group = group
        self.planned = planned
        if isinstance(slices, Columns):
            self._slices, self.columns = None, slices
        else:
            self._slices, self.columns = slices, Columns.of(slices)
        self.copies = copies
        self.starts = starts
        self.ends = ends
        self.dummies = dummies
        self.repeat = repeat
        self.move = move
        lanes = dict.fromkeys(self.columns.lane)
        if copies:
            lanes.update(dict.fromkeys([copy.lane for copy in copies]))
        self.lanes = tuple(lanes)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What to compute, slice by slice: who looks at some fields only takes `columns`."""
        if self._slices is None:
            self._slices = self.columns.slices
        return self._slices

    def with_blocks(self, blocks: tuple[tuple[int, ...], ...]) -> Step:
        """The same step with other blocks for each of its slices."""
        columns = Columns(*self.columns[:6], blocks, *self.columns[7:])
        waits = self.copies, self.starts, self.ends, self.dummies
        return Step(self.id, self.group, self.planned, columns, *waits, self.repeat, self.move)

    def without_requests(self) -> Step:
        """The same step as policies may see it: requests know how long answers will be."""
        if not self.starts:
            return self
        return Step(
            self.id,
            self.group,
            self.planned,
            self.columns,
            self.copies,
            (),
            self.ends,
            self.dummies,
            self.repeat,
            self.move,
        )

    def columns_of(self, lane: str) -> Columns:
        """Of the slices in one lane."""
        if len(self.lanes) == 1:
            return self.columns
        return Columns.of([part for part in self.slices if part.lane == lane])


class Logprob(NamedTuple):
    """The log of a sampled token's share in the model's distribution, and of the likeliest tokens' with their ids."""

    value: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, log of its share), the likeliest first; the sampled token is among them only if it is that likely."""


@dataclass(slots=True)
class Done:
    """One lane of one step is complete. Nobody changes it afterwards; not frozen for the reason that `Step` is not.

    Times are seconds since the run began; `host` is the host's share of the launch, in seconds. `tokens` holds, for
    each sequence that sampled, the tokens it got (in a backend without tensors every id is 0: only their number
    means anything). `ended`: sequences that got their last token. `ticks`: finish times of each repetition when
    `count` > 1. `stages`: (started, finished) on each pipeline stage where there are several; of repetitions one
    after another, where they do not follow from `ticks` and `host`. `planned`: when each of those was decided.
    `logprobs`: one for each of the `tokens` of those sequences that asked for them; traces do not keep them.
    """

    step: int
    lane: str
    launched: float
    started: float
    finished: float
    tokens: dict[int, tuple[int, ...]]
    ended: tuple[int, ...] = ()
    host: float = 0.0
    count: int = 1
    ticks: tuple[float, ...] = ()
    stages: tuple[tuple[float, float], ...] = ()
    planned: tuple[float, ...] = ()
    logprobs: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)


class Turn(NamedTuple):
    """How far a backend is with a step that it repeats by itself: repetitions decided and done, the first included."""

    step: int
    planned: int
    done: int


@dataclass(frozen=True, slots=True)
class Spec:
    """Static facts about a backend that a policy may plan against.

    `blocks` is the KV pool of each rank, in blocks of `block_size` tokens; `host_blocks` the pool that swapped
    sequences use. `max_seqs` bounds the sequences admitted on a rank at any time, `max_tokens` the tokens of one rank
    in one step, `max_length` the tokens of one sequence. `stages` is the pipeline's depth, `ranks` counts the data
    parallel ranks; with `lockstep` they step together as one group, else each is a group (a replica).
    `forwards_tokens`: a sampled token may be an input before it was returned. `repeats`: see `Step.repeat`. `layers`:
    how many each stage holds at first, where they can move; a stage has room for `spare_layers` more.
    """

    blocks: int
    block_size: int = 16
    host_blocks: int = 0
    max_seqs: int = 256
    max_tokens: int = 8192
    max_length: int = 1 << 20
    stages: int = 1
    ranks: int = 1
    lockstep: bool = False
    forwards_tokens: bool = False
    repeats: bool = False
    layers: tuple[int, ...] = ()
    spare_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "max_seqs", "max_tokens", "max_length", "stages", "ranks"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks={self.host_blocks} must be 0 (no swapping) or more")
        object.__setattr__(self, "layers", tuple(self.layers))  # a list where it was read from a file

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that step together."""
        ranks = tuple(range(self.ranks))
        return (ranks,) if self.lockstep else tuple((rank,) for rank in ranks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Arrive:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The client went away: whatever the request has is given up."""

    request: int


@dataclass(frozen=True, slots=True)
class Reject:
    """A request that will get no (more) tokens, and why."""

    request: int
    why: str
