"""GGUF metadata and tensor names in the words of a Hugging Face `config.json`.

Keys and tensor names follow the GGUF specification of the ggml project (`llama.block_count`,
`blk.0.attn_q.weight`, ...). What cannot be said in config.json is refused by name, never dropped.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from checkpoints.blocks import read_blocks
from checkpoints.errors import CheckpointError
from checkpoints.gguf_header import ArrayField, GGUFHeader

# architecture in the file -> (Hugging Face class, are q and k rows stored permuted?)
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
}
ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_YARN_NAMES = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
}
# The published llama3 rope rules, (factor, low, high, original length): the file holds only the resulting
# factors per frequency, so the rule is found again by computing what each would have written.
_LLAMA3_RULES = tuple(
    (factor, 1.0, 4.0, length) for factor in (8.0, 16.0, 32.0, 4.0, 2.0) for length in (8192, 4096, 2048)
)


def hugging_face_name(header: GGUFHeader, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for a table that is not a weight (rope factors).

    Raises CheckpointError for a tensor that no Llama-family model has.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if name == ROPE_FACTORS or name.endswith(".attn_rot_embd.inv_freq"):
        return None
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise CheckpointError(f"{header.path}: tensor {name} belongs to no supported architecture")
    return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def translate_config(header: GGUFHeader) -> dict[str, Any]:
    """The metadata of the file under config.json's keys.

    Raises CheckpointError when a key is missing or of the wrong type, or asks for something (experts,
    per-layer head counts, unknown rope scaling) that these keys cannot express.
    """
    fields, path = _Fields(header), header.path
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported; allowed: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    if fields.whole("split.count", 1) > 1:
        raise CheckpointError(f"{path}: one part of a split GGUF; merge the parts first (gguf-split --merge)")
    if fields.whole(prefix + "expert_count", 0) > 0:
        raise CheckpointError(f"{path}: key {prefix}expert_count: mixture-of-experts is not supported")
    hidden = fields.whole(prefix + "embedding_length")
    heads = fields.per_layer(prefix + "attention.head_count")
    if heads <= 0:
        raise CheckpointError(f"{path}: key {prefix}attention.head_count: got {heads}, expected 1 or more")
    kv_heads = fields.per_layer(prefix + "attention.head_count_kv", heads)
    head_dim = fields.whole(prefix + "attention.key_length", hidden // heads)
    value_dim = fields.whole(prefix + "attention.value_length", head_dim)
    rotated = fields.whole(prefix + "rope.dimension_count", head_dim)
    for key, got in (("attention.value_length", value_dim), ("rope.dimension_count", rotated)):
        if got != head_dim:
            raise CheckpointError(f"{path}: key {prefix}{key}: got {got}, expected the head width {head_dim}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    class_name, _ = ARCHITECTURES[architecture]
    eos_ids = end_token_ids(header)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": fields.whole(prefix + "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.per_layer(prefix + "feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": fields.whole(prefix + "context_length"),
        "rms_norm_eps": fields.real(prefix + "attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real(prefix + "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, fields, prefix, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": fields.optional_whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids) or None,
        "pad_token_id": fields.optional_whole("tokenizer.ggml.padding_token_id"),
    }
    window = fields.optional_whole(prefix + "attention.sliding_window")
    if window:
        config["sliding_window"] = window
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    return config


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn and of message, without repeats."""
    fields = _Fields(header)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [fields.optional_whole(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(item for item in found if item is not None))


def _rope_scaling(header: GGUFHeader, fields: _Fields, prefix: str, head_dim: int) -> dict[str, Any] | None:
    path = header.path
    kind = fields.text(prefix + "rope.scaling.type", "none")
    factor = fields.real(prefix + "rope.scaling.factor", fields.real(prefix + "rope.scale_linear", 0.0))
    original = fields.optional_whole(prefix + "rope.scaling.original_context_length")
    if ROPE_FACTORS in header.tensors:
        if kind not in ("none", "llama3"):
            raise CheckpointError(f"{path}: both {ROPE_FACTORS} and rope scaling {kind!r}; expected one")
        return _llama3_scaling(header, fields.real(prefix + "rope.freq_base", 10000.0), head_dim)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if factor <= 0.0:
        raise CheckpointError(f"{path}: key {prefix}rope.scaling.factor: got {factor}, expected more than 0")
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        for key, name in _YARN_NAMES.items():
            if f"{prefix}rope.scaling.{key}" in header.fields:
                scaling[name] = fields.real(f"{prefix}rope.scaling.{key}")
        return scaling
    raise CheckpointError(f"{path}: rope scaling {kind!r} is not supported; allowed: none, linear, yarn")


def _llama3_scaling(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    entry = header.tensors[ROPE_FACTORS]
    values = read_blocks(header.data(entry), entry.block_type, entry.shape)
    stored = np.asarray(values, np.float64).reshape(-1)
    for rule in _LLAMA3_RULES:
        expected = llama3_rope_factors(theta, head_dim, *rule)
        if stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-4):
            factor, low, high, length = rule
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise CheckpointError(f"{header.path}: tensor {ROPE_FACTORS}: its factors follow no known llama3 rule")


def llama3_rope_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original_length: int
) -> np.ndarray:
    """The divisor of each rotary frequency under Llama 3's rule, f64[head_dim / 2].

    Wavelengths shorter than original_length / high keep their frequency (divisor 1), those longer than
    original_length / low are divided by `factor`, and between them the frequency is interpolated.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original_length * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


class _Fields:
    """Typed access to the scalar keys, with errors that name file and key."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header

    def _get(self, key: str, kinds: type | tuple[type, ...], default: Any, expected: str) -> Any:
        value = self.header.fields.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.header.path}: key {key} is missing")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CheckpointError(f"{self.header.path}: key {key}: got {value!r}, expected {expected}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default, "text")

    def whole(self, key: str, default: int | None = None) -> int:
        return self._get(key, int, default, "a whole number")

    def optional_whole(self, key: str) -> int | None:
        return self.whole(key) if key in self.header.fields else None

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, (int, float), default, "a number")
        # Stored as float32: 9.999999747378752e-06 was written as 1e-05, and its shortest spelling says so.
        return float(str(np.float32(value)))

    def per_layer(self, key: str, default: int | None = None) -> int:
        """A number, or an array with one number per layer that must all be equal."""
        if isinstance(self.header.fields.get(key), ArrayField):
            values = np.unique(np.asarray(self.header.array(key)))
            if len(values) != 1 or values.dtype.kind not in "iu":
                raise CheckpointError(
                    f"{self.header.path}: key {key}: differs by layer ({values.tolist()}); expected one value"
                )
            return int(values[0])
        return self.whole(key, default)
