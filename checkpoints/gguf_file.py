"""A GGUF file as a checkpoint: Hugging Face names, layouts and configuration keys.

The converter of llama.cpp stores the rows of the q and k projections of `llama` files permuted (rotary pairs
side by side instead of half a head apart); `read` puts them back. q is permuted per query head and k per
KV head: with 9 query and 3 KV heads the wrong divisor (9 / 3) gives the right answer by coincidence, with
8 and 2 it does not. Where the number of KV heads differs by layer, each layer has its own divisor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.blocks import can_read, read_blocks, value_type
from checkpoints.errors import CheckpointError, quoted
from checkpoints.gguf_config import end_token_ids, hugging_face_name, is_permuted, translate_config
from checkpoints.gguf_header import GGUFHeader, TensorEntry
from checkpoints.parts import Index, checked_index, covering
from checkpoints.tokenizer_source import GGUFTokenizerSource


class GGUFFile:
    """A checkpoint read from one GGUF file, mapped into memory and dequantised tensor by tensor."""

    def __init__(self, path: Path) -> None:
        """Reads the header only.

        Raises CheckpointError for a damaged file, an unknown architecture or an unreadable block type.
        """
        self.path = path
        self._header = GGUFHeader(path)
        self.config: dict[str, Any] = translate_config(self._header)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        self.generation_config: dict[str, Any] = {key: self.config[key] for key in keys}
        self._permuted = is_permuted(self._header)
        self._entries: dict[str, TensorEntry] = {}
        readable: dict[int, bool] = {}
        for entry in self._header.tensors.values():
            name = hugging_face_name(self._header, entry.name)
            if name is None:
                continue
            if not readable.setdefault(entry.block_type, can_read(entry.block_type)):
                raise CheckpointError(
                    f"{path}: tensor {entry.name}: block type {entry.block_type.name} cannot be dequantised"
                )
            assert name not in self._entries, f"{name} stands for two tensors of {path}"
            self._entries[name] = entry
            self._check_heads(name, entry)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors (Hugging Face names), sorted."""
        return tuple(sorted(self._entries))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; matrices are [out, in]."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Type of the array that `read` gives: F64, F32, F16 and BF16 as stored, float32 for the rest."""
        return value_type(self._entry(name).block_type)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """One tensor, or the part `tensor[index]` of it, in Hugging Face layout.

        F32, F16 and BF16 keep their type (views of the mapped file where no rows move); quantised types come
        as new float32 arrays, and only the rows that the index asks for are dequantised. Raises
        CheckpointError when there is no such tensor or the index does not fit it.
        """
        entry = self._entry(name)
        index = checked_index(index, entry.shape, f"{self.path}: tensor {entry.name}")
        heads = self._permuted_heads(name)
        if heads:
            return self._read_permuted(entry, heads, index)
        return read_blocks(self._header.data(entry), entry.block_type, entry.shape, index)

    def _read_permuted(self, entry: TensorEntry, heads: int, index: Index) -> np.ndarray:
        """The part of a q or k projection, put back head by head, so that no copy of the whole is needed."""
        head_rows = entry.shape[0] // heads
        start, stop, then = covering(index[0], entry.shape[0])
        first, last = start // head_rows, -(-stop // head_rows)
        data, inner = self._header.data(entry), index[1:]
        result: np.ndarray | None = None
        for head in range(first, max(last, first + 1)):
            rows = slice(head * head_rows, (head + 1) * head_rows)
            stored = read_blocks(data, entry.block_type, entry.shape, (rows, *inner))
            if result is None:
                result = np.empty((stop - start, *stored.shape[1:]), stored.dtype)
            low, high = max(start, rows.start), min(stop, rows.stop)
            straight = restore_rotary_rows(stored, 1)
            result[low - start : high - start] = straight[low - rows.start : high - rows.start]
        assert result is not None
        return result[then]

    def tokenizer_source(self) -> GGUFTokenizerSource:
        """The tokenizer's keys; the arrays are decoded here, not when the file is opened."""
        header, fields = self._header, self._header.fields
        tokens = self._texts("tokens")
        if not tokens:
            raise CheckpointError(f"{self.path}: key tokenizer.ggml.tokens is missing")
        scores, types = header.array("tokenizer.ggml.scores"), header.array("tokenizer.ggml.token_type")
        for key, values in (("scores", scores), ("token_type", types)):
            if values is not None and (isinstance(values, list) or len(values) != len(tokens)):
                raise CheckpointError(
                    f"{self.path}: key tokenizer.ggml.{key}: got {len(values)} items, "
                    f"expected {len(tokens)} numbers"
                )

        def optional(key: str, kind: type) -> Any:
            value = fields.get(key)
            if value is not None and type(value) is not kind:
                raise CheckpointError(
                    f"{self.path}: key {key}: got {quoted(value)}, expected {kind.__name__}"
                )
            return value

        model = optional("tokenizer.ggml.model", str)
        if model is None:
            raise CheckpointError(f"{self.path}: key tokenizer.ggml.model is missing")
        return GGUFTokenizerSource(
            path=self.path,
            model=model,
            pre=optional("tokenizer.ggml.pre", str),
            tokens=tokens,
            merges=self._texts("merges"),
            scores=None if scores is None else np.asarray(scores, np.float32),
            token_types=None if types is None else np.asarray(types, np.int32),
            bos_token_id=optional("tokenizer.ggml.bos_token_id", int),
            eos_token_ids=end_token_ids(header),
            unknown_token_id=optional("tokenizer.ggml.unknown_token_id", int),
            padding_token_id=optional("tokenizer.ggml.padding_token_id", int),
            add_bos=optional("tokenizer.ggml.add_bos_token", bool),
            add_eos=optional("tokenizer.ggml.add_eos_token", bool),
            add_space_prefix=optional("tokenizer.ggml.add_space_prefix", bool),
            chat_template=optional("tokenizer.chat_template", str),
        )

    def _texts(self, key: str) -> tuple[str, ...]:
        values = self._header.array(f"tokenizer.ggml.{key}")
        if values is not None and not isinstance(values, list):
            raise CheckpointError(f"{self.path}: key tokenizer.ggml.{key}: expected an array of text")
        return tuple(values or ())

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor {name}; it has {len(self._entries)} others")
        return entry

    def _permuted_heads(self, name: str) -> int:
        """How many heads the rows of `name` are permuted by; 0 for a tensor that is stored straight."""
        if not self._permuted:
            return 0
        if ".self_attn.q_proj." in name:
            return self.config["num_attention_heads"]
        if ".self_attn.k_proj." in name:
            kv_heads = self.config["num_key_value_heads"]
            return kv_heads[int(name.split(".")[2])] if isinstance(kv_heads, list) else kv_heads
        return 0

    def _check_heads(self, name: str, entry: TensorEntry) -> None:
        heads = self._permuted_heads(name)
        if heads and entry.shape[0] != heads * self.config["head_dim"]:
            raise CheckpointError(
                f"{self.path}: tensor {entry.name}: got {entry.shape[0]} rows, expected {heads} heads of "
                f"{self.config['head_dim']}"
            )


def restore_rotary_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of llama.cpp's converter.

    values: [heads * H, ...] with the rows of each head ordered 0, H/2, 1, H/2 + 1, ...; the result has them
    ordered 0, 1, 2, ... For one head of H = 4, stored rows (a0, a2, a1, a3) become (a0, a1, a2, a3).
    """
    rows = values.shape[0]
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
