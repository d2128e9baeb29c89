"""From Hugging Face's `config.json` to ModelConfig: the families, their keys and their class defaults.

What a key means, and what holds when it is absent, is what the model's own class in transformers makes of it
(configuration_llama.py, configuration_mistral.py, ...). A key that changes the arithmetic and is not
implemented is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config.favor import Favor
from jaxinfer.config.hugging_face_rope import rope_from_hf
from jaxinfer.config.keys import Keys
from jaxinfer.config.model import MAX_LAYERS, LayerConfig, ModelConfig
from jaxinfer.config.rope import DynamicRope, Rope, YarnRope
from jaxinfer.core import ConfigError

Windows = Callable[[Keys, int, tuple[bool, ...]], list[int | None]]
"""(keys, layers, which layers rotate) -> the window of each layer."""


def _no_windows(keys: Keys, layers: int, rotary: tuple[bool, ...]) -> list[int | None]:
    del rotary
    if keys.optional_integer("sliding_window") is not None:
        raise ConfigError(
            f"config.json: sliding_window = {keys.config['sliding_window']!r} is not supported for this "
            "architecture; allowed: null"
        )
    return _by_layer_types(keys, layers, None, [None] * layers)


def _one_window(keys: Keys, layers: int, rotary: tuple[bool, ...]) -> list[int | None]:
    """Mistral: every layer has the window, which is 4096 unless the key says otherwise; with `layer_types`
    (transformers reads such a Mistral as a Ministral) those of its layers that slide."""
    del rotary
    window = keys.optional_integer("sliding_window", absent=4096)
    return _by_layer_types(keys, layers, window, [window] * layers)


def _windows_of_upper_layers(keys: Keys, layers: int, rotary: tuple[bool, ...]) -> list[int | None]:
    """Qwen2, Qwen3: with `use_sliding_window`, `layer_types`, else the layers from `max_window_layers` on."""
    del rotary
    window = keys.optional_integer("sliding_window", absent=4096)
    window = window if keys.flag("use_sliding_window") else None
    first = keys.whole("max_window_layers", 28)
    return _by_layer_types(keys, layers, window, [window if i >= first else None for i in range(layers)])


def _windows_of_layers_without_rope(keys: Keys, layers: int, rotary: tuple[bool, ...]) -> list[int | None]:
    """SmolLM3: `layer_types`, or with `use_sliding_window` the layers that do not rotate."""
    window = keys.optional_integer("sliding_window")
    used = window if keys.flag("use_sliding_window") else None
    return _by_layer_types(keys, layers, window, [None if rotates else used for rotates in rotary])


def _by_layer_types(
    keys: Keys, layers: int, window: int | None, otherwise: list[int | None]
) -> list[int | None]:
    """The windows that `layer_types` asks for, where it is stated."""
    types = keys.config.get("layer_types")
    if types is None:
        return otherwise
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise ConfigError(
            f"config.json: layer_types must be a list of {layers} of {', '.join(known)}; got {_shown(types)}"
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError("config.json: layer_types has sliding_attention, but no sliding_window is in use")
    return [window if kind == "sliding_attention" else None for kind in types]


@dataclass(frozen=True, slots=True)
class Family:
    """What the classes of one model_type in transformers fix, and what holds where a key is absent.

    A bias of None is what the key says (`attention_bias`, `mlp_bias`). `kv_heads` and `head_dim` None: as
    many KV heads as query heads, and hidden_size / num_attention_heads.
    """

    architecture: str
    windows: Windows
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    skips_rope: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int = 32768
    theta: float = 10000.0
    tied: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _no_windows, max_position=2048),
    "mistral": Family(
        "MistralForCausalLM", _one_window, qkv_bias=False, output_bias=False, mlp_bias=False,
        kv_heads=8, max_position=131072,
    ),
    "ministral": Family(
        "MinistralForCausalLM", _one_window, qkv_bias=False, output_bias=False, mlp_bias=False,
        kv_heads=8, max_position=131072,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _windows_of_upper_layers, qkv_bias=True, output_bias=False, mlp_bias=False,
        kv_heads=32,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", _windows_of_upper_layers, mlp_bias=False, qk_norm=True, kv_heads=32, head_dim=128,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", _windows_of_layers_without_rope, skips_rope=True, kv_heads=4,
        theta=2000000.0, tied=True,
    ),
}  # fmt: skip
"""model_type -> family."""

# Keys that change the arithmetic of relatives, or of variants -> the values under which they change nothing.
_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_act": (None, "silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    "rotary_pct": (None, 1.0),
    "position_embedding_type": (None, "rope", "absolute"),
    "alibi": (None, False),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "scale_emb": (None, 1.0),
    "scale_depth": (None,),
    "query_pre_attn_scalar": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False, 0),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_mrope": (None, False),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None,),
    "cross_attention_layers": (None,),
    "block_configs": (None,),
    "num_kv_shared_layers": (None, 0),
    "layernorm_type": (None, "rmsnorm"),
    "norm_type": (None, "rmsnorm"),
    "dual_chunk_attention_config": (None,),
    "logit_softcapping": (None,),
    "embedding_scale": (None, 1.0),
    "embed_scale": (None, 1.0),
    "residual_scale": (None, 1.0),
    "scale_embeddings": (None, False),
    "lm_head_multiplier": (None, 1.0),
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "use_post_norm": (None, False),
    "attn_output_gate": (None, False),
    "v_head_dim": (None,),
    "rope_interleaved": (None, False),
    "moe_num_experts": (None, 0, 1),
    "moe_intermediate_size": (None, 0),
    "head_dim_list": (None,),
    "use_rope": (None, True),
    "rope_ratio": (None, 1.0),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "attention_scale": (None,),
    "sliding_window_pattern": (None,),
    "pruned_heads": (None, {}, []),
    "compression_config": (None,),
}
# Switches of one family that are no switches of the others, where they would be passed over.
_OF_SOME: dict[str, tuple[str, ...]] = {
    "use_sliding_window": ("qwen2", "qwen3", "smollm3"),
    "no_rope_layers": ("smollm3",),
    "no_rope_layer_interval": ("smollm3",),
}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    keys = Keys(config, "config.json")
    family = _family(config)
    for key, harmless in _NOT_IMPLEMENTED.items():
        value = config.get(key)
        if not any(value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless):
            raise ConfigError(f"config.json: {key} = {_shown(value)} is not supported; allowed: {harmless}")
    for key, families in _OF_SOME.items():
        if config.get(key) and family not in [FAMILIES[name] for name in families]:
            raise ConfigError(
                f"config.json: {key} = {_shown(config[key])} means nothing to {family.architecture}; "
                f"it belongs to {', '.join(families)}"
            )
    heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    layers = keys.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers {layers} is more than the {MAX_LAYERS} allowed")
    max_position = keys.integer("max_position_embeddings", family.max_position)
    rope = rope_from_hf(config, family.theta, max_position)
    rotary = _rotary(keys, layers) if family.skips_rope else (True,) * layers
    windows = family.windows(keys, layers, rotary)
    kv_heads = _kv_heads(keys, family, heads, layers)
    favors = _favors(keys, windows)
    owners = _owners(keys, layers)
    head_dim = keys.optional_integer("head_dim", absent=family.head_dim)
    if head_dim is None and width % heads:
        raise ConfigError(
            f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}; "
            "such a model must state its head_dim"
        )
    head_dim = width // heads if head_dim is None else head_dim
    bias = keys.flag("attention_bias")
    qkv_bias = bias if family.qkv_bias is None else family.qkv_bias
    # Keys of relatives that the classes here do not read -> what they do, which is what the key must say.
    for key, done in {"qkv_bias": qkv_bias, "qk_norm": family.qk_norm, "rotary_dim": head_dim}.items():
        value = config.get(key)
        if value is not None and (value != done or isinstance(value, bool) != isinstance(done, bool)):
            raise ConfigError(
                f"config.json: {key} = {_shown(value)} is not supported for {family.architecture} here; "
                f"allowed: {done!r} or no such key"
            )
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=width,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=heads,
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(count, window, rotates, favor=favor, kv_from=owner)
            for count, window, rotates, favor, owner in zip(
                kv_heads, windows, rotary, favors, owners, strict=True
            )
        ),
        max_position=_longest(rope, max_position),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tied),
        qkv_bias=qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=keys.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        bos_token_id=keys.optional_whole("bos_token_id"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
    )


def _family(config: Mapping[str, Any]) -> Family:
    """By `architectures`, else by `model_type`, else Llama; the two must agree."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    names = [family.architecture for family in FAMILIES.values()]
    if architectures:
        found = next((f for f in FAMILIES.values() if architectures == [f.architecture]), None)
        if found is None:
            raise ConfigError(
                f"config.json: architectures {_shown(architectures)} is not supported; "
                f"allowed: one of {', '.join(names)}"
            )
    else:
        found = None
    if model_type is not None:
        by_type = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if by_type is None:
            raise ConfigError(
                f"config.json: model_type {_shown(model_type)} is not supported; "
                f"allowed: {', '.join(FAMILIES)}"
            )
        if found is not None and by_type is not found:
            raise ConfigError(
                f"config.json: architectures {architectures} and model_type {model_type!r} contradict"
            )
        found = by_type
    return found or FAMILIES["llama"]


