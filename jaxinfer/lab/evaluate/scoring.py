"""How likely a model finds given tokens after given others: what every figure of the lab is made of.

All of it is the engine's own scoring path (`LLM.generate` with prompt_logprobs), so a figure is one of the
weights, pages, kernels and quantisation that are served. A prompt that is scored is computed in full: the
prefix cache holds K/V and no logits, so choices that share a context compute it once each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxinfer.config import no_scoring
from jaxinfer.core import ConfigError, JaxInferError, Logprob, RequestError
from jaxinfer.llm import LLM
from jaxinfer.outputs import SCORING
from jaxinfer.progress import phase

GROUP = 128
"""Sequences handed to the engine at a time: their logprobs are Python objects, some 400 bytes a token."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to run, of which `token_ids[first:]` are looked at; first >= 1, since nothing is known of a
    token that follows nothing. `where` names the span in errors; `lost` counts the tokens of its context that
    did not fit before it."""

    token_ids: tuple[int, ...]
    first: int
    where: str
    lost: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.first < len(self.token_ids), f"{self.where}: {self.first} of {len(self.token_ids)}"


@dataclass(frozen=True, slots=True)
class Scored:
    """The logprobs (natural, float32 values) and ranks (1 is the most likely; equals share the best) of the
    tokens of a span from its `first` on."""

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]

    @property
    def greedy(self) -> bool:
        """Whether a greedy continuation of the tokens before would be these."""
        return all(rank == 1 for rank in self.ranks)


Entries = dict[int, Logprob]
"""The logprobs of one position by token id: the text's own token, and the most likely ones."""


def spans_with_top(llm: LLM, spans: Seq[Span], count: int, title: str = "scoring") -> list[list[Entries]]:
    """The entries of each span's tokens from `first` on, with those of the `count` most likely tokens.

    Raises RequestError, naming the span, for one that is longer than the model's max_model_len allows,
    ConfigError for an attention_span of which scores tell nothing, and JaxInferError for one whose run fails.
    """
    if reason := no_scoring(llm.engine_config.span()):
        raise ConfigError(f"{llm.model_name}: attention_span {llm.engine_config.attention_span!r}: {reason}")
    limit = llm.limits.max_model_len
    for span in spans:
        if len(span.token_ids) >= limit:
            raise RequestError(
                f"{span.where} has {len(span.token_ids)} tokens; at most {limit - 1} are scored at a time "
                f"(max_model_len {limit}, less the one that is generated)",
                "prompt",
            )
    sampling = dataclasses.replace(SCORING, prompt_logprobs=count)
    found: list[list[Entries]] = []
    with phase(title, total=len(spans), wanted=len(spans) > 1) as advance:
        for start in range(0, len(spans), GROUP):
            group = spans[start : start + GROUP]
            answers = llm.generate([list(span.token_ids) for span in group], sampling, progress=False)
            for span, answer in zip(group, answers, strict=True):
                if answer.prompt_logprobs is None:
                    ended = answer.outputs[0]
                    reason = ended.error or f"it ended with {ended.finish_reason}"
                    raise JaxInferError(f"{span.where} was not scored: {reason}")
                entries = [entry for entry in answer.prompt_logprobs[span.first :] if entry is not None]
                assert len(entries) == len(span.token_ids) - span.first, f"{span.where}: {len(entries)}"
                found.append(entries)
            advance(len(group))
    return found


def score_spans(llm: LLM, spans: Seq[Span], title: str = "scoring") -> list[Scored]:
    """How likely each span's tokens from `first` on are; raises as `spans_with_top` does."""
    return [
        Scored(
            tuple(entry[token].logprob for token, entry in zip(_looked_at(span), entries, strict=True)),
            tuple(entry[token].rank for token, entry in zip(_looked_at(span), entries, strict=True)),
        )
        for span, entries in zip(spans, spans_with_top(llm, spans, 0, title), strict=True)
    ]


def _looked_at(span: Span) -> tuple[int, ...]:
    return span.token_ids[span.first :]


# ------------------------------------------------------------------------------------------ from text


def require_tokenizer(llm: LLM) -> None:
    """Raises RequestError for a model that serves token ids only."""
    if llm.tokenizer is None:
        raise RequestError(f"{llm.model_name} has no tokenizer, and texts are evaluated", "prompt")


def starts_with_bos(llm: LLM) -> list[int]:
    """[BOS] where the tokenizer puts it before a text, else []. An EOS that it puts behind one is no part of
    a text that goes on."""
    return [llm.tokenizer.bos_id] if llm.tokenizer.adds_bos else []


def started(llm: LLM, ids: list[int]) -> list[int]:
    """The ids of a text as the model runs them: behind BOS, once, where its tokenizer puts that."""
    bos = starts_with_bos(llm)
    return ids if ids[:1] == bos else [*bos, *ids]


def prefix_token(llm: LLM) -> int:
    """What stands in for an empty context: BOS, or EOS where there is none (lm_eval's prefix_token_id).
    Raises RequestError for a model that has neither."""
    for token in (llm.tokenizer.bos_id, llm.tokenizer.eos_token_id):
        if token is not None:
            return token
    raise RequestError(
        f"{llm.model_name} has neither a BOS nor an EOS token to stand before a text without context",
        "prompt",
    )


def continuation_span(
    llm: LLM, context: str, continuation: str, where: str, *, prefix: int | None = None
) -> Span:
    """A continuation after its context, as lm_eval cuts them: both are tokenised as one text, and what goes
    past the tokens of the context alone is the continuation; spaces that end the context belong to the
    continuation. An empty context is `prefix` (None: the `prefix_token`). A context that is too long loses
    its beginning. One that a chat template has begun with BOS does not get a second one.

    Raises RequestError where the continuation alone is too long, or is no token at all.
    """
    require_tokenizer(llm)
    if not context:
        before = [prefix_token(llm) if prefix is None else prefix]
        after = llm.encode(continuation, add_special_tokens=False)
        if after[:1] == before:
            after = after[1:]
    else:
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        alone = llm.encode(context, add_special_tokens=False)
        after = llm.encode(context + continuation, add_special_tokens=False)[len(alone) :]
        before = started(llm, alone) or [prefix_token(llm) if prefix is None else prefix]  # spaces alone
    return cut_span(llm, before, after, where)


def cut_span(llm: LLM, before: Seq[int], after: Seq[int], where: str) -> Span:
    """`after` looked at behind as much of the end of `before`, one token at least, as the model runs at a
    time. Raises RequestError where no token of `before` is left, or `after` is empty."""
    room = llm.limits.max_model_len - 1
    if not after:
        raise RequestError(f"{where}: the continuation is no token of its own", "prompt")
    if len(after) >= room:
        raise RequestError(
            f"{where}: a continuation of {len(after)} tokens; at most {room - 1} are scored "
            f"(max_model_len {room + 1})",
            "prompt",
        )
    kept = list(before)[-(room - len(after)) :]
    return Span((*kept, *after), len(kept), where, len(before) - len(kept))
