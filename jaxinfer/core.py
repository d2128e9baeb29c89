"""The nouns that every room shares, and the contract between the engine and the device.

Standard library only: the engine, the runtime, the server and the tests all import this page, so it
must cost nothing to import and know nothing of arrays.

Progress of a sequence is one number, `computed`: `tokens[:computed]` have their K/V in pages. A step
runs `tokens[start : start + count]` of each chosen sequence, with `start == computed`:

    prompt of 5, budget 3      step 1: start 0 count 3   (a prefill chunk; nothing is sampled)
                               step 2: start 3 count 2   (reaches the end: samples token 5)
                               step 3: start 5 count 1   (decode: samples token 6)

There is no prefill flag anywhere; preemption is `computed = 0` and the pages given back.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for (OpenAI's own limit)."""


MAX_HELD_BACK = 32
"""Most token ids that `min_tokens` can hold back at once: EOS ids and stop_token_ids together."""


MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 64, 16384, 4096
"""Limits of one request's stop conditions: they are matched on the thread that all requests share."""


class JaxInferError(Exception):
    """The caller, or what the caller handed us, is wrong. The message says got / allowed / what to do."""


class ConfigError(JaxInferError, ValueError):
    """A configuration that cannot run: of the engine, or of the model."""


class RequestError(JaxInferError, ValueError):
    """One request cannot be served. `param` names the field at fault, as OpenAI's error object does."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineDeadError(JaxInferError, RuntimeError):
    """The engine thread has ended; nothing submitted to it will be answered."""


# ------------------------------------------------------------------------------------------ requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Filters apply in this order: temperature, top_k, top_p, min_p (each over what the one before left).
    `temperature` 0 (or too small to divide by), `top_k` 1 and `top_p` 0 are greedy; `top_k` 0 or -1 is off.
    `max_tokens` None runs to the model's limit. `logprobs` k reports the k most likely tokens of each step
    besides the chosen one, of the raw float32 model distribution. A `seed` fixes the samples whatever else
    runs beside the request; without one, each request draws its own.

    Raises RequestError (a ValueError) naming the field for a value out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    # Not served yet: any other value than these is refused by name.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    prompt_logprobs: int | None = None
    json_schema: Any = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NOT_SERVED.items():
            value = getattr(self, name)
            if value != neutral and not (name == "logit_bias" and value == {}):
                raise RequestError(f"{name} is not supported yet; leave it at {neutral!r}", name)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
            raise RequestError(f"stop must be a string or a list of strings, got {_shown(self.stop)}", "stop")
        if any(not s for s in stop):
            raise RequestError("stop holds an empty string; every stop string needs a character", "stop")
        if len(stop) > MAX_STOPS or sum(map(len, stop)) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has {len(stop)} strings of {sum(map(len, stop))} characters together; "
                f"at most {MAX_STOPS} of {MAX_STOP_CHARACTERS} are served",
                "stop",
            )
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(_is_int(i) for i in ids):
            raise RequestError(
                f"stop_token_ids must be a list of token ids, got {_shown(ids)}", "stop_token_ids"
            )
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are served",
                "stop_token_ids",
            )
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        _check_int("n", self.n, 1, 128)
        _check_int("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("top_k", self.top_k, -1, None)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens"
            )

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0


_NOT_SERVED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "prompt_logprobs": None,
    "json_schema": None,
    "regex": None,
    "choice": None,
    "grammar": None,
}

MIN_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: logits divided by it would leave the float32 range."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise RequestError(f"{name} must be {allowed}, got {_shown(value)}", name)


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared before converted: float(10**400) raises.
    if not number or not low <= value <= min(high, sys.float_info.max):
        allowed = (
            f"a finite number of at least {low:g}"
            if high == math.inf
            else f"a number from {low:g} to {high:g}"
        )
        raise RequestError(f"{name} must be {allowed}, got {_shown(value)}", name)


def _shown(value: Any) -> str:
    """A value as an error message repeats it, cut: a client may send megabytes."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits has no repr
        return "an integer of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. `request_id` is unique within an engine (the front doors make it)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """`logprob` natural, of the raw float32 distribution; `rank` 1 is the most likely token."""

    logprob: float
    rank: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine must stay within: of the pool, of one step, and of the model.

    Page 0 belongs to nobody (padding writes go there), so `num_pages - 1` pages can be taken. A step runs
    at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences. With a `window` W the query
    at position p sees the keys p - W + 1 .. p and no layer sees more; None: some layer sees everything.
    `sampled_vocab` counts the ids, from 0 on, that the sampler can choose; None: all `vocab_size`.
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
        positions in a row, which lie in 1 + ceil((n - 1) / Z) pages at most.
        """
        whole = -(-num_tokens // self.page_size)
        if self.window is None:
            return whole
        keys = self.window - 1 + chunk
        return min(whole, 1 + -(-(keys - 1) // self.page_size))

    def first_page(self, position: int) -> int:
        """Index of the first page that the query at `position` sees; those before it can go."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size


# ----------------------------------------------------------------------------------------- sequences


class Status(enum.Enum):
    WAITING = "waiting"  # holds no pages; computed == 0
    RUNNING = "running"  # holds pages for tokens[:computed] at least
    FINISHED = "finished"  # holds no pages; finish_reason is set


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the `n` continuations of a request, and the only mutable noun of the engine.

    Only `Scheduler` changes it: `schedule` takes and frees pages, `commit` appends tokens and moves
    `computed`. `pages[i]` holds the K/V of positions `i * Z .. (i + 1) * Z - 1`; the first `released`
    entries are 0, given back because every later query's window is past them (`Limits.window`).
    """

    uid: int
    request: Request
    index: int
    seed: int
    max_tokens: int
    tokens: list[int]
    num_prompt: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    released: int = 0
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
        """Tokens that have no K/V yet: the rest of the prompt, or the last sampled token."""
        return len(self.tokens) - self.computed

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


# --------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class Slice:
    """Run `tokens` at positions `start .. start + count - 1` of one sequence, in this step.

    `pages` covers positions `0 .. start + count - 1` (P = ceil((start + count) / Z) page ids); with a
    window, those that the query at `start` no longer sees are 0. When `emit`, the slice reaches the end of
    the sequence and the step samples the token at position `start + count` with `sampling`, `seed`, never
    choosing an id in `held_back`. `num_prompt` is the length of the sequence's prompt.
    """

    uid: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    emit: bool
    sampling: SamplingParams
    seed: int
    held_back: tuple[int, ...] = ()
    epoch: int = 0  # the sequence's when this was planned; the engine's own business
    num_prompt: int = 0

    @property
    def count(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, decided before the device hears of it. Slices of one token come first."""

    step: int
    slices: tuple[Slice, ...]
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.count for s in self.slices)

    def __repr__(self) -> str:
        ones = sum(s.count == 1 for s in self.slices)
        chunks = len(self.slices) - ones
        return f"StepPlan({self.step}: {ones} of one token, {chunks} chunks, {self.num_tokens} tokens)"


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose for one emitting slice. `top` holds (id, logprob) of the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @property
    def finite(self) -> bool:
        """False when the row's logits held NaN or infinity: its token means nothing."""
        return math.isfinite(self.logprob)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled[i]` belongs to `plan.slices[i]`; None where the slice did not emit."""

    sampled: tuple[Sampled | None, ...]


class Runner(Protocol):
    """The device as the engine sees it. `dispatch` starts a step, `fetch` waits for what it sampled.

    A step that fails raises from either; the runner has then already replaced the KV state (a donated
    cache is gone after a failed step), so every page's content is lost and the engine recomputes. An
    exception with an attribute `kv_lost` False was raised before the device was touched: pages are intact.
    """

    def dispatch(self, plan: StepPlan) -> Any: ...

    def fetch(self, pending: Any) -> StepResult: ...

    def stats(self) -> dict[str, Any]: ...


# -------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds are wall clock from the request's arrival. `tpot_s` is None below two output tokens."""

    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """News of one sequence: the text that became safe to show, the tokens behind it, or its end.

    Text can lag behind tokens (a half character, or what may become a stop string is held back), so
    `text` may be empty while `token_ids` is not, and the last event may carry text alone.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
