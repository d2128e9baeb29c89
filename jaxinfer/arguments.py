"""What callers hand to `LLM`: one or several of it, of any type that means the same, checked."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jaxinfer.core import RequestError, SamplingParams

Prompt = str | Seq[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Sampling = SamplingParams | Mapping[str, Any] | None
"""None: the model's own. A mapping: the model's own with these fields replaced. SamplingParams: as it is."""


def as_batch(prompts: Any) -> list[Any]:
    """One prompt or several? A list with an integer in it is one prompt, of token ids."""
    if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    items = list(prompts)
    return [items] if any(is_integer(item) for item in items) else items


def is_integer(value: Any) -> bool:
    """True for an integer of any type. An array has `__index__` too, whatever its shape."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not getattr(value, "shape", ())


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or several? A list that begins with a message is one; an empty list is none at all.

    Raises RequestError for what is neither.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise RequestError(
            f"messages must be a list of {{role, content}} objects, or a list of such lists, "
            f"got {_shown(messages)}",
            "messages",
        )
    items = list(messages)
    return [items] if items and isinstance(items[0], Mapping) else items


def one_each(params: Any, count: int, what: str) -> list[Sampling]:
    """One sampling for each of `count` things, from one for all of them or a list of `count`."""
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [params] * count
    if not isinstance(params, Seq) or isinstance(params, (str, bytes)):
        raise RequestError(
            f"sampling_params must be SamplingParams, a mapping of its fields, or a list of these, "
            f"got {_shown(params)}",
            "sampling_params",
        )
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} {what}", "sampling_params")
    return list(params)


def one_of(name: str, value: Any, other: str, same: Any) -> Any:
    """The value of a parameter that has two names, of which one may be used."""
    if value is not None and same is not None:
        raise RequestError(f"{name} and {other} are the same; give one of them", other)
    return same if value is None else value


def options_each(options: Mapping[str, Any], count: int, what: str) -> list[dict[str, Any]]:
    """The options of each of `count` requests, by name: a list (or tuple) has one value for each of them, and
    what is none is for all. Raises RequestError for a list of another length."""
    for name, value in options.items():
        if isinstance(value, (list, tuple)) and len(value) != count:
            raise RequestError(f"{name} has {len(value)} values for {count} {what}", name)
    return [
        {name: value[i] if isinstance(value, (list, tuple)) else value for name, value in options.items()}
        for i in range(count)
    ]


def sampling_over(own: SamplingParams, wanted: Sampling) -> SamplingParams:
    """The sampling of a request that asks for `wanted`, where the model's own is `own`.

    Raises RequestError for a field that is unknown or out of range.
    """
    if isinstance(wanted, SamplingParams):
        return wanted
    if not isinstance(wanted, (Mapping, type(None))):
        raise RequestError(
            f"sampling_params must be SamplingParams or a mapping of its fields, got {_shown(wanted)}",
            "sampling_params",
        )
    fields = dict(wanted or {})
    known = [f.name for f in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in known:
            raise RequestError(
                f"unknown sampling parameter {_shown(name)}; known: {', '.join(known)}", str(name)[:80]
            )
    most, least = own.max_tokens, fields.get("min_tokens")
    if "max_tokens" not in fields and most is not None and isinstance(least, int) and least > most:
        raise RequestError(
            f"min_tokens {least} is more than the model's own max_tokens {most} (generation_config.json); "
            "give max_tokens too",
            "min_tokens",
        )
    return dataclasses.replace(own, **fields)


def as_int(value: Any) -> Any:
    """A token id of any integer type (numpy's too) as int; what is none is passed on to `validate`."""
    return value if isinstance(value, bool) or not is_integer(value) else operator.index(value)


def check_text(text: Any, param: str) -> None:
    """Refuse what no encoding can carry: half of a surrogate pair, as broken JSON escapes leave behind."""
    if not isinstance(text, str):
        raise RequestError(f"expected text, got {_shown(text)}", param)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise RequestError(f"lone surrogate {code} at character {error.start} is not text", param) from None


def check_texts(value: Any, param: str) -> None:
    """`check_text` of every text within a JSON-like value."""
    if isinstance(value, str):
        check_text(value, param)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_texts(key, param)
            check_texts(item, param)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_texts(item, param)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
