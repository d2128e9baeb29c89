"""Small GGUF files for tests, written with the gguf package, from weights in Hugging Face layout, and random
blocks of every type that the package can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

LAYER_SHAPES = {
    "attn_norm": ("input_layernorm", lambda d, q, k, f: (d,)),
    "attn_q": ("self_attn.q_proj", lambda d, q, k, f: (q, d)),
    "attn_k": ("self_attn.k_proj", lambda d, q, k, f: (k, d)),
    "attn_v": ("self_attn.v_proj", lambda d, q, k, f: (k, d)),
    "attn_q_norm": ("self_attn.q_norm", None),
    "attn_k_norm": ("self_attn.k_norm", None),
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
    kv_heads: int | list[int] = 2,
    head_dim: int = 8,
    ffn: int = 96,
    vocab: int = 40,
    layers: int = 2,
    biases: bool = False,
    norms: bool = False,
) -> dict[str, np.ndarray]:
    """Weights of a tiny Llama under Hugging Face names; with biases of q, k and v, or norms of q and k."""
    generator = np.random.default_rng(0)

    def new(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": new(vocab, hidden), "model.norm.weight": new(hidden)}
    for layer in range(layers):
        of_layer = kv_heads[layer] if isinstance(kv_heads, list) else kv_heads
        for name, shape in LAYER_SHAPES.values():
            if shape is None:
                continue
            size = shape(hidden, heads * head_dim, of_layer * head_dim, ffn)
            weights[f"model.layers.{layer}.{name}.weight"] = new(*size)
            if biases and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                weights[f"model.layers.{layer}.{name}.bias"] = new(size[0])
        if norms:
            for norm in ("q_norm", "k_norm"):
                weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = new(head_dim)
    return weights


def random_blocks(block_type: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid blocks with random bits and finite scales, uint8[rows, bytes].

    Scales are float16 or small exponents at some place in the block, another for every type: blocks of random
    bytes whose values are all finite and of sane size are kept, and the rest drawn again.
    """
    items, size = GGML_QUANT_SIZES[block_type]
    generator = np.random.default_rng([seed, int(block_type)])
    kept = np.empty((0, size), np.uint8)
    wanted = rows * columns // items
    while len(kept) < wanted:
        blocks = generator.integers(0, 256, (4096, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = dequantize(blocks.reshape(1, -1), block_type).reshape(len(blocks), items)
        largest = np.abs(values).max(axis=1)
        kept = np.concatenate([kept, blocks[np.isfinite(largest) & (largest > 1e-3) & (largest < 1e4)]])
    return kept[:wanted].reshape(rows, -1)


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    heads: int = 8,
    kv_heads: int | list[int] = 2,
    head_dim: int = 8,
    layers: int = 2,
    block_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
    blocks: dict[str, tuple[GGMLQuantizationType, np.ndarray]] | None = None,
) -> Path:
    """Write `weights` as llama.cpp's converter would; `fields` are further or other metadata keys.

    `blocks` are a type and its stored bytes, by Hugging Face name, in the place of those tensors, with the
    rows of q and k in the order of the file.
    """
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
    ready: dict[str, tuple[GGMLQuantizationType, np.ndarray]] = {}
    for name, array in weights.items():
        if name in names:
            stored[f"{names[name]}.weight"] = array
            if name in (blocks or {}):
                ready[f"{names[name]}.weight"] = (blocks or {})[name]
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        short = next(key for key, (long, _) in LAYER_SHAPES.items() if long == module)
        if short in ("attn_q", "attn_k") and architecture in ("llama", "smollm3"):
            of_layer = kv_heads[int(layer)] if isinstance(kv_heads, list) else kv_heads
            array = permute_rows(array, heads if short == "attn_q" else of_layer)
        stored[f"blk.{layer}.{short}.{kind}"] = array
        if name in (blocks or {}):
            ready[f"blk.{layer}.{short}.{kind}"] = (blocks or {})[name]
    for name, array in (stored | (extra or {})).items():
        if name in ready:
            writer.add_tensor(name, ready[name][1], raw_dtype=ready[name][0])
        elif array.ndim == 1 or block_type == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(array), block_type), raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
