"""Beam search on top of the engine: each step asks it for one token after every beam, with alternatives.

The K/V of a beam lie in the prefix cache from one step to the next, so a step computes little but its last
token; without the cache the answer is the same, and slower. A candidate that ends is complete; of the others
the likeliest `beam_width` live on. The result is the `beam_width` best of both, by their score

    score = cum_logprob / tokens ** length_penalty          tokens: of the output, its end included
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxinfer.core import (
    MAX_LOGPROBS,
    FinishReason,
    JaxInferError,
    Limits,
    Logprob,
    Request,
    RequestError,
    SamplingParams,
)
from jaxinfer.llm.turns import Turns
from jaxinfer.progress import Advance

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A step looks at 2 * beam_width alternatives of each beam: so many live on even if half of them end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How a beam search runs; vLLM's names. Raises RequestError naming the field.

    `beam_width` beams live, at most MAX_BEAM_WIDTH, and as many are the result. `ignore_eos` goes on after an
    end. `length_penalty` above 0 favours longer outputs, below 0 shorter ones. Beams are ranked by what the
    model itself finds likely, so the only `temperature` is 0.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", None)):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (most is not None and value > most):
                allowed = "an integer of at least 1" if most is None else f"an integer from 1 to {most}"
                raise RequestError(f"{name} must be {allowed}, got {value!r:.80}", name)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r:.80}", "ignore_eos")
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise RequestError(
                "temperature must be 0, or left out, for a beam search: beams are ranked by the model's own "
                f"distribution; got {self.temperature!r:.80}",
                "temperature",
            )
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -10 <= penalty <= 10:
            raise RequestError(
                f"length_penalty must be a number from -10 to 10, got {penalty!r:.80}", "length_penalty"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One output. `tokens` are the prompt's and the output's, an end included; `logprobs[i]` the alternatives
    that the search saw for the i-th token of the output, the token itself among them; `text` is that of all
    tokens (vLLM's rule), None without a tokenizer. `finish_reason` is None while the beam lives."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] = ()
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The tokens behind the prompt's."""
        return self.tokens[len(self.tokens) - len(self.logprobs) :]

    def grown(self, token: int, known: dict[int, Logprob], ends: bool) -> BeamSearchSequence:
        """This one, and a token of which `known` tells."""
        return BeamSearchSequence(
            tokens=(*self.tokens, token),
            logprobs=(*self.logprobs, known),
            cum_logprob=self.cum_logprob + known[token].logprob,
            finish_reason="stop" if ends else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The best outputs of one prompt, the best first."""

    sequences: tuple[BeamSearchSequence, ...]


class CountsSearches(Protocol):
    """`Engine.count_search`, or what passes it on to the engine's thread."""

    def count_search(
        self, prompt_tokens: int, outputs: Sequence[tuple[int, FinishReason]], seconds: float
    ) -> None: ...


class BeamSearch:
    """The search for one prompt. While it is not `done`: run `requests()`, and give `take` what was known of
    the token that each of them made.

    request: the prompt, whose sampling's max_tokens fits behind it; its own sampling is not used otherwise.
    """

    def __init__(self, request: Request, params: BeamSearchParams, limits: Limits):
        self._request, self._params = request, params
        self._ends = frozenset() if params.ignore_eos else limits.eos_token_ids
        self._num_ids = limits.vocab_size if limits.sampled_vocab is None else limits.sampled_vocab
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True
        )
        self._live = [BeamSearchSequence(tokens=request.prompt_token_ids)]
        self._complete: list[BeamSearchSequence] = []
        self._steps = 0
        self._began = time.monotonic()

    @property
    def done(self) -> bool:
        """True when no further step can change the result."""
        if not self._live or self._steps >= self._params.max_tokens:
            return True
        if len(self._complete) < self._params.beam_width:
            return False
        return self._score(self._complete[-1]) >= max(map(self._bound, self._live))

    def requests(self) -> list[Request]:
        """One request of one token for each beam that lives."""
        return [
            dataclasses.replace(
                self._request,
                request_id=f"{self._request.request_id}-{self._steps}-{number}",
                prompt_token_ids=beam.tokens,
                prompt=None,
                sampling=self._sampling,
                counted=False,
            )
            for number, beam in enumerate(self._live)
        ]

    def take(self, known: Sequence[dict[int, Logprob]]) -> None:
        """The alternatives of the token after each beam, in the order of `requests()`."""
        width = self._params.beam_width
        ranked = [
            (beam.cum_logprob + entries[token].logprob, beam, token, entries)
            for beam, entries in zip(self._live, known, strict=True)
            for token in entries
            if token < self._num_ids  # the rows that pad an output matrix stand for no token
        ]
        ranked.sort(key=lambda candidate: candidate[0], reverse=True)
        live: list[BeamSearchSequence] = []
        # Only what is kept is grown: each copies all of its tokens, the prompt's among them.
        for _, beam, token, entries in ranked[: 2 * width]:
            if token in self._ends:
                self._complete.append(beam.grown(token, entries, ends=True))
            elif len(live) < width:
                live.append(beam.grown(token, entries, ends=False))
        self._live = live
        self._complete = sorted(self._complete, key=self._score, reverse=True)[:width]
        self._steps += 1

    def best(self) -> list[BeamSearchSequence]:
        """The `beam_width` best of what is complete and what lives, the best first; all have a reason."""
        # Of a search that stopped early, what lives is no output: it could not have ended well enough.
        live = self._live if self._steps >= self._params.max_tokens else []
        live = [dataclasses.replace(beam, finish_reason="length") for beam in live]
        return sorted(self._complete + live, key=self._score, reverse=True)[: self._params.beam_width]

    def count(self, engine: CountsSearches, failure: FinishReason | None = None) -> None:
        """Tell an engine of the search, which has ended: by itself, or all of it by a `failure`."""
        if failure is None:
            best = self.best()
            outputs: list[tuple[int, FinishReason]] = [
                (len(beam.logprobs), beam.finish_reason or "length") for beam in best
            ]
        else:
            outputs = [(0, failure)] * self._params.beam_width
        seconds = time.monotonic() - self._began
        engine.count_search(len(self._request.prompt_token_ids), outputs, seconds)

    def _score(self, beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / len(beam.logprobs) ** self._params.length_penalty

    def _bound(self, beam: BeamSearchSequence) -> float:
        """No output that continues a beam scores better: its logprob only falls, whatever its length."""
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else len(beam.logprobs) + 1
        return beam.cum_logprob / length**penalty


def run(turns: Turns, searches: Sequence[BeamSearch], advance: Advance) -> None:
    """Run searches together until all are done. Raises JaxInferError when a step of one fails."""
    waiting = list(searches)
    failure: FinishReason = "abort"
    try:
        while waiting:
            _step(turns, waiting)
            before = len(waiting)
            waiting = [search for search in waiting if not search.done]
            if len(waiting) < before:
                advance(before - len(waiting))
    except JaxInferError:
        failure = "error"
        raise
    finally:
        with turns.turn():
            for search in searches:
                search.count(turns.engine, failure if search in waiting else None)


def _step(turns: Turns, waiting: Sequence[BeamSearch]) -> None:
    """One token more for every beam of these."""
    asked = [(search, search.requests()) for search in waiting]
    known: dict[str, Sequence[dict[int, Logprob]]] = {}
    for event in turns.events([request for _, requests in asked for request in requests]):
        if event.finish_reason in ("error", "abort"):
            raise JaxInferError(f"the beam search ended early: {event.error or event.finish_reason}")
        if event.logprobs:
            known[event.request_id] = event.logprobs
    for search, requests in asked:
        search.take([known[request.request_id][0] for request in requests])
