"""The rotary embedding that a `config.json` asks for, in either spelling:

    "rope_theta": 10000.0, "rope_scaling": {"type" or "rope_type": "yarn", "factor": 4.0, ...}
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, ...}

Keys and defaults are those of transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config.keys import Keys
from jaxinfer.config.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from jaxinfer.core import ConfigError

logger = logging.getLogger(__name__)

MAX_THETA = 1e30
"""Frequencies are float32: a theta near its limit would make them 0, and every position alike."""


def rope_from_hf(config: Mapping[str, Any], default_theta: float, max_position: int) -> Rope:
    """Raises ConfigError for an unknown kind, a missing or unknown key, or spellings that contradict."""
    name, scaling = _scaling(config)
    kind = _kind(name, scaling)
    if kind not in _KINDS:
        raise ConfigError(f"config.json: rope kind {kind!r} is not supported; allowed: {', '.join(_KINDS)}")
    make, needed, optional = _KINDS[kind]
    keys = Keys(scaling, f"config.json: {name} of kind {kind!r}")
    theta = keys.optional_number("rope_theta") or Keys(config, "config.json").number(
        "rope_theta", default_theta
    )
    if not 1.0 < theta < MAX_THETA:
        raise ConfigError(f"config.json: rope_theta must be above 1 and below {MAX_THETA:g}, got {theta!r}")
    for key in needed:
        if key not in scaling:
            raise ConfigError(f"{keys.where} has no {key!r}, which is needed")
    harmless = {"partial_rotary_factor": 1.0, "factor": 1.0, "attention_factor": 1.0}
    unknown = {
        key
        for key in set(scaling) - {*needed, *optional, "rope_type", "type", "rope_theta"}
        if scaling[key] is not None and scaling[key] != harmless.get(key)
    } - {"original_max_position_embeddings"}  # which kinds that do not scale by it carry along
    if unknown:
        raise ConfigError(f"{keys.where} has unknown keys {sorted(unknown)}")
    # Some state the length they were trained for beside the scaling; transformers prefers that one.
    stated = Keys(config, "config.json").optional_integer("original_max_position_embeddings")
    stated = stated or keys.optional_integer("original_max_position_embeddings")
    if kind == "llama3" and stated is None:
        logger.warning(
            "%s states no original_max_position_embeddings: max_position_embeddings %d is taken for it",
            keys.where, max_position,
        )  # fmt: skip
    original = stated or max_position
    return make(theta, keys, original, max_position)


def _scaling(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    found = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    for name, scaling in found.items():
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"config.json: {name} must be an object, got {scaling!r}")
        nested = [key for key, value in scaling.items() if isinstance(value, Mapping)]
        if nested:
            raise ConfigError(
                f"config.json: {name} differs by kind of layer ({nested}); expected one for all"
            )
    if len(found) == 2:
        old, new = found["rope_scaling"], found["rope_parameters"]
        shared = (set(old) & set(new)) - {"type", "rope_type"}
        if _kind("rope_scaling", old) != _kind("rope_parameters", new) or any(
            old[k] != new[k] for k in shared
        ):
            raise ConfigError("config.json: rope_scaling and rope_parameters contradict each other")
        return "rope_parameters", {**old, **new}
    return next(iter(found.items()), ("rope_scaling", {}))


def _kind(name: str, scaling: Mapping[str, Any]) -> str:
    kinds = {scaling[key] for key in ("rope_type", "type") if isinstance(scaling.get(key), str)}
    if len(kinds) > 1:
        raise ConfigError(f"config.json: {name} has rope_type and type, which differ: {sorted(kinds)}")
    wrong = [scaling[key] for key in ("rope_type", "type") if not isinstance(scaling.get(key), str | None)]
    if wrong:
        raise ConfigError(f"config.json: {name}: the rope kind must be text, got {wrong[0]!r}")
    return kinds.pop() if kinds else "default"


def _default(theta: float, keys: Keys, original: int, max_position: int) -> Rope:
    del keys, original, max_position
    return Rope(theta)


def _linear(theta: float, keys: Keys, original: int, max_position: int) -> Rope:
    del original, max_position
    return LinearRope(theta, keys.number("factor"))


def _dynamic(theta: float, keys: Keys, original: int, max_position: int) -> Rope:
    del original  # the formula has max_position_embeddings
    return DynamicRope(theta, _stretch(keys), max_position)


def _llama3(theta: float, keys: Keys, original: int, max_position: int) -> Rope:
    del max_position
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    if low >= high:
        raise ConfigError(f"{keys.where}: low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Rope(theta, keys.number("factor"), low, high, original)


def _yarn(theta: float, keys: Keys, original: int, max_position: int) -> Rope:
    factor = _stretch(keys, max(1.0, max_position / original))  # null is what the two lengths say
    stated = keys.optional_number("attention_factor")
    fast = keys.number("beta_fast", 32.0) if keys.config.get("beta_fast") else 32.0  # 0 is the default, too
    slow = keys.number("beta_slow", 1.0) if keys.config.get("beta_slow") else 1.0
    if fast < slow:
        raise ConfigError(f"{keys.where}: beta_fast {fast} must not be below beta_slow {slow}")
    return YarnRope(
        theta,
        factor,
        original,
        stated if stated is not None else _yarn_attention_factor(keys, factor),
        fast,
        slow,
        keys.flag("truncate", "truncate" not in keys.config),  # null is false
    )


def _yarn_attention_factor(keys: Keys, factor: float) -> float:
    """0.1 ln(factor) + 1 (YaRN, equation 22), or DeepSeek's quotient of two such terms."""

    def term(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    parts = [keys.config.get("mscale"), keys.config.get("mscale_all_dim")]
    if all(parts):
        return term(keys.number("mscale")) / term(keys.number("mscale_all_dim"))
    return term(1.0)


def _stretch(keys: Keys, default: float | None = None) -> float:
    factor = keys.number("factor", default)
    if factor < 1.0:
        raise ConfigError(f"{keys.where}: factor must be at least 1, got {factor}")
    return factor


_Make = Callable[[float, Keys, int, int], Rope]
_KINDS: dict[
    str, tuple[_Make, tuple[str, ...], tuple[str, ...]]
] = {  # kind -> make, needed keys, optional ones
    "default": (_default, (), ()),
    "linear": (_linear, ("factor",), ()),
    "dynamic": (_dynamic, ("factor",), ()),
    "llama3": (
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings",),
    ),
    "yarn": (
        _yarn,
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
