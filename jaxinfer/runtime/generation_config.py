"""What a model's generation_config.json says of sampling, as SamplingParams.

The file is Hugging Face's (`transformers.GenerationConfig`). The rules:

* A value that is listed is taken under SamplingParams' name for it (max_new_tokens is `max_tokens`,
  stop_strings is `stop`). What is absent or null is SamplingParams' own default (not transformers', whose
  top_k is 50).
* `do_sample: false` stated is greedy: temperature 0, whatever temperature is listed. The listed filters stay,
  for a request that brings a temperature of its own.
* `do_sample` absent says nothing. transformers would be greedy then; but a file that lists a temperature
  means it to be used, and one that lists nothing leaves SamplingParams' default, as users of vLLM and of
  OpenAI's API expect.
* Every other key is left out with one warning that names it, unless it is known to change no token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.core import ConfigError, RequestError, SamplingParams

logger = logging.getLogger(__name__)

_KEYS: dict[str, str | tuple[Any, ...]] = {
    # key -> field of SamplingParams
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    # key -> values under which it does nothing
    "max_length": (20,),  # what transformers writes where nobody said anything
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_return_sequences": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "force_words_ids": ([],),
    "constraints": ([],),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
}
# Ids that other code reads, what is about speed or about the form of an answer, and what concerns beams or
# encoders alone.
_INERT = frozenset(
    (
        "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
        "transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash",
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache",
        "low_memory", "disable_compile", "compile_config", "prefill_chunk_size",
        "output_attentions", "output_hidden_states", "output_scores", "output_logits",
        "return_dict_in_generate", "renormalize_logits", "early_stopping", "length_penalty",
        "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
        "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    )
)  # fmt: skip


def default_sampling(generation_config: Mapping[str, Any], where: str) -> SamplingParams:
    """The sampling of requests that bring none, by the rules at the top of this module.

    where: the file, for messages. Raises ConfigError naming file and key for a value out of range. Logs one
    warning for everything that is left out.
    """
    fields: dict[str, Any] = {}
    left_out: list[str] = []
    for key, value in generation_config.items():
        rule = _KEYS.get(key, ())
        if value is None or key in _INERT:
            continue
        if isinstance(rule, str):
            _check(where, key, rule, value)
            fields[rule] = value
        elif value not in rule:
            left_out.append(f"{key:.80} {value!r:.80}")
    sample = generation_config.get("do_sample")
    if not isinstance(sample, bool | None):
        raise _refused(where, f"do_sample must be true or false, got {sample!r:.80}")
    if sample is False:
        fields["temperature"] = 0.0
    if left_out:
        logger.warning("%s: not served, so left out of the default sampling: %s", where, ", ".join(left_out))
    return SamplingParams(**fields)


def check_ids(key: str, ids: Iterable[int], vocab_size: int, where: str) -> None:
    """Raise ConfigError, naming `key` and file, for an id outside the vocabulary: it would never be met."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(f"{where}: {key} {token_id} is outside the vocabulary of {vocab_size}")


def _check(where: str, key: str, field: str, value: Any) -> None:
    """Let SamplingParams judge a value; raises ConfigError with its message, in the file's word for it."""
    try:
        SamplingParams(**{field: value})
    except RequestError as error:
        raise _refused(where, str(error).replace(field, key, 1)) from None


def _refused(where: str, why: str) -> ConfigError:
    return ConfigError(f'{where}: {why}; generation_config="none" (--generation-config none) goes without')