def _kv_heads(keys: Keys, family: Family, heads: int, layers: int) -> list[int]:
    """One number for all layers, or a list with one for each: under `num_key_value_heads` (as this project
    and GGUF write it) or `num_key_value_heads_per_layer` (DeciLM's key)."""
    for key in ("num_key_value_heads_per_layer", "num_key_value_heads"):
        value = keys.config.get(key)
        if key.endswith("per_layer") and value is not None and not isinstance(value, list):
            raise ConfigError(f"config.json: {key} must be a list with a number for each layer")
        if isinstance(value, list):
            if len(value) != layers:
                raise ConfigError(f"config.json: {key} lists {len(value)} numbers for {layers} layers")
            return [Keys({key: each}, "config.json").integer(key) for each in value]
    absent = family.kv_heads if "num_key_value_heads" not in keys.config else None
    return [keys.integer("num_key_value_heads", absent or heads)] * layers


LINEAR_ATTENTION = "linear_attention"
"""This project's own key: {"layers": [3, 7], "features": 128, "seed": 0}, as `jaxinfer convert` writes it.
Other programs pass it over and run softmax attention in those layers, too."""


def with_linear_attention(config: Mapping[str, Any], layers: Sequence[int], favor: Favor) -> dict[str, Any]:
    """A config.json that says that these layers have linear attention, and no others."""
    stated = {"layers": list(layers), "features": favor.features, "seed": favor.seed}
    return {**config, LINEAR_ATTENTION: stated}


