"""GGUF metadata and tensor names in the words of a Hugging Face `config.json`.

Keys and tensor names follow the GGUF specification of the ggml project (`llama.block_count`,
`blk.0.attn_q.weight`, ...). What cannot be said in config.json is refused by name, never dropped. What a key
does is what llama.cpp does with it (convert_hf_to_gguf.py writes it, llama-model.cpp and llama-context.cpp
read it).
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from checkpoints.blocks import can_read, read_blocks
from checkpoints.errors import CheckpointError, quoted
from checkpoints.gguf_header import ArrayField, GGUFHeader

# architecture in the file -> (Hugging Face class, are q and k rows stored permuted?)
# The converter permutes every model that its LlamaModel class handles: Llama, Mistral and SmolLM3.
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "smollm3": ("SmolLM3ForCausalLM", True),
}
# Every fourth layer of SmolLM3 has no rotary embeddings. No key says so: llama.cpp has it in its code.
SMOLLM3_NO_ROPE_INTERVAL = 4
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
# Keys that change the arithmetic and have no counterpart here -> the values under which they change nothing.
# Without any such value the key itself is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_feed_forward_length": (0,),
    "moe_every_n_layers": (0,),
    "interleave_moe_layer_step": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.temperature_length": (0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.value_scale": (0.0, 1.0),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.key_length_mla": (),
    "attention.value_length_mla": (),
    "attention.key_length_swa": (),
    "attention.value_length_swa": (),
    "attention.sliding_window_pattern": (),
    "attention.shared_kv_layers": (0,),
    "full_attention_interval": (),
    "rope.freq_base_swa": (),
    "rope.dimension_count_swa": (),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "embedding_length_per_layer_input": (0,),
    "altup.num_inputs": (0, 1),
    "activation_sparsity_scale": (),
    "swiglu_clamp_exp": (0.0,),
    "swiglu_clamp_shexp": (0.0,),
    "swin_norm": (False,),
}
_SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
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
    # One spelling only, so that no two tensors of a file get the same name.
    match = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,8})\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise CheckpointError(f"{header.path}: tensor {name} belongs to no supported architecture")
    return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def is_permuted(header: GGUFHeader) -> bool:
    """Whether the rows of q and k are stored in the order of llama.cpp's converter for Llama."""
    return ARCHITECTURES[_Fields(header).text("general.architecture")][1]


