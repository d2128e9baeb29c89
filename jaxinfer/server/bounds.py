"""What one body may cost before anything of it runs. Elsewhere: `read_body` (bytes and time of the body),
SamplingParams (n, logprobs, stops, biases), `engine.validate` (tokens and pages), `text.grammar` (time and
memory of a structure), `EngineWorker` (sequences that run and wait, and news that nobody reads)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.core import Limits, Request, RequestError

CHARACTERS_PER_TOKEN = 128
"""No vocabulary in use has a longer token (128 spaces), so a text of more than this many characters for each
token of max_model_len is refused without tokenising it, which takes a second a megabyte."""

MAX_LOGPROB_ENTRIES = 1_000_000
"""Most log-probabilities that one answer may come to hold, at some 250 bytes and 3.5 us of JSON each: one
continuation of 47k tokens with all of 20 each passes."""


def check_texts(texts: Iterable[object], limits: Limits, param: str) -> None:
    """Raise RequestError when texts that make one prompt are too long for the model, whatever their tokens;
    what is no text (token ids) is counted elsewhere."""
    most = CHARACTERS_PER_TOKEN * limits.max_model_len
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if characters > most:
        raise RequestError(
            f"the prompt has {characters} characters, which is too long for the limit of "
            f"{limits.max_model_len} tokens of prompt and output together (max_model_len); "
            f"at most {most} characters are looked at",
            param,
        )


def texts_of(messages: Iterable[Mapping[str, Any]]) -> Iterable[object]:
    """Every text of a conversation as chat templates take it, however deep: contents, parts, names, calls."""
    waiting: list[Any] = list(messages)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            yield value


def check_logprobs(requests: Sequence[Request], limits: Limits) -> None:
    """Raise RequestError when the log-probabilities asked for could be more than MAX_LOGPROB_ENTRIES."""
    entries = 0
    for request in requests:
        sampling, prompt = request.sampling, len(request.prompt_token_ids)
        if sampling.prompt_logprobs is not None:
            entries += prompt * (sampling.prompt_logprobs + 1)
        if sampling.logprobs is not None:
            tokens = sampling.max_tokens or limits.max_model_len - prompt
            entries += sampling.n * tokens * (sampling.logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"the answer could hold {entries} log-probabilities (prompts x n x tokens x (logprobs + 1)); at "
            f"most {MAX_LOGPROB_ENTRIES} are served at once: lower max_tokens, n or logprobs",
            "logprobs",
        )