def _favors(keys: Keys, windows: list[int | None]) -> list[Favor | None]:
    """By layer: how those of `linear_attention` draw their features; None for the others."""
    favors: list[Favor | None] = [None] * len(windows)
    stated = keys.config.get(LINEAR_ATTENTION)
    if stated is None:
        return favors
    if not isinstance(stated, Mapping) or not set(stated) <= {"layers", "features", "seed"}:
        raise ConfigError(
            f"config.json: {LINEAR_ATTENTION} must hold layers, features and seed; got {_shown(stated)}"
        )
    listed, last = stated.get("layers"), len(windows) - 1
    if (
        not isinstance(listed, list)
        or any(type(index) is not int or not 0 <= index <= last for index in listed)
        or len(set(listed)) != len(listed)
    ):
        raise ConfigError(
            f"config.json: {LINEAR_ATTENTION} must list layers, each once, of 0 to {last}; "
            f"got {_shown(listed)}"
        )
    favor = Favor(**{name: stated[name] for name in ("features", "seed") if name in stated})
    for index in listed:
        if windows[index] is not None:
            raise ConfigError(
                f"config.json: layer {index} has a sliding window of {windows[index]}, and linear attention "
                f"cannot forget what has left it; leave it out of {LINEAR_ATTENTION}"
            )
        favors[index] = favor
    return favors


KV_FROM = "kv_from"
"""This project's own key: [null, 0, null, 2], as `jaxinfer convert --share-kv 2` writes it, lists the earlier
layer whose K/V each layer reads, null where it has its own. Other programs look for projections of K and V in
every layer, and do not find them."""


def with_shared_kv(config: Mapping[str, Any], owners: Sequence[int | None]) -> dict[str, Any]:
    """A config.json that says which layer's K/V each layer reads (None: its own)."""
    rest = {key: value for key, value in config.items() if key != KV_FROM}
    return rest if all(owner is None for owner in owners) else {**rest, KV_FROM: list(owners)}


def _owners(keys: Keys, layers: int) -> list[int | None]:
    """By layer, whose K/V it reads; which layers those may be, `ModelConfig` says."""
    stated = keys.config.get(KV_FROM)
    if stated is None:
        return [None] * layers
    if (
        not isinstance(stated, list)
        or len(stated) != layers
        or any(owner is not None and type(owner) is not int for owner in stated)
    ):
        raise ConfigError(
            f"config.json: {KV_FROM} must list an earlier layer or null for each of {layers} layers; "
            f"got {_shown(stated)}"
        )
    return stated


def _rotary(keys: Keys, layers: int) -> tuple[bool, ...]:
    """SmolLM3's `no_rope_layers` holds 1 for a layer WITH rotary embeddings and 0 for one without; where it
    is absent every `no_rope_layer_interval`-th layer has none."""
    marks = keys.config.get("no_rope_layers")
    if marks is None:
        interval = keys.integer("no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if not isinstance(marks, list) or len(marks) != layers or any(mark not in (0, 1) for mark in marks):
        raise ConfigError(
            f"config.json: no_rope_layers must be a list of {layers} ones and zeros; got {_shown(marks)}"
        )
    return tuple(bool(mark) for mark in marks)


def _longest(rope: Rope, max_position: int) -> int:
    """Dynamic scaling and YaRN stretch the context by their factor; YaRN's configs state either length."""
    if isinstance(rope, (DynamicRope, YarnRope)):
        return max(max_position, math.floor(rope.factor * rope.original_max_position))
    return max_position


def _token_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id: absent, one id or a list of ids."""
    ids = [] if value is None else [value] if not isinstance(value, (list, tuple)) else value
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ConfigError(f"config.json: eos_token_id must be token ids, got {_shown(value)}")
    return tuple(ids)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
