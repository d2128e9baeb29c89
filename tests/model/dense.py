"""A Llama forward pass as one reads it in the papers: dense, float64, numpy, none of the code under test."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import favor_by_hand
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import DynamicRope, LinearRope, Llama3Rope, ModelConfig, Rope, StepShape, YarnRope
from jaxinfer.core import Limits, RequestOutput, Slice, StepPlan
from jaxinfer.model.favor import random_features
from jaxinfer.model.kv import WriteSlots, create_kv
from jaxinfer.runtime import inputs
from pallas_kernels import RaggedBatch
from pallas_kernels.batch import TILE_SIZES, fill_tiles, tile_capacity

Tensors = dict[str, np.ndarray]


def frequencies(rope: Rope, head_dim: int, length: int = 0) -> list[float]:
    """Radians per position of each pair, one by one, in Python floats, in a text of `length` tokens."""
    result = []
    theta = rope.theta
    if isinstance(rope, DynamicRope) and length > rope.original_max_position:
        stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    for pair in range(head_dim // 2):
        frequency = 1.0 / theta ** (2 * pair / head_dim)
        if isinstance(rope, LinearRope):
            frequency /= rope.factor
        elif isinstance(rope, Llama3Rope):
            wavelength = 2 * math.pi / frequency
            longest = rope.original_max_position / rope.low_freq_factor
            shortest = rope.original_max_position / rope.high_freq_factor
            if wavelength > longest:
                frequency /= rope.factor
            elif wavelength >= shortest:
                smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        elif isinstance(rope, YarnRope):
            ends = []
            for turns in (rope.beta_fast, rope.beta_slow):  # the pair that turns so often, by its wavelength
                wavelength = rope.original_max_position / turns
                ends.append(head_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(theta))
            low, high = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
            low, high = max(low, 0), min(high, head_dim - 1)
            share = (pair - low) / (high - low if high != low else 0.001)
            share = min(max(share, 0.0), 1.0)
            frequency = frequency / rope.factor * share + frequency * (1 - share)
        result.append(frequency)
    return result


def rotated(x: np.ndarray, rope: Rope) -> np.ndarray:
    """x [T, heads, H], token t at position t of a text of T tokens: pairs are (i, i + H / 2)."""
    tokens, _, width = x.shape
    angles = np.outer(np.arange(tokens), frequencies(rope, width, tokens))[:, None, :]
    scale = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    low, high = x[..., : width // 2], x[..., width // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


Mask = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(layer, q [T, G, H] of the query heads of one KV head, its k [T, H]) -> bool [T, T], causality apart."""


