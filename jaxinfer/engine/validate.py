"""Everything about a request that can be refused before it is scheduled.

Also the one place that turns a request into numbers: how many tokens it may generate, and the seeds of
its continuations.
"""

from __future__ import annotations

from operator import countOf

from jaxinfer.core import Limits, Request, RequestError, SamplingParams

MAX_PRIORITY, MAX_SALT, MAX_TIMEOUT_S = 1000, 256, 1e9
"""Limits of Request.priority, Request.cache_salt and Request.timeout_s."""


TOO_LONG = "context_length_exceeded"
"""OpenAI's code of such an error. Clients go by it, and by «maximum context length» in the message."""


def validate(
    request: Request, limits: Limits, *, has_tokenizer: bool = True, in_vocabulary: bool = False
) -> int:
    """Check a request against what the engine holds; returns the tokens each continuation may generate.

    That is `max_tokens` where given. Where omitted it is what the model's limit and the pool hold.
    The last generated token needs no K/V, so P prompt and N generated tokens need pages for P + N - 1. With
    a window W any length runs where W - 1 keys and the token that sees them find a place. `in_vocabulary`:
    the prompt was drawn from the ids of the model, at least one, and need not be gone through.

    Raises RequestError, naming the field and all the numbers, for a request that cannot be served.
    """
    if not isinstance(request.sampling, SamplingParams):
        raise RequestError(f"sampling must be SamplingParams, got {request.sampling!r}", "sampling")
    if not in_vocabulary:
        _check_prompt(request.prompt_token_ids, limits)
    _check_stops(request.sampling, limits, has_tokenizer)
    _check_options(request, limits, has_tokenizer)
    return check_length(len(request.prompt_token_ids), request.sampling, limits)


def continuation_seed(seed: int, index: int) -> int:
    """The seed of the continuation `index` of a request that asked for `seed`; 0 .. 2**64 - 1.

    Continuation 0 has the request's own seed, so n = 1 equals the first of n = 4. The others are
    splitmix64 of seed and index: far apart for neighbouring seeds.
    """
    value = seed % 2**64
    if index == 0:
        return value
    value = (value + index * 0x9E3779B97F4A7C15) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def held_back_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """The ids that would end the request, and so may not be chosen before `min_tokens` tokens are out."""
    eos = frozenset() if sampling.ignore_eos else eos_token_ids
    return tuple(sorted(eos.union(sampling.stop_token_ids)))


def _check_prompt(ids: tuple[int, ...], limits: Limits) -> None:
    if not isinstance(ids, (tuple, list)):
        raise RequestError(f"prompt token ids must be a list of integers, got {type(ids).__name__}", "prompt")
    if not ids:
        raise RequestError("the decoder prompt cannot be empty; at least one token is needed", "prompt")
    # type() and not isinstance: True is an int, and would run as token 1.
    if countOf(map(type, ids), int) != len(ids) or min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i < limits.vocab_size)
        raise RequestError(
            f"prompt token id {wrong!r} is out of vocabulary: not an integer from 0 to "
            f"{limits.vocab_size - 1} (there are {limits.vocab_size} tokens)",
            "prompt",
        )


def _check_stops(sampling: SamplingParams, limits: Limits, has_tokenizer: bool) -> None:
    vocab = limits.vocab_size
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab:
            raise RequestError(
                f"stop_token_ids: {token} is not an integer from 0 to {vocab - 1}", "stop_token_ids"
            )
    if sampling.stop and not has_tokenizer:
        raise RequestError(
            "stop strings need a tokenizer, and this model has none; use stop_token_ids instead", "stop"
        )
    held = held_back_ids(sampling, limits.eos_token_ids) if sampling.min_tokens else ()
    # The rows of an output matrix past the tokenizer's last id are never chosen, so they leave no choice.
    choices = vocab if limits.sampled_vocab is None else limits.sampled_vocab
    allowed = sampling.allowed_token_ids
    for token in allowed or ():
        if not 0 <= token < choices:
            raise RequestError(
                f"allowed_token_ids: {token} is not an id from 0 to {choices - 1}", "allowed_token_ids"
            )
    if allowed is not None and set(allowed) <= set(held):
        raise RequestError(
            f"min_tokens {sampling.min_tokens}: every one of the allowed_token_ids would be held back",
            "min_tokens",
        )
    if sum(token < choices for token in held) >= choices:
        raise RequestError(
            f"min_tokens {sampling.min_tokens}: every one of the {choices} tokens that can be sampled would "
            "be held back",
            "min_tokens",
        )


