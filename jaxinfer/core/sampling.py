"""How the tokens of a request are chosen: SamplingParams, checked in full where it is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jaxinfer.core.errors import RequestError, shown
from jaxinfer.core.structured import (
    STRUCTURES,
    Structure,
    StructuredOutputsParams,
    as_structured_outputs,
    checked_structure,
)

MAX_N = 128
"""Most continuations of one request."""

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for (OpenAI's own limit)."""

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 64, 16384, 4096
"""Limits of one request's stop conditions: they are matched on the thread that all requests share."""

MAX_BIASES, MAX_BAD_WORDS = 1024, 128
"""Limits of one request's logit_bias and bad_words."""

MIN_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Filters apply in this order: penalties and logit_bias, temperature, top_k, top_p, min_p (each over what
    the one before left). `repetition_penalty` r divides a positive logit and multiplies a negative one, once
    for each id of prompt and output (the Hugging Face rule); `presence_penalty` and `frequency_penalty`
    subtract from ids of the output alone, once and once per occurrence (OpenAI's rule). `logit_bias` adds to
    ids.
    One of `json_schema`, `regex`, `choice`, `grammar` (Lark or GBNF) and `structured_outputs` (vLLM's way of
    asking for these and more; a mapping of its fields will do) binds the output to a structure.
    `allowed_token_ids` leaves no other ids to choose from (an end that is not among them never comes);
    `bad_words` are texts that the output never holds, spelled as they are or after a space.
    `prompt_logprobs` k reports on every prompt token but the first as `logprobs` does on the output.
    `temperature` 0 (or too small to divide by), `top_k` 1 and `top_p` 0 are greedy; `top_k` 0 or -1 is off.
    `max_tokens` None runs to the model's limit. `logprobs` k reports the k most likely tokens of each step
    besides the chosen one, of the raw float32 model distribution; `logprob_token_ids` in its place reports
    these ids, at most MAX_LOGPROBS. A `seed` fixes the samples whatever else
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    bad_words: Seq[str] = ()
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logprob_token_ids: Seq[int] | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
            raise RequestError(f"stop must be a string or a list of strings, got {shown(self.stop)}", "stop")
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
                f"stop_token_ids must be a list of token ids, got {shown(ids)}", "stop_token_ids"
            )
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are served",
                "stop_token_ids",
            )
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        _check_int("n", self.n, 1, MAX_N)
        _check_int("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("top_k", self.top_k, -1, None)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
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
        self._check_words()
        self._check_told()
        self._check_structure()

    def _check_words(self) -> None:
        """Which ids and texts the output may hold."""
        words, ids = self.bad_words or (), self.allowed_token_ids
        if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) and w.strip() for w in words):
            raise RequestError(f"bad_words must be a list of words, got {shown(words)}", "bad_words")
        if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"bad_words has {len(words)} words of {sum(map(len, words))} characters together; "
                f"at most {MAX_BAD_WORDS} of {MAX_STOP_CHARACTERS} are served",
                "bad_words",
            )
        object.__setattr__(self, "bad_words", tuple(words))
        if ids is None:
            return
        if not isinstance(ids, (list, tuple)) or not ids or not all(_is_int(i) for i in ids):
            raise RequestError(
                f"allowed_token_ids must be a list of token ids, and not empty, got {shown(ids)}",
                "allowed_token_ids",
            )
        object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(ids)))

    def _check_told(self) -> None:
        """Which ids the logprobs tell of."""
        ids = self.logprob_token_ids
        if ids is None:
            return
        if not isinstance(ids, (list, tuple)) or not all(_is_int(i) for i in ids) or not ids:
            raise RequestError(
                f"logprob_token_ids must be a list of token ids, and not empty, got {shown(ids)}",
                "logprob_token_ids",
            )
        ids = tuple(dict.fromkeys(ids))
        if len(ids) > MAX_LOGPROBS:
            raise RequestError(
                f"logprob_token_ids has {len(ids)} ids; at most {MAX_LOGPROBS} are served",
                "logprob_token_ids",
            )
        if self.logprobs is not None:
            raise RequestError(
                "logprob_token_ids stand in the place of the most likely tokens; leave out logprobs",
                "logprob_token_ids",
            )
        object.__setattr__(self, "logprob_token_ids", ids)

    def _check_structure(self) -> None:
        """One kind of structure at most, each of its own type; whether it compiles the tokenizer says."""
        stated: list[str] = [name for name in STRUCTURES if getattr(self, name) is not None]
        for name in STRUCTURES:
            if name in stated:
                object.__setattr__(self, name, checked_structure(name, getattr(self, name), name))
        if self.structured_outputs is not None:
            stated.append("structured_outputs")
            object.__setattr__(self, "structured_outputs", as_structured_outputs(self.structured_outputs))
        if len(stated) > 1:
            raise RequestError(f"{' and '.join(stated)} exclude each other; state one", stated[1])
        if stated and self.allowed_token_ids is not None:
            raise RequestError(
                f"allowed_token_ids and {stated[0]} exclude each other; state one", "allowed_token_ids"
            )

    @property
    def structure(self) -> Structure | None:
        """The form that the output must follow; None without one."""
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            return self.structured_outputs.structure
        for name in STRUCTURES:
            if (value := getattr(self, name)) is not None:
                return Structure(kind=name, value=value, param=name)
        return None

    @property
    def structured(self) -> bool:
        """True when the output must follow a schema, a pattern, a choice, a grammar or tags."""
        return self.structure is not None

    @property
    def adjusts_logits(self) -> bool:
        """True when logits change with the tokens so far, or by a bias, before one is chosen."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0


def _checked_bias(bias: Any) -> dict[int, float] | None:
    """Token ids, as integers or (from JSON) as text, to biases of -100 .. 100; None where there are none."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shown(bias)}", "logit_bias")
    if len(bias) > MAX_BIASES:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_BIASES} are served", "logit_bias"
        )
    checked: dict[int, float] = {}
    wrong = []
    for key, value in bias.items():
        token = key if isinstance(key, int) and not isinstance(key, bool) else -1
        if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdecimal():
            token = int(key)
        if token < 0:
            wrong.append(key)
            continue
        _check_float("logit_bias", value, -100.0, 100.0)
        checked[token] = float(value)
    if wrong:
        what = (
            f"{shown(wrong[0])} is not a token id" if len(wrong) == 1 else f"{shown(wrong)} are no token ids"
        )
        raise RequestError(f"logit_bias: {what}", "logit_bias")
    return checked or None


MIN_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: logits divided by it would leave the float32 range."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise RequestError(f"{name} must be {allowed}, got {shown(value)}", name)


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared before converted: float(10**400) raises.
    if not number or not low <= value <= min(high, sys.float_info.max):
        allowed = (
            f"a finite number of at least {low:g}"
            if high == math.inf
            else f"a number from {low:g} to {high:g}"
        )
        raise RequestError(f"{name} must be {allowed}, got {shown(value)}", name)
