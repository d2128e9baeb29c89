"""What a model's heads do on a text, through `Llama.dense`: queries, keys and values of every layer, and how
far the answers move when some are changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints import Checkpoint
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError, RequestError
from jaxinfer.heads import calibration_text
from jaxinfer.model import weights
from jaxinfer.model.llama import Build, Linear, Llama
from jaxinfer.progress import phase
from jaxinfer.text.errors import TokenizerError
from jaxinfer.text.files import one_text, read_texts
from jaxinfer.text.tokenizer import load_tokenizer
from pallas_kernels import Backend

PIECE = 256
"""Tokens of one text: the calibration text is cut into pieces that are read one by one."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one layer, rotated, as attention takes them: q [texts, S, N, H], k and v [texts, S, K, H]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def calibration_pieces(checkpoint: Checkpoint, file: Path | None, most_tokens: int) -> np.ndarray:
    """Up to `most_tokens` tokens of `file` (None: the built-in text; .jsonl has a text a line), int32
    [texts, S] in pieces of at most PIECE tokens; what is left over at the end is not used. Each piece begins
    as the model's texts do.

    Raises ConfigError for a model without a tokenizer, and for a file that cannot be read or is too short.
    """
    try:
        tokenizer = load_tokenizer(checkpoint.tokenizer_source())
    except TokenizerError as error:
        raise ConfigError(f"{checkpoint.path}: the tokenizer cannot be used: {error}") from error
    if tokenizer is None:
        raise ConfigError(
            f"{checkpoint.path}: heads are compared on a calibration text, and the model has no tokenizer to "
            "read one with; measure 'weights' compares them without"
        )
    if file is None:
        name, text = "the built-in text", calibration_text.TEXT
    else:
        name = str(file)
        try:
            text = one_text(read_texts([file]))
        except OSError as error:
            raise ConfigError(f"calibration {file}: cannot be read ({error})") from error
        except RequestError as error:
            raise ConfigError(f"calibration {error}") from error
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)[:most_tokens]
    begin = [tokenizer.bos_id] if tokenizer.adds_bos else []
    config = ModelConfig.from_hf(checkpoint.config)
    if ids and max(ids) >= config.vocab_size:
        raise ConfigError(
            f"calibration {name}: token {max(ids)} is outside the model's vocabulary of {config.vocab_size}"
        )
    length = min(PIECE, config.longest_position) - len(begin)
    length = min(length, len(ids))
    if length < 2:
        raise ConfigError(f"calibration {name}: got {len(ids)} tokens; at least 2 are needed")
    count = len(ids) // length
    pieces = np.asarray(ids[: count * length], np.int32).reshape(count, length)
    first = np.tile(np.asarray(begin, np.int32), (count, 1))
    return np.concatenate([first, pieces], axis=1) if begin else pieces


def loaded(checkpoint: Checkpoint, *, progress: bool = True) -> Llama:
    """The whole model, to be run over texts: float32 on CPU, bfloat16 elsewhere; weights as [out, in]."""
    config = ModelConfig.from_hf(checkpoint.config)
    platform = jax.default_backend()
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    build = Build(dtype, platform, Backend("xla"), row_major=True)  # dense attention is XLA's anyway
    total = sum(1 for _ in weights.parameters(config))
    with phase(f"loading {checkpoint.path.name} to calibrate", total=total, wanted=progress) as advance:
        return nnx.merge(*weights.load_params(config, build, checkpoint, on_tensor=advance))


def activations(model: Llama, pieces: np.ndarray, *, progress: bool = True) -> list[Activations]:
    """The model run over `pieces` int32 [texts, S]: what each layer's attention was given, in float32."""
    found: list[list[tuple[np.ndarray, ...]]] = [[] for _ in model.layers]
    with phase("calibrating", total=len(pieces), wanted=progress) as advance:
        for piece in pieces:  # not traced as a whole: one program serves all layers that are equal
            taps = model.dense(jnp.asarray(piece[None]), tapped=True)[1]
            for layer, tap in zip(found, taps, strict=True):
                layer.append(tuple(np.asarray(x, np.float32) for x in tap))
            advance(1)
    return [Activations(*map(np.stack, zip(*layer, strict=True))) for layer in found]


def log_probabilities(model: Llama, piece: np.ndarray) -> jax.Array:
    """Of every next token: int32 [S] -> float32 [S, V]."""
    hidden, _ = model.dense(jnp.asarray(piece[None]))
    return jax.nn.log_softmax(model.logits(hidden[0]))


class Divergence:
    """How far a model's answers move when the keys and values of one layer do: the mean over the tokens of
    `pieces` int32 [texts, S] of KL(as it is | changed), in nats."""

    def __init__(self, model: Llama, pieces: np.ndarray):
        self.model, self.pieces = model, pieces
        self._before = [log_probabilities(model, piece) for piece in pieces]

    def of(self, layer: int, rows: np.ndarray) -> float:
        """Of the layer with `rows` [2 K H, D or D + 1] as its k_proj and v_proj, a last column as their
        biases. The model is left as it was."""
        qkv = self.model.layers[layer].attention.qkv
        assert isinstance(qkv, Linear), "weights to be changed are not quantised"
        kept = [qkv.weight[...], None if qkv.bias is None else qkv.bias[...]]
        first, inputs = kept[0].shape[0] - len(rows), kept[0].shape[1]
        try:
            qkv.weight[...] = kept[0].at[first:].set(rows[:, :inputs].astype(kept[0].dtype))
            if qkv.bias is not None:
                qkv.bias[...] = kept[1].at[first:].set(rows[:, inputs].astype(kept[1].dtype))
            moved = [
                float(
                    jnp.mean(jnp.sum(jnp.exp(before) * (before - log_probabilities(self.model, piece)), -1))
                )
                for before, piece in zip(self._before, self.pieces, strict=True)
            ]
        finally:
            qkv.weight[...] = kept[0]
            if qkv.bias is not None:
                qkv.bias[...] = kept[1]
        return max(0.0, float(np.mean(moved)))