def _check_options(request: Request, limits: Limits, has_tokenizer: bool) -> None:
    sampling, vocab = request.sampling, limits.vocab_size
    for token in sampling.logit_bias or ():
        if token >= vocab:
            raise RequestError(
                f"logit_bias: {token} is not an id from 0 to {vocab - 1} (there are {vocab} tokens)",
                "logit_bias",
            )
    for token in sampling.logprob_token_ids or ():
        if not 0 <= token < vocab:
            raise RequestError(
                f"logprob_token_ids: {token} is not an id from 0 to {vocab - 1}", "logprob_token_ids"
            )
    structure = sampling.structure
    if structure is not None and sampling.min_tokens:
        # A structure that is complete allows an end and nothing else, and min_tokens holds ends back.
        raise RequestError("min_tokens does not work together with a structured output", "min_tokens")
    if structure is not None and not has_tokenizer:
        raise RequestError(f"{structure.param} needs a tokenizer, and this model has none", structure.param)
    if sampling.bad_words and not has_tokenizer:
        raise RequestError("bad_words needs a tokenizer, and this model has none", "bad_words")
    if sampling.prompt_logprobs is not None and min(limits.max_num_batched_tokens, limits.page_size) < 2:
        raise RequestError(
            "prompt_logprobs needs a max_num_batched_tokens and a page_size of at least 2", "prompt_logprobs"
        )
    num_prompt = len(request.prompt_token_ids)
    if sampling.prompt_logprobs is not None and limits.most_pages(num_prompt, 2) > limits.usable_pages:
        raise RequestError(
            f"prompt_logprobs of {num_prompt} tokens needs {limits.most_pages(num_prompt, 2)} pages; "
            f"the KV pool has {limits.usable_pages}",
            "prompt_logprobs",
        )
    priority, salt, timeout = request.priority, request.cache_salt, request.timeout_s
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!r}",
            "priority",
        )
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT):
        raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT} characters", "cache_salt")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S
    ):
        raise RequestError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} s", "timeout_s")


def check_length(num_prompt: int, sampling: SamplingParams, limits: Limits) -> int:
    """The part of `validate` that needs no token of the prompt, only their number. Raises RequestError."""
    limit, asked = limits.max_model_len, sampling.max_tokens
    if num_prompt >= limit:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and this model's maximum context length is {limit} tokens "
            f"of prompt and output together (max_model_len); shorten the prompt to at most {limit - 1}",
            "prompt",
            TOO_LONG,
        )
    if asked is not None and num_prompt + asked > limit:
        raise RequestError(
            f"{num_prompt} tokens of prompt and max_tokens {asked} make {num_prompt + asked}, and this "
            f"model's maximum context length is {limit} tokens (max_model_len); ask for at most "
            f"{limit - num_prompt}",
            "max_tokens",
            TOO_LONG,
        )
    pages, size = limits.usable_pages, limits.page_size
    # Token by token is how a sequence runs when pages are short: then it needs the fewest at a time.
    fits = limits.most_pages(limit - 1, 1) <= pages
    capacity = limit - 1 if fits else pages * size
    pool = f"the KV pool has {pages} pages of {size} tokens"
    window = "" if limits.window is None else f" for its window of {limits.window} tokens"
    if num_prompt > capacity:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and needs {limits.most_pages(num_prompt, 1)} pages{window}; "
            f"{pool} ({capacity} tokens); shorten the prompt or start with more num_pages",
            "prompt",
        )
    most = capacity + 1 - num_prompt
    if asked is not None and asked > most:
        raise RequestError(
            f"{num_prompt} tokens of prompt and max_tokens {asked} need "
            f"{limits.most_pages(num_prompt + asked - 1, 1)} pages{window}; {pool} ({capacity} tokens); "
            f"ask for at most {most} or start with more num_pages",
            "max_tokens",
        )
    if sampling.min_tokens > most:
        raise RequestError(
            f"min_tokens {sampling.min_tokens} is more than the {most} that fit after {num_prompt} tokens of "
            f"prompt; the limit is {limit} (max_model_len) and {pool}",
            "min_tokens",
        )
    return most if asked is None else asked
