"""Small GGUF files for tests, written with the gguf package, from weights in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

LAYER_SHAPES = {
    "attn_norm": ("input_layernorm", lambda d, q, k, f: (d,)),
    "attn_q": ("self_attn.q_proj", lambda d, q, k, f: (q, d)),
    "attn_k": ("self_attn.k_proj", lambda d, q, k, f: (k, d)),
    "attn_v": ("self_attn.v_proj", lambda d, q, k, f: (k, d)),
    "attn_output": ("self_attn.o_proj", lambda d, q, k, f: (d, q)),
    "ffn_norm": ("post_attention_layernorm", lambda d, q, k, f: (d,)),
    "ffn_gate": ("mlp.gate_proj", lambda d, q, k, f: (f, d)),
    "ffn_up": ("mlp.up_proj", lambda d, q, k, f: (f, d)),
    "ffn_down": ("mlp.down_proj", lambda d, q, k, f: (d, f)),
}


def permute_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: halves of each head become pairs."""
    rows = weights.shape[0]
    halves = weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def random_weights(
    hidden: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 8,
    ffn: int = 96,
    vocab: int = 40,
    layers: int = 2,
) -> dict[str, np.ndarray]:
    """Weights of a tiny Llama under Hugging Face names."""
    generator = np.random.default_rng(0)

    def new(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": new(vocab, hidden), "model.norm.weight": new(hidden)}
    for layer in range(layers):
        for name, shape in LAYER_SHAPES.values():
            size = shape(hidden, heads * head_dim, kv_heads * head_dim, ffn)
            weights[f"model.layers.{layer}.{name}.weight"] = new(*size)
    return weights


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 8,
    layers: int = 2,
    block_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
) -> Path:
    """Write `weights` as llama.cpp's converter would; `fields` are further or other metadata keys."""
    writer = GGUFWriter(path, architecture)
    embedding = weights["model.embed_tokens.weight"]
    values: dict[str, Any] = {
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": embedding.shape[1],
        f"{architecture}.feed_forward_length": weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
    }
    values |= fields or {}
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tokens is not None:
        writer.add_token_list(tokens)
    names = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
    names["lm_head.weight"] = "output"
    stored: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        if name in names:
            stored[f"{names[name]}.weight"] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        short = next(key for key, (long, _) in LAYER_SHAPES.items() if long == module)
        if short in ("attn_q", "attn_k") and architecture == "llama":
            array = permute_rows(array, heads if short == "attn_q" else kv_heads)
        stored[f"blk.{layer}.{short}.{kind}"] = array
    for name, array in (stored | (extra or {})).items():
        if array.ndim == 1 or block_type == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(array), block_type), raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
