"""Requests, and the sequences that the engine makes of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxinfer.core.results import FinishReason
from jaxinfer.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. `request_id` is unique within an engine (the front doors make it).

    `priority`: lower is served first, under scheduling_policy "priority". `cache_salt` keeps the prefix cache
    of those who share it to themselves. `timeout_s` ends the request ("abort") that long after its arrival.
    One that is not `counted` is a step of something larger, a beam search, of which the engine is told as a
    whole (`Engine.count_search`): what it computes counts, but no request, prompt, token or time of its own.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    counted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine must stay within: of the pool, of one step, and of the model.

    Page 0 belongs to nobody (padding writes go there), so `num_pages - 1` pages can be taken. A step runs
    at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences. With a `window` W the query
    at position p sees the keys p - W + 1 .. p and the first `sinks`, and no layer sees more; None: some layer
    sees everything.
    `sampled_vocab` counts the ids, from 0 on, that the sampler can choose; None: all `vocab_size`.
    `stateful`: some layer keeps a state of each running sequence, in one of `max_num_seqs` places, which is
    that of all its tokens so far: nobody else can begin from it, and no token may be run twice.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    window: int | None = None
    sampled_vocab: int | None = None
    sinks: int = 0
    stateful: bool = False

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def pages_per_sequence(self) -> int:
        """Most pages that one sequence can ever hold, whatever `num_pages` is."""
        return self.most_pages(self.max_model_len, self.max_num_batched_tokens)

    def most_pages(self, num_tokens: int, chunk: int) -> int:
        """Most pages that the K/V of `num_tokens` >= 1 positions take at a time, in slices of `chunk` >= 1.

        Without a window all are kept. With one, a slice touches W - 1 keys before it and its own: n
        positions in a row, which lie in 1 + ceil((n - 1) / Z) pages at most, besides the sinks' own.
        """
        whole = -(-num_tokens // self.page_size)
        if self.window is None:
            return whole
        keys = self.window - 1 + chunk
        return min(whole, self.sink_pages + 1 + -(-(keys - 1) // self.page_size))

    def first_page(self, position: int) -> int:
        """Index of the first page that the window of the query at `position` touches; those between the
        sinks' own and it can go."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

    @property
    def sink_pages(self) -> int:
        """Pages at the front that every later query sees: they stay."""
        return -(-self.sinks // self.page_size)

    def unseen_pages(self, position: int) -> int:
        """How many pages behind the sinks' own no query from `position` on sees."""
        return max(0, self.first_page(position) - self.sink_pages)


class Status(enum.Enum):
    WAITING = "waiting"  # holds no pages; computed == 0
    RUNNING = "running"  # holds pages for tokens[:computed] at least
    FINISHED = "finished"  # holds no pages; finish_reason is set


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the `n` continuations of a request, and the only mutable noun of the engine.

    Only `Scheduler` changes it: `schedule` takes and frees pages and counts what is in flight, `commit`
    appends tokens and moves `computed`. `ahead` tokens beyond `computed` are planned in a step whose result
    is not read yet; `drawing` counts the tokens that such steps sample, which no one knows yet. `pages[i]`
    holds the K/V of positions `i * Z .. (i + 1) * Z - 1`; `released` entries, the first ones behind those of
    the sinks, are 0: given back because every later query's window is past them (`Limits.window`). `rank`
    orders sequences, the most
    urgent first. `cached_tokens` of the prompt were found in pages and not computed.
    """

    uid: int
    request: Request
    index: int
    seed: int
    max_tokens: int
    tokens: list[int]
    num_prompt: int
    rank: tuple[float, int] = (0.0, 0)
    computed: int = 0
    ahead: int = 0
    drawing: int = 0
    cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    released: int = 0
    state_place: int = 0  # where it has its state while it runs, from 1 on, if `Limits.stateful`
    cursor: object = None  # where the prefix cache has got to with this sequence
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    preemptions: int = 0
    epoch: int = 0  # moves on when the pages are given back; results planned in an earlier epoch are void
    arrived_at: float = 0.0
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def pending(self) -> int:
        """Tokens that have no K/V and are in no plan: the rest of the prompt, or the last sampled token."""
        return len(self.tokens) + self.drawing - self.planned

    @property
    def planned(self) -> int:
        """Positions that are computed, or will be by the step in flight."""
        return self.computed + self.ahead

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def live_pages(self) -> int:
        """Pages that it holds."""
        return len(self.pages) - self.released

    def __repr__(self) -> str:
        return (
            f"Sequence({self.uid} {self.status.value} {self.computed}/{len(self.tokens)}"
            f" prompt={self.num_prompt} pages={self.live_pages} {self.finish_reason or ''})"
        )