def translate_config(header: GGUFHeader) -> dict[str, Any]:
    """The metadata of the file under config.json's keys.

    `num_key_value_heads` is a list with one number per layer where the layers differ. Raises CheckpointError
    when a key is missing or of the wrong type, contradicts the tensors, or asks for something (experts,
    unknown rope scaling) that these keys cannot express.
    """
    fields, path = _Fields(header), header.path
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {quoted(architecture)} is not supported; "
            f"allowed: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    kind = fields.text("general.type", "model")
    if kind != "model":  # an adapter, a projector, a vocabulary alone, ...
        raise CheckpointError(f"{path}: key general.type: got {quoted(kind)}, expected 'model'")
    if fields.whole("split.count", 1) > 1:
        raise CheckpointError(f"{path}: one part of a split GGUF; merge the parts first (gguf-split --merge)")
    _refuse_unknown_arithmetic(header, prefix)
    layers = fields.positive(prefix + "block_count")
    found = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(found) != layers:  # before anything is made for each layer
        raise CheckpointError(
            f"{path}: key {prefix}block_count: got {layers}, but the tensors belong to {len(found)} layers"
        )
    hidden = fields.positive(prefix + "embedding_length")
    heads = fields.same_per_layer(prefix + "attention.head_count", layers)
    head_dim = fields.positive(prefix + "attention.key_length", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(
            f"{path}: key {prefix}attention.key_length: got {head_dim}, expected an even one"
        )
    value_dim = fields.whole(prefix + "attention.value_length", head_dim)
    rotated = fields.whole(prefix + "rope.dimension_count", head_dim)
    for key, got in (("attention.value_length", value_dim), ("rope.dimension_count", rotated)):
        if got != head_dim:
            raise CheckpointError(f"{path}: key {prefix}{key}: got {got}, expected the head width {head_dim}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    _check_special_ids(fields, embedding.shape[0])
    eos_ids = end_token_ids(header)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture][0]],
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.per_layer(prefix + "attention.head_count_kv", layers, heads),
        "head_dim": head_dim,
        "intermediate_size": fields.same_per_layer(prefix + "feed_forward_length", layers),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": fields.positive(prefix + "context_length"),
        "rms_norm_eps": fields.real(prefix + "attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real(prefix + "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, fields, prefix, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": fields.optional_whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids) or None,
        "pad_token_id": fields.optional_whole("tokenizer.ggml.padding_token_id"),
    }
    window = fields.whole(prefix + "attention.sliding_window", 0)
    if window:
        if architecture != "llama":  # not every layer of such a model has the window, and no key says which
            raise CheckpointError(f"{path}: key {prefix}attention.sliding_window: got {window}, expected 0")
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if architecture == "smollm3":
        interval = SMOLLM3_NO_ROPE_INTERVAL
        config["no_rope_layer_interval"] = interval
        config["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if architecture != "qwen2":  # whose class has biases on q, k and v without a key
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if architecture in ("llama", "smollm3"):
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    return config


def _refuse_unknown_arithmetic(header: GGUFHeader, prefix: str) -> None:
    for key, neutral in _NEUTRAL.items():
        if prefix + key not in header.fields:
            continue
        value = header.fields[prefix + key]
        if value not in neutral:
            got = "an array" if isinstance(value, ArrayField) else quoted(value)
            raise CheckpointError(
                f"{header.path}: key {prefix}{key}: got {got}, which is not supported; "
                f"allowed: {' or '.join(map(str, neutral)) or 'no such key'}"
            )


def _check_special_ids(fields: _Fields, vocabulary: int) -> None:
    """An id outside the vocabulary stands for nothing: a text would begin with it, or never end."""
    for name in _SPECIAL_IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        found = fields.optional_whole(key)
        if found is not None and found >= vocabulary:
            raise CheckpointError(
                f"{fields.header.path}: key {key}: got {found}, outside the vocabulary of {vocabulary}"
            )


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn and of message, without repeats."""
    fields = _Fields(header)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [fields.optional_whole(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(item for item in found if item is not None))


def _rope_scaling(header: GGUFHeader, fields: _Fields, prefix: str, head_dim: int) -> dict[str, Any] | None:
    """As llama.cpp has it: without a type a factor is a linear one, with the type "none" it means nothing."""
    path = header.path
    factor = fields.real(prefix + "rope.scaling.factor", fields.real(prefix + "rope.scale_linear", 0.0))
    kind = fields.text(prefix + "rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    original = fields.optional_whole(prefix + "rope.scaling.original_context_length")
    attention = fields.real(prefix + "rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and attention != 1.0:
        raise CheckpointError(
            f"{path}: key {prefix}rope.scaling.attn_factor: got {attention} with rope scaling "
            f"{quoted(kind)}, expected 1.0 (it is supported with yarn)"
        )
    if ROPE_FACTORS in header.tensors:
        if kind not in ("none", "llama3"):
            raise CheckpointError(
                f"{path}: both {ROPE_FACTORS} and rope scaling {quoted(kind)}; expected one"
            )
        return _llama3_scaling(header, fields.real(prefix + "rope.freq_base", 10000.0), head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{path}: rope scaling {quoted(kind)} is not supported; allowed: none, linear, yarn"
        )
    if factor <= 0.0:
        raise CheckpointError(f"{path}: key {prefix}rope.scaling.factor: got {factor}, expected more than 0")
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        if f"{prefix}rope.scaling.yarn_{key}" in header.fields:
            scaling[key] = fields.real(f"{prefix}rope.scaling.yarn_{key}")
    return scaling | _yarn_attention_factor(header, fields, prefix, factor)


def _yarn_attention_factor(
    header: GGUFHeader, fields: _Fields, prefix: str, factor: float
) -> dict[str, float]:
    """`attention_factor`, Hugging Face's final factor on cos and sin, where the file states one.

    Two keys concern it, in different senses. `attn_factor` is a further factor: llama.cpp multiplies cos and
    sin by attn_factor * (0.1 ln(factor) + 1), the second term (YaRN, equation 22) whether the key is there or
    not. `yarn_attn_factor` is what the converter copies from `attention_factor` as it is; llama.cpp itself
    does not read it for these architectures, and what the model's own config says is taken to be meant.
    """
    further, final = prefix + "rope.scaling.attn_factor", prefix + "rope.scaling.yarn_attn_factor"
    if final in header.fields:
        if further in header.fields:
            raise CheckpointError(f"{header.path}: got both keys {further} and {final}, expected one of them")
        return {"attention_factor": fields.real(final)}
    if further not in header.fields:
        return {}  # Hugging Face's default is the same second term
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return {"attention_factor": fields.real(further) * usual}


def _llama3_scaling(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    entry = header.tensors[ROPE_FACTORS]
    if entry.shape != (head_dim // 2,) or not can_read(entry.block_type):
        raise CheckpointError(
            f"{header.path}: tensor {ROPE_FACTORS}: got shape {entry.shape} of {entry.block_type.name}, "
            f"expected {head_dim // 2} floats"
        )
    if theta <= 0.0:
        raise CheckpointError(f"{header.path}: rope.freq_base: got {theta}, expected more than 0")
    values = read_blocks(header.data(entry), entry.block_type, entry.shape)
    stored = np.asarray(values, np.float64).reshape(-1)
    for rule in _LLAMA3_RULES:
        expected = llama3_rope_factors(theta, head_dim, *rule)
        if np.allclose(stored, expected, rtol=1e-4):
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
            raise self._wrong(key, quoted(value), expected)
        return value

    def _wrong(self, key: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.header.path}: key {key}: got {got}, expected {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default, "text")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more."""
        value = self._get(key, int, default, "a whole number")
        if value < 0:
            raise self._wrong(key, str(value), "a whole number of 0 or more")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.whole(key, default)
        if value < 1:
            raise self._wrong(key, str(value), "a whole number of 1 or more")
        return value

    def optional_whole(self, key: str) -> int | None:
        return self.whole(key) if key in self.header.fields else None

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, (int, float), default, "a number")
        if not abs(value) < 3e38:  # the range of float32; NaN fails too
            raise self._wrong(key, str(value), "a finite number")
        # Stored as float32: 9.999999747378752e-06 was written as 1e-05, and its shortest spelling says so.
        return float(str(np.float32(value)))

    def per_layer(self, key: str, layers: int, default: int | None = None) -> int | list[int]:
        """A positive number, from a number or an array of equal ones; a list from an array that differs."""
        if not isinstance(self.header.fields.get(key), ArrayField):
            return self.positive(key, default)
        values = self.header.array(key)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
            raise self._wrong(key, "another array", "an array of whole numbers")
        if len(values) != layers:
            raise self._wrong(key, f"{len(values)} numbers", f"one for each of the {layers} layers")
        if values.min() < 1:
            raise self._wrong(key, str(values.min()), "whole numbers of 1 or more")
        return int(values[0]) if values.min() == values.max() else values.tolist()

    def same_per_layer(self, key: str, layers: int) -> int:
        """`per_layer`, where Hugging Face has one number for all layers."""
        value = self.per_layer(key, layers)
        if isinstance(value, list):
            raise self._wrong(key, f"numbers that differ by layer ({quoted(value)})", "one for all layers")
        return value
