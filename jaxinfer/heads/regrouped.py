"""A checkpoint seen with other KV heads: what is read of it is made when it is read.

view = Regrouped(open_checkpoint(path), decide(checkpoint, HeadPlan(kv_heads=1)))
weights.load_params(ModelConfig.from_hf(view.config), build, view)     or: write it, as `convert` does
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import Checkpoint, TokenizerSource
from jaxinfer.config import Favor, ModelConfig, with_linear_attention
from jaxinfer.heads import groups
from jaxinfer.heads.decide import HeadChange, LayerChange
from jaxinfer.heads.merge import Fold

_PROJECTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(weight|bias)")


class Regrouped:
    """A `Checkpoint` with the heads of `change`, which was decided for `source`.

    `dtype` is what the source holds a tensor in; projections of heads are read in float32, not rounded to it.
    `config` says the new numbers: num_key_value_heads is one number where all layers have as many (what every
    reader of a config.json knows) and otherwise a list with a number for each layer; head_dim is stated,
    since query heads of zeros make it differ from hidden_size / num_attention_heads; and which layers have
    linear attention, where the change says others than the source.
    """

    def __init__(self, source: Checkpoint, change: HeadChange):
        self._source, self._change = source, change
        self.path: Path = source.path
        self.generation_config: dict[str, Any] = source.generation_config
        self.config: dict[str, Any] = _config(source.config, change)
        assert ModelConfig.from_hf(self.config) == change.after, "the config does not say what was decided"
        self._last: tuple[str, np.ndarray] | None = None

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._source.shape(name))
        match = self._head_tensor(name)
        if match is None:
            return shape
        kind, layer = match[2], self._change.after.layers[int(match[1])]
        heads = self._change.after.num_heads if kind in "qo" else layer.num_kv_heads
        rows = heads * self._change.after.head_dim
        return (shape[0], rows) if kind == "o" else (rows, *shape[1:])

    def dtype(self, name: str) -> np.dtype:
        return self._source.dtype(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        match = self._head_tensor(name)
        if match is None:
            return self._source.read(name, index)
        if self._last is None or self._last[0] != name:  # who reads in parts reads them one after the other
            self._last = None
            self._last = name, self._made(match[2], int(match[1]), self._source.read(name).astype(np.float32))
        return self._last[1][index]

    def tokenizer_source(self) -> TokenizerSource:
        return self._source.tokenizer_source()

    def _head_tensor(self, name: str) -> re.Match[str] | None:
        """The match of a tensor that has heads: o_proj's bias has none."""
        match = _PROJECTION.fullmatch(name)
        return None if match is None or (match[2], match[3]) == ("o", "bias") else match

    def _made(self, kind: str, index: int, old: np.ndarray) -> np.ndarray:
        change, before = self._change.layers[index], self._change.before
        width, group_size = before.head_dim, before.num_heads // before.layers[index].num_kv_heads
        if kind in "kv":
            heads = old.reshape(before.layers[index].num_kv_heads, width, -1)
            return made_heads(heads, change, kind).reshape(-1, *old.shape[1:])
        at = groups.slots(change.groups, self._change.after.num_heads)
        rows = old.T if kind == "o" else old
        heads = rows.reshape(before.num_heads, width, -1)
        new = read_through(heads, change, kind, at, group_size).reshape(-1, *rows.shape[1:])
        return np.ascontiguousarray(new.T) if kind == "o" else new


def made_heads(heads: np.ndarray, change: LayerChange, kind: str) -> np.ndarray:
    """Rows of k_proj or v_proj (`kind` "k", "v") of every head, [K, H, D] -> those of the new heads."""
    folds = change.keys if kind == "k" else change.values
    return np.stack(
        [_encoded(fold, heads, group.kv_heads) for fold, group in zip(folds, change.groups, strict=True)]
    )


def read_through(
    heads: np.ndarray, change: LayerChange, kind: str, slots: Sequence[int | None], group_size: int
) -> np.ndarray:
    """Rows of q_proj, or columns of o_proj (`kind` "q", "o"), of query heads [N, H, D] -> [N', H, D]."""
    folds = change.keys if kind == "q" else change.values
    new = np.zeros((len(slots), *heads.shape[1:]), heads.dtype)
    size = len(slots) // len(change.groups)
    for place, head in enumerate(slots):
        if head is not None:
            group = change.groups[place // size]
            decode = folds[place // size].decode[group.kv_heads.index(head // group_size)]
            new[place] = _product(decode.T, heads[head])
    return new


def _encoded(fold: Fold, heads: np.ndarray, members: tuple[int, ...]) -> np.ndarray:
    parts = [_product(encode, heads[head]) for encode, head in zip(fold.encode, members, strict=True)]
    return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)


def _product(matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """matrix [H, H] times rows [H, D]. The identity gives the very rows, infinite ones too."""
    if np.array_equal(matrix, np.eye(len(matrix))):
        return rows
    return matrix.astype(rows.dtype) @ rows


def _config(config: dict[str, Any], change: HeadChange) -> dict[str, Any]:
    after = change.after
    counts = [layer.num_kv_heads for layer in after.layers]
    new = {key: value for key, value in config.items() if key != "num_key_value_heads_per_layer"}
    if [layer.favor for layer in after.layers] != [layer.favor for layer in change.before.layers]:
        favors = [layer.favor for layer in after.layers if layer.favor is not None]
        new = with_linear_attention(new, after.linear_layers, favors[0] if favors else Favor())
    return new | {
        "num_attention_heads": after.num_heads,
        "num_key_value_heads": counts[0] if len(set(counts)) == 1 else counts,
        "head_dim": after.head_dim,
    }
