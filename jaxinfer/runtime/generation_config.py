"""What a model's generation_config.json says of sampling, as SamplingParams and end-of-text ids.

The file is Hugging Face's (`transformers.GenerationConfig`). The rules:

* A value that is listed is taken: temperature, top_k, top_p, min_p, repetition_penalty, and max_new_tokens
  as `max_tokens`. What is absent or null is SamplingParams' own default (not transformers', whose top_k
  is 50).
* `do_sample: false` stated is greedy: temperature 0, whatever temperature is listed. The listed filters stay,
  for a request that brings a temperature of its own.
* `do_sample` absent says nothing. transformers would be greedy then; but a file that lists a temperature
  means it to be used, and one that lists nothing leaves SamplingParams' default, as users of vLLM and of
  OpenAI's API expect.
* What is not served, and would change the tokens, is left out with one warning that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.core import ConfigError, RequestError, SamplingParams

logger = logging.getLogger(__name__)

_TAKEN = {  # key -> field of SamplingParams
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # key that is not served -> the values under which it does nothing
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
}


def default_sampling(generation_config: Mapping[str, Any], where: str) -> SamplingParams:
    """The sampling of requests that bring none, by the rules at the top of this module.

    where: the file, for messages. Raises ConfigError naming file and key for a value out of range. Logs one
    warning for everything that is left out.
    """
    stated = {key: value for key, value in generation_config.items() if value is not None}
    fields: dict[str, Any] = {}
    left_out: list[str] = []
    for key, name in _TAKEN.items():
        if key in stated:
            _try(where, key, name, stated[key])
            fields[name] = stated[key]
    if "do_sample" in stated:
        if not isinstance(stated["do_sample"], bool):
            raise ConfigError(f"{where}: do_sample must be true or false, got {stated['do_sample']!r:.80}")
        if not stated["do_sample"]:
            fields["temperature"] = 0.0
    for key, neutral in _NEUTRAL.items():
        if key not in stated or stated[key] in neutral:
            continue
        left_out.append(f"{key} {stated[key]!r:.80}")
    if left_out:
        logger.warning("%s: not served, so left out of the default sampling: %s", where, ", ".join(left_out))
    return SamplingParams(**fields)


def end_ids(stated: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """The ids of an `eos_token_id` value: absent (null), one id or a list of ids.

    Raises ConfigError, naming the file, for what is no id of a vocabulary of `vocab_size`.
    """
    if stated is None:
        return ()
    values = tuple(stated) if isinstance(stated, (list, tuple)) else (stated,)
    if any(not isinstance(i, int) or isinstance(i, bool) for i in values):
        raise ConfigError(f"{where}: eos_token_id must be a token id or a list of ids, got {stated!r:.80}")
    check_ids("eos_token_id", values, vocab_size, where)
    return values


def check_ids(key: str, ids: Iterable[int], vocab_size: int, where: str) -> None:
    """Raise ConfigError, naming `key` and file, for an id outside the vocabulary: it would never be met."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(f"{where}: {key} {token_id} is outside the vocabulary of {vocab_size}")


def _try(where: str, key: str, name: str, value: Any) -> None:
    """Let SamplingParams judge a value; its message, with the file's word for the field."""
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        raise ConfigError(f"{where}: {str(error).replace(name, key, 1)}") from None
