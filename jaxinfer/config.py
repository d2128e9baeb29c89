"""What runs (ModelConfig) and how it is run (EngineConfig, StepShape). Frozen, complete, strict.

`ModelConfig.from_hf` is the only place that reads Hugging Face config keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

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
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`, as a dict.

        Raises ConfigError naming the key for what is missing, or changes the arithmetic and is not
        implemented here (an unknown architecture, activation, rope kind, a sliding window, ...).
        """
        return _from_hf(config)


_ARCHITECTURES = {"LlamaForCausalLM"}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REFUSED = {  # key -> the values under which it changes nothing
    "sliding_window": (None,),
    "quantization_config": (None,),
    "pretraining_tp": (None, 1),
    "logit_scale": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "no_rope_layers": (None,),
    "layer_types": (None,),
}


def _from_hf(config: dict[str, Any]) -> ModelConfig:
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        raise ConfigError(
            f"architectures {architectures} is not supported; allowed: {sorted(_ARCHITECTURES)}"
        )
    for key in _REQUIRED:
        if key not in config:
            raise ConfigError(f"config.json has no {key!r}, which a Llama model needs")
    for key, harmless in _REFUSED.items():
        if key in config and config[key] not in harmless:
            raise ConfigError(f"config.json: {key} = {config[key]!r} is not supported; allowed: {harmless}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported; allowed: 'silu'")
    heads = config["num_attention_heads"]
    eos = config.get("eos_token_id")
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position=config.get("max_position_embeddings") or 2048,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _rope_from_hf(config: dict[str, Any]) -> Rope:
    """Both spellings: rope_theta + rope_scaling {type | rope_type}, and the newer rope_parameters."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return LinearRope(theta, float(scaling["factor"]))
        if kind == "llama3":
            return Llama3Rope(
                theta,
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ConfigError(f"config.json: rope kind {kind!r} needs the key {missing}") from None
    raise ConfigError(f"config.json: rope kind {kind!r} is not supported; allowed: default, linear, llama3")


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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if str(field.type).startswith("Literal"):
                allowed = _literal_values(str(field.type))
                if getattr(self, field.name) not in allowed:
                    raise ConfigError(
                        f"{field.name} {getattr(self, field.name)!r} is not one of {', '.join(allowed)}"
                    )
        for name, low, optional in (
            ("max_model_len", 2, True), ("max_num_seqs", 1, False), ("max_num_batched_tokens", 1, False),
            ("page_size", 1, False), ("num_pages", 2, True),
        ):  # fmt: skip
            value = getattr(self, name)
            if optional and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization must lie in (0, 1], got {self.memory_utilization!r}")
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


def _literal_values(annotation: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in annotation[len("Literal[") : -1].split(","))


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
    (where all of them would be much of the step), or all. (32 seqs, 512 tokens: 6 + 14 = 20 programs.)
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
