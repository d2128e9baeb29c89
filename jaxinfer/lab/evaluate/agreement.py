"""How far a variant does as its original does: the same next token, the same text, a near distribution.

Both models see the same windows of the same texts, cut as for perplexity and tokenised by the original's
tokenizer. Agreement is teacher-forced: at each counted token both have the text's own tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxinfer.core import MAX_LOGPROBS, JaxInferError, SamplingParams
from jaxinfer.lab.evaluate import divergence
from jaxinfer.lab.evaluate.estimate import Estimate, mean, ratio
from jaxinfer.lab.evaluate.perplexity import Text, Windowing, text_spans
from jaxinfer.lab.evaluate.scoring import Entries, Span, spans_with_top
from jaxinfer.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of `counted` tokens in `windows` windows: `same_next`, the share at which both models' most likely
    token is the same; `kl_bound` and `kl`, KL(original || variant) in nats per token, as the engine's
    `top_logprobs` tell at least and as it is (`divergence`; None where it was not asked for).

    `same_prefix` is the mean number of tokens, of `greedy_tokens`, before the two models' greedy
    continuations of the first `prompt_tokens` of each window part, and `same_throughout` the share of those
    that never do. Windows are the units of the standard errors.
    """

    name: str
    windowing: Windowing
    windows: int
    counted: int
    same_next: Estimate
    kl_bound: Estimate
    kl: Estimate | None
    top_logprobs: int
    prompt_tokens: int
    greedy_tokens: int
    same_prefix: Estimate | None
    same_throughout: Estimate | None


def evaluate_agreement(
    original: LLM,
    variant: LLM,
    text: Text,
    windowing: Windowing,
    *,
    exact_kl: bool = True,
    prompt_tokens: int = 32,
    greedy_tokens: int = 64,
) -> Agreement:
    """Compare two models over the windows of a text. `greedy_tokens` 0 leaves the continuations out.

    Raises RequestError for models of different vocabularies, and where `exact_kl` cannot be told.
    """
    divergence.check_same_vocabulary(original, variant)
    spans, _ = text_spans(original, text, windowing)
    return compare_spans(
        original, variant, spans, text.name, windowing, exact_kl, prompt_tokens, greedy_tokens
    )


def compare_spans(
    original: LLM,
    variant: LLM,
    spans: Seq[Span],
    name: str,
    windowing: Windowing,
    exact_kl: bool,
    prompt_tokens: int,
    greedy_tokens: int,
) -> Agreement:
    """The same of spans that are cut already."""
    if exact_kl:
        divergence.check_dense(original, variant)  # before what takes long
    tops = [
        spans_with_top(llm, spans, MAX_LOGPROBS, f"{llm.model_name} over {name}")
        for llm in (original, variant)
    ]
    same, bounds = [], []
    for mine, other in zip(*tops, strict=True):
        pairs = list(zip(mine, other, strict=True))
        same.append(float(sum(most_likely(a) == most_likely(b) for a, b in pairs)))
        bounds.append(math.fsum(divergence.bounded(a, b) for a, b in pairs))
    counts = [float(len(entries)) for entries in tops[0]]
    kl = None
    if exact_kl:
        kl = ratio(
            [float(part.sum(dtype="float64")) for part in divergence.exact(original, variant, spans)], counts
        )
    prefixes = same_prefixes(original, variant, spans, prompt_tokens, greedy_tokens) if greedy_tokens else []
    return Agreement(
        name=name,
        windowing=windowing,
        windows=len(spans),
        counted=int(sum(counts)),
        same_next=ratio(same, counts),
        kl_bound=ratio(bounds, counts),
        kl=kl,
        top_logprobs=MAX_LOGPROBS,
        prompt_tokens=prompt_tokens,
        greedy_tokens=greedy_tokens,
        same_prefix=mean([float(length) for length in prefixes]) if prefixes else None,
        same_throughout=mean([float(length == greedy_tokens) for length in prefixes]) if prefixes else None,
    )


def most_likely(entries: Entries) -> int:
    """The token that greedy decoding takes: of equals, the lowest id."""
    return min(token for token, entry in entries.items() if entry.rank == 1)


def same_prefixes(
    original: LLM, variant: LLM, spans: Seq[Span], prompt_tokens: int, greedy_tokens: int
) -> list[int]:
    """How many tokens the two models' greedy continuations share before they part, of each span's first
    `prompt_tokens` (no more than leave room). An end-of-text token ends none. Raises JaxInferError when a
    run fails."""
    room = min(llm.limits.max_model_len for llm in (original, variant)) - greedy_tokens
    prompts = [list(span.token_ids[: max(1, min(prompt_tokens, room))]) for span in spans]
    sampling = SamplingParams(temperature=0.0, max_tokens=greedy_tokens, ignore_eos=True)
    continued = []
    for llm in (original, variant):
        answers = [answer.outputs[0] for answer in llm.generate(prompts, sampling, progress=False)]
        if failed := [answer.error for answer in answers if answer.finish_reason != "length"]:
            raise JaxInferError(f"{llm.model_name}: a greedy continuation failed: {failed[0]}")
        continued.append([answer.token_ids for answer in answers])
    return [_shared(mine, other) for mine, other in zip(*continued, strict=True)]


def _shared(mine: Seq[int], other: Seq[int]) -> int:
    for index, (a, b) in enumerate(zip(mine, other, strict=True)):
        if a != b:
            return index
    return len(mine)
