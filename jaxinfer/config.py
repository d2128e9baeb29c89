"""What runs (ModelConfig) and how it is run (EngineConfig, StepShape). Frozen, complete, strict.

`ModelConfig.from_hf` is the only place that reads Hugging Face config keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxinfer.core import ConfigError

# --------------------------------------------------------------------------------------------- model


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding without scaling: inv_freq[i] = theta ** (-2 i / H) (RoFormer, 2104.09864)."""

    theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class LinearRope(Rope):
    """Position interpolation (2306.15595): every frequency is divided by `factor`."""

    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear ramp between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder. Sizes in the alphabet of docs/shapes.md:

    vocab_size V, hidden_size D, intermediate_size F, num_layers L, num_heads N, num_kv_heads K, head_dim H.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "max_position",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model config: {name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model config: head_dim must be even for rotary embeddings, got {self.head_dim}"
            )

    @property
    def group(self) -> int:
        """G: query heads that share one KV head. Query head i reads KV head i // G."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers: 2 · L · K · H · itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def num_params(self) -> int:
        """Parameters, tied embeddings counted once."""
        d, f, q, kv = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads
        h = self.head_dim
        layer = d * (q + 2 * kv) * h + q * h * d + 3 * d * f + 2 * d
        layer += (q + 2 * kv) * h if self.attention_bias else 0
        layer += d if self.attention_output_bias else 0
        layer += 2 * f + d if self.mlp_bias else 0
        heads = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + heads + d

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`, as a dict.

        Raises ConfigError naming the key for what is missing, or changes the arithmetic and is not
        implemented here (an unknown architecture, activation, rope kind, a sliding window, ...).
        """
        return _from_hf(config)


_ARCHITECTURES = {"LlamaForCausalLM"}
_REFUSED = {  # key -> the values under which it changes nothing
    "sliding_window": (None,),
    "quantization_config": (None,),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1.0),
    "logit_scale": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "no_rope_layers": (None,),
    "layer_types": (None,),
    "hidden_act": (None, "silu", "swish"),
}


class _Keys:
    """Typed reading of a config's keys; every complaint is a ConfigError that names the key."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json"):
        self.config, self.where = config, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.where}: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where} has no {key!r}, which is needed")
        return value


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if architectures not in [[name] for name in _ARCHITECTURES]:
        raise ConfigError(
            f"architectures {architectures} is not supported; allowed: {sorted(_ARCHITECTURES)}"
        )
    for key, harmless in _REFUSED.items():
        if key in config and config[key] not in harmless:
            raise ConfigError(f"config.json: {key} = {config[key]!r} is not supported; allowed: {harmless}")
    keys = _Keys(config)
    heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    bias = keys.flag("attention_bias")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=width,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", width // heads),
        max_position=keys.integer("max_position_embeddings", 2048),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(config),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id: absent, one id or a list of ids."""
    ids = [] if value is None else [value] if not isinstance(value, (list, tuple)) else value
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ConfigError(f"config.json: eos_token_id must be token ids, got {value!r}")
    return tuple(ids)


_ROPE_KINDS: dict[str, tuple[type[Rope], dict[str, str]]] = {  # kind -> type, Hugging Face key of each field
    "default": (Rope, {}),
    "linear": (LinearRope, {"factor": "factor"}),
    "llama3": (
        Llama3Rope,
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position": "original_max_position_embeddings",
        },
    ),
}