def dense_logits(
    config: ModelConfig, tensors: Tensors, tokens: list[int], mask: Mask | None = None
) -> np.ndarray:
    """[T, V] float64. `mask`: which keys queries see, in place of what the layers of `config` say."""
    held = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    count, width = len(tokens), config.head_dim

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ held[f"{name}.weight"].T + held.get(f"{name}.bias", 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + config.rms_norm_eps) * held[f"{name}.weight"]

    x = held["model.embed_tokens.weight"][tokens]
    position = np.arange(count)
    owned: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # K and V, by the layer that makes them
    for index, layer in enumerate(config.layers):
        at = f"model.layers.{index}"
        y = norm(x, f"{at}.input_layernorm")
        made = "q" if layer.kv_from is not None else "qkv"
        q, *own = (linear(y, f"{at}.self_attn.{n}_proj").reshape(count, -1, width) for n in made)
        if config.qk_norm:
            q = norm(q, f"{at}.self_attn.q_norm")
            own = [norm(own[0], f"{at}.self_attn.k_norm"), own[1]] if own else own
        if layer.rotary:
            q = rotated(q, config.rope)
            own = [rotated(own[0], config.rope), own[1]] if own else own
        if own:
            owned[index] = own[0], own[1]
        k, v = owned[index if layer.kv_from is None else layer.kv_from]
        seen = position[None, :] <= position[:, None]
        if layer.window is not None and mask is None:
            seen &= position[:, None] - position[None, :] < layer.window
        group = config.num_heads // layer.num_kv_heads
        seen = np.broadcast_to(seen, (layer.num_kv_heads, count, count))
        if mask is not None:
            grouped = q.reshape(count, layer.num_kv_heads, group, width)
            heads = range(layer.num_kv_heads)
            seen = seen & np.stack([mask(index, grouped[:, head], k[:, head]) for head in heads])
        attended = np.zeros((count, config.num_heads, width))
        for head in range(config.num_heads):
            shared = head // group
            scores = q[:, head] @ k[:, shared].T / math.sqrt(width)
            if layer.favor is not None:
                features = random_features(layer.favor, width)
                scores = favor_by_hand.log_kernel(q[:, head], k[:, shared], features, width**-0.5)
            scores = np.where(seen[shared], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
        x = x + linear(attended.reshape(count, -1), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(y, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    x = norm(x, "model.norm")
    return linear(x, "model.embed_tokens" if config.tie_word_embeddings else "lm_head")


def dense_logprobs(
    config: ModelConfig, tensors: Tensors, tokens: list[int], mask: Mask | None = None
) -> np.ndarray:
    """[T, V] of the next token after each, under a mask as `dense_logits` takes it."""
    logits = dense_logits(config, tensors, tokens, mask)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check_told(
    output: RequestOutput, logprobs: Callable[[tuple[int, ...], int], np.ndarray], atol: float, what: str
) -> None:
    """Every prompt token's logprob that was asked for, every answer's, and that answers are the likeliest.
    `logprobs(tokens, num_prompt)` [T, V] says what is right."""
    prompt = tuple(output.prompt_token_ids)
    for part in output.outputs:
        answer = logprobs((*prompt, *part.token_ids), len(prompt))
        assert part.logprobs is not None
        for at, (token, told) in enumerate(zip(part.token_ids, part.logprobs, strict=True), len(prompt) - 1):
            assert abs(told[token].logprob - answer[at, token]) < atol, f"answer {what} at {at}"
            assert answer[at].max() - answer[at, token] < atol
        for at, told in enumerate(output.prompt_logprobs or ()):
            if told is not None:
                token = prompt[at]
                assert abs(told[token].logprob - answer[at - 1, token]) < atol, f"prompt {what} at {at}"


def chunk_logits(
    config: ModelConfig, graph: nnx.GraphDef, state: nnx.State, tokens: list[int], page_size: int = 16
) -> np.ndarray:
    """[T, V] of `Llama` itself: the tokens as one chunk of one row, over pages in falling order."""
    count = len(tokens)
    pages = -(-count // page_size)
    table = np.arange(pages, 0, -1, dtype=np.int32)
    positions = np.arange(count, dtype=np.int32)
    tiles, num_tiles = fill_tiles([(0, 0, count)], tile_capacity(count, 1))
    batch = RaggedBatch(
        np.zeros(count, np.int32),
        positions,
        table[None],
        np.asarray([count], np.int32),
        tiles,
        num_tiles,
        TILE_SIZES,
    )
    slots = WriteSlots(table[positions // page_size], positions % page_size, np.ones(1, np.int32))
    dtype = jax.tree.leaves(state)[0].dtype
    lengths = jnp.asarray([count], jnp.int32)

    @jax.jit
    def forward(state, tokens, batch, slots):
        model = nnx.merge(graph, state)
        hidden, _ = model(
            tokens, create_kv(config, pages + 1, page_size, dtype, 1), batch, slots, lengths, decode_rows=0
        )
        return model.logits(hidden)

    return np.asarray(forward(state, jnp.asarray(tokens, jnp.int32), batch, slots))


def paged_logits(
    config: ModelConfig, graph: nnx.GraphDef, state: nnx.State, tokens: list[int], counts: list[int]
) -> np.ndarray:
    """[T, V] of the tokens run in slices of `counts`, as the engine packs them: chunks, then decode rows.

    Pages of 8 from a shuffled pool; those behind every window are handed on to later positions.
    """
    size, total = 8, len(tokens)
    limits = Limits(
        num_pages=2, page_size=size, max_num_seqs=1, max_num_batched_tokens=max(counts),
        max_model_len=total, vocab_size=config.vocab_size, window=config.window,
    )  # fmt: skip
    num_pages = 1 + limits.most_pages(total, max(counts))
    free = np.random.default_rng(0).permutation(np.arange(1, num_pages)).tolist()
    kv = create_kv(config, num_pages, size, jax.tree.leaves(state)[0].dtype, 1)
    pages: list[int] = []
    logits, start = [], 0

    @functools.partial(jax.jit, static_argnames="shape")
    def run(state, kv, buffer, *, shape):
        parts = inputs.unpack(
            inputs.layout(shape, -(-total // size), 1, bool(kv.states)).split(buffer), shape
        )
        hidden, kv = nnx.merge(graph, state)(
            parts.tokens, kv, parts.batch, parts.slots, parts.num_prompt, decode_rows=shape.decode_rows
        )
        return nnx.merge(graph, state).logits(hidden), kv

    for count in counts:
        for index in range(limits.first_page(start)):
            if pages[index]:
                free.append(pages[index])
                pages[index] = 0
        while len(pages) * size < start + count:
            pages.append(free.pop())
        piece = Slice(
            uid=0, start=start, tokens=tuple(tokens[start : start + count]), pages=tuple(pages), emit=True,
            num_prompt=total, state_place=1,
        )  # fmt: skip
        shape = StepShape(1, 1, 0) if count == 1 else StepShape(max(counts), 0, 1)
        buffer, _ = inputs.pack(
            StepPlan(0, (piece,)), shape, table_width=-(-total // size), page_size=size,
            num_pages=num_pages, vocab_size=config.vocab_size, most_emitting=1, window=config.window,
            num_states=1 if config.linear_layers else 0,
        )  # fmt: skip
        got, kv = run(state, kv, jnp.asarray(buffer), shape=shape)
        logits.append(np.asarray(got)[:count])
        start += count
    return np.concatenate(logits)