def _rope_from_hf(config: Mapping[str, Any]) -> Rope:
    """Both spellings: rope_theta + rope_scaling {type | rope_type}, and the newer rope_parameters."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config.json: {name} must be an object, got {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise ConfigError(
            f"config.json: rope kind {kind!r} is not supported; allowed: {', '.join(_ROPE_KINDS)}"
        )
    theta = _Keys(config).number("rope_theta", 10000.0)
    if "rope_theta" in scaling:
        theta = _Keys(scaling, f"config.json: {name}").number("rope_theta")
    if kind == "default":
        return Rope(theta)
    made, fields = _ROPE_KINDS[kind]
    keys = _Keys(scaling, f"config.json: {name} of kind {kind!r}")
    values = {field: keys.number(key) for field, key in fields.items()}
    unknown = set(scaling) - set(fields.values()) - {"rope_type", "type", "rope_theta"}
    if unknown:
        raise ConfigError(f"config.json: {name} of kind {kind!r} has unknown keys {sorted(unknown)}")
    if "original_max_position" in values:
        values["original_max_position"] = int(values["original_max_position"])
    return made(theta, **values)


# -------------------------------------------------------------------------------------------- engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is run. Field names are the command-line flags and the keywords of `LLM`.

    Raises ConfigError for a value out of range, or one that this version does not implement.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and arithmetic; auto is bfloat16 on GPU and float32 on CPU."""
    max_model_len: int | None = None
    """Longest prompt + output of a request, in tokens; None is the model's own limit."""
    max_num_seqs: int = 32
    """Most sequences that run together in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step, shared by decodes (served first) and prefill chunks."""
    page_size: int = 16
    """Tokens per KV page (Z)."""
    num_pages: int | None = None
    """Pages in the pool (M); None is as many as memory_utilization allows and the limits can use."""
    memory_utilization: float = 0.9
    """Share of the device's free memory that the pool may take; on CPU the pool also stays below 1 GiB
    (or one sequence of max_model_len, if that is more), since host memory is shared with everything else."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the pages; auto is `dtype`."""
    attention_backend: Literal["auto", "xla", "reference"] = "auto"
    """Which implementation of paged attention; auto takes the best that supports the device."""
    seed: int | None = None
    """Seeds the draws of requests that bring no seed of their own; None takes one from the system."""
    compile_cache_dir: str | None = None
    """Where compiled programs are kept; None is $JAXINFER_CACHE/compile, "" keeps none."""
    warmup: Literal["full", "lazy"] = "lazy"
    """full compiles every program at start; lazy compiles each on its first use."""
    # Not served yet: any other value than these is refused by name.
    quantization: None = None
    interpret_kernels: bool = False
    enable_prefix_caching: bool = False
    scheduling_policy: Literal["fcfs"] = "fcfs"
    async_scheduling: bool = False
    batch_invariant: bool = False
    speculative: None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name, neutral in _NOT_SERVED.items():
            if getattr(self, name) != neutral:
                raise ConfigError(f"{name} is not supported yet; leave it at {neutral!r}")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                allowed = ", ".join(get_args(hint))
                raise ConfigError(f"{name} {getattr(self, name)!r} is not one of {allowed}")
        for name, low, optional in (
            ("max_model_len", 2, True), ("max_num_seqs", 1, False), ("max_num_batched_tokens", 1, False),
            ("page_size", 1, False), ("num_pages", 2, True), ("seed", -(2**63), True),
        ):  # fmt: skip
            value = getattr(self, name)
            if optional and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise ConfigError(f"memory_utilization must lie in (0, 1], got {share!r}")
        if not isinstance(self.compile_cache_dir, (str, type(None))):
            raise ConfigError(f"compile_cache_dir must be a path as text, got {self.compile_cache_dir!r}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from keywords; an unknown one is refused with the list of known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ConfigError(
                f"unknown engine option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**kwargs)


_NOT_SERVED: dict[str, Any] = {
    "quantization": None,
    "interpret_kernels": False,
    "enable_prefix_caching": False,
    "scheduling_policy": "fcfs",
    "async_scheduling": False,
    "batch_invariant": False,
    "speculative": None,
    "tensor_parallel_size": 1,
}


# --------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """A bucket: the static shape of one compiled step program.

    `tokens` T packed tokens, of which the first `decode_rows` are rows of one token; the rest hold at most
    `chunk_rows` rows of more than one. Rows B = decode_rows + chunk_rows; each may emit.
    """

    tokens: int
    decode_rows: int
    chunk_rows: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_rows

    @property
    def chunk_tokens(self) -> int:
        return self.tokens - self.decode_rows

    def holds(self, ones: int, chunks: int, chunk_tokens: int) -> bool:
        """Whether a plan of `ones` one-token slices and `chunks` longer ones fits."""
        return ones <= self.decode_rows and chunks <= self.chunk_rows and chunk_tokens <= self.chunk_tokens

    def __str__(self) -> str:
        return f"T{self.tokens}/D{self.decode_rows}/C{self.chunk_rows}"


def shape_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[StepShape, ...]:
    """The buckets, cheapest first; every plan within the two limits fits one of them.

    Decode alone: 1, 2, 4, ... rows. With chunks: 16, 32, 64, ... chunk tokens beside no decode rows, a few
    (where all of them would be much of the step), or all. (32 seqs, 512 tokens: 6 + 15 = 21 programs.)
    """
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    shapes = {StepShape(rows, rows, 0) for rows in _powers(1, most_rows)}
    for chunk_tokens in _powers(16, max_num_batched_tokens):
        top = chunk_tokens == max_num_batched_tokens
        chunk_rows = most_rows if top else min(most_rows, max(2, chunk_tokens // 8))
        choices = {0}
        if top or chunk_tokens >= most_rows:
            choices.add(most_rows)
        if chunk_tokens < 8 * most_rows:
            choices.add(min(8, most_rows))
        for decode_rows in choices:
            shapes.add(StepShape(decode_rows + chunk_tokens, decode_rows, chunk_rows))
    return tuple(sorted(shapes))


def _powers(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... below high, then high itself."""
    steps = []
    while low < high:
        steps.append(low)
        low *= 2
    return [*steps, high]
