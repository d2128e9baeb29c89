"""Weights stored as float8 with scales beside them, as `quantization_config` in config.json declares them.

    "fp8", weight_block_size [B, C]    X.weight_scale_inv [ceil(out/B), ceil(in/C)]   one scale for each block
    "fp8", weight_block_size null      X.weight_scale_inv or X.weight_scale           one for the tensor
    "fp8", no weight_block_size        X.weight_scale, one number, or                 one for the tensor, or
                                         X.weight_scale_inv                             blocks of [128, 128]
    "compressed-tensors",              X.weight_scale: one number, [out, 1],          strategy "tensor",
      format "float-quantized"           or [ceil(out/B), ceil(in/C)]                 "channel", "block"

The value is float8 x scale in each of them ("inv" is the inverse of what the quantiser multiplied by).
Where the block size is not stated, transformers means its default, 128 x 128, and its scales end in "_inv";
AutoFP8 and vLLM mean one scale for the tensor, named `weight_scale`: the name tells whose file it is.
Sources: transformers' fine-grained fp8 quantiser and the compressed-tensors package, whose settings concern
activations too; this project computes with the dequantised weights and unquantised activations, so settings
and scales of activations (`input_scale`, `activation_scale`) change nothing here and are passed over.
Whatever else a setting says is not guessed at: `scheme_of` then gives None, and the setting stays in the
config, where the model's own reading of it refuses it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, shown
from checkpoints.parts import Index, covering, length
from checkpoints.safetensors_header import StoredTensor

ACTIVATION_SCALES = (".input_scale", ".activation_scale")
FLOAT8_TYPES = ("F8_E4M3", "F8_E5M2")

_SCALE_TYPES = ("F32", "BF16", "F16")
_VALUES_PER_SLICE = 65536
_FP8_KEYS = {
    "quant_method", "activation_scheme", "fmt", "scale_fmt", "weight_block_size", "modules_to_not_convert",
    "ignored_layers", "dequantize",
}  # fmt: skip
_DEFAULT_BLOCK = (128, 128)
# What transformers writes beside them -> the values under which it concerns no tensor of these models.
_FP8_NEUTRAL: dict[str, tuple[Any, ...]] = {"modules_to_convert": (None, []), "expert_dtype": (None, "fp8")}
# Keys that say something about the making of the file, or (targets, ignore) which tensors are quantised, and
# that the types of the tensors tell.
_COMPRESSED_KEYS = {
    "quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio",
    "version",
}  # fmt: skip
_GROUP_KEYS = {"weights", "input_activations", "targets", "format"}
_WEIGHT_KEYS = {
    "num_bits", "type", "strategy", "block_structure", "symmetric", "observer", "observer_kwargs",
}  # fmt: skip

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None is the whole tensor, (1, 0) is one row."""


@dataclass(frozen=True)
class Float8Scheme:
    """What the scales of a checkpoint may be called, each name with the block that its scale belongs to."""

    forms: tuple[tuple[str, Block], ...]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The names, without repeats."""
        return tuple(dict.fromkeys(suffix for suffix, _ in self.forms))


@dataclass(frozen=True, eq=False)
class Scaled:
    """A float8 tensor, its scale, and the (rows, columns) that share one number of it."""

    stored: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]


def scheme_of(settings: Any) -> Float8Scheme | None:
    """The scheme that a `quantization_config` declares, or None when it says anything not understood here."""
    if not isinstance(settings, Mapping):
        return None
    if settings.get("quant_method") == "fp8":
        if settings.keys() - _FP8_KEYS - _FP8_NEUTRAL.keys():
            return None
        if settings.get("fmt") not in (None, "e4m3", "e5m2"):
            return None
        if any(settings.get(key) not in neutral for key, neutral in _FP8_NEUTRAL.items()):
            return None
        size = settings.get("weight_block_size")
        if size is None:
            block = None if "weight_block_size" in settings else _DEFAULT_BLOCK
            return Float8Scheme(((".weight_scale", None), (".weight_scale_inv", block)))
        block = _block(size)
        return Float8Scheme(((".weight_scale_inv", block),)) if block else None
    if settings.get("quant_method") == "compressed-tensors":
        return _compressed_scheme(settings)
    return None


def _compressed_scheme(settings: Mapping[str, Any]) -> Float8Scheme | None:
    groups = settings.get("config_groups")
    if settings.get("format") != "float-quantized" or not isinstance(groups, Mapping) or not groups:
        return None
    # A key that is null or empty says nothing: kv_cache_scheme, sparsity_config, transform_config, ...
    if any(value for key, value in settings.items() if key not in _COMPRESSED_KEYS):
        return None
    if settings.get("quantization_status") not in (None, "compressed"):
        return None
    blocks: list[Block] = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return None
        if any(value for key, value in group.items() if key not in _GROUP_KEYS):
            return None
        if any(value for key, value in weights.items() if key not in _WEIGHT_KEYS):
            return None  # dynamic, group_size, actorder, ...
        if group.get("format") not in (None, "float-quantized"):
            return None
        if (weights.get("num_bits"), weights.get("type")) != (8, "float") or weights.get(
            "symmetric"
        ) is False:
            return None
        strategy, structure = weights.get("strategy"), weights.get("block_structure")
        if strategy == "block":
            block = _block(structure)
            if block is None:
                return None
            blocks.append(block)
        elif strategy in ("tensor", "channel") and structure is None:
            blocks.append(None if strategy == "tensor" else (1, 0))
        else:
            return None
    return Float8Scheme(tuple((".weight_scale", block) for block in dict.fromkeys(blocks)))


def _block(size: Any) -> tuple[int, int] | None:
    if isinstance(size, list) and len(size) == 2 and all(type(item) is int and item > 0 for item in size):
        return size[0], size[1]
    return None


def pair_scales(
    scheme: Float8Scheme, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, Scaled]]:
    """(tensors that are read as they are, tensors that are read with a scale); scales are in neither.

    Raises CheckpointError, naming file and tensor, for a float8 tensor without its scale, a scale without its
    float8 tensor, and a scale of another type or shape than the scheme's.
    """
    plain, scaled = dict(tensors), {}
    for name, stored in tensors.items():
        where = f"{stored.path}: tensor {shown(name)}"
        if name.endswith((*scheme.suffixes, *ACTIVATION_SCALES)):
            weight = name.rpartition(".")[0] + ".weight"
            if weight not in tensors or tensors[weight].type_name not in FLOAT8_TYPES:
                raise CheckpointError(f"{where}: a scale, but there is no float8 tensor {shown(weight)}")
            del plain[name]
        elif stored.type_name in FLOAT8_TYPES:
            stem = name.removesuffix(".weight")
            found = {suffix: tensors[stem + suffix] for suffix in scheme.suffixes if stem + suffix in tensors}
            if not found or not name.endswith(".weight"):
                expected = " or ".join(shown(stem + suffix) for suffix in scheme.suffixes)
                raise CheckpointError(f"{where} of type {stored.type_name}: its scale {expected} is missing")
            if len(found) > 1:
                raise CheckpointError(f"{where}: got scales {' and '.join(found)}, expected one of them")
            ((suffix, scale),) = found.items()
            blocks = [block for name_of, block in scheme.forms if name_of == suffix]
            scaled[name] = Scaled(stored, scale, _block_of(blocks, stored, scale))
            del plain[name]
    return plain, scaled


def _block_of(blocks: list[Block], stored: StoredTensor, scale: StoredTensor) -> tuple[int, int]:
    where = f"{scale.path}: tensor {shown(scale.name)}"
    if scale.type_name not in _SCALE_TYPES:
        raise CheckpointError(
            f"{where}: got type {scale.type_name}, expected one of {', '.join(_SCALE_TYPES)}"
        )
    if len(stored.shape) != 2:
        raise CheckpointError(
            f"{stored.path}: tensor {shown(stored.name)}: got float8 of shape {stored.shape}, "
            "expected a matrix"
        )
    rows, columns = stored.shape
    expected: list[tuple[int, ...]] = []
    for block in blocks:
        if block is None:
            high, wide, shapes = rows, columns, [(), (1,)]
        elif block == (1, 0):
            high, wide, shapes = 1, columns, [(rows, 1), (rows,)]
        else:
            high, wide = block
            shapes = [(-(-rows // high), -(-columns // wide))]
        if scale.shape in shapes:
            return high, wide
        expected += shapes
    raise CheckpointError(
        f"{where}: got shape {scale.shape}, expected {' or '.join(map(str, expected))} for a weight of "
        f"shape {stored.shape}"
    )


def dequantise(
    bits: np.ndarray, float8: np.dtype, scale: np.ndarray, block: tuple[int, int], index: Index
) -> np.ndarray:
    """`(float8 values x scales)[index]` as new float32, decoded a slice of rows at a time.

    bits: uint8[out, in], the stored bytes. scale: any shape of ceil(out / block[0]) * ceil(in / block[1])
    numbers. index: two slices.
    """
    table = np.arange(256, dtype=np.uint8).view(float8).astype(np.float32)
    (rows, columns), (high, wide) = bits.shape, block
    scale = scale.astype(np.float32).reshape(-(-rows // high), -(-columns // wide))
    start, stop, then = covering(index[0], rows)
    picked = np.arange(columns)[index[1]] // wide
    result = np.empty((stop - start, length(index[1], columns)), np.float32)
    step = max(1, _VALUES_PER_SLICE // max(1, result.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for row in range(start, stop, step):
            end = min(row + step, stop)
            target = result[row - start : end - start]
            # A table is six times as fast as the cast of ml_dtypes; "clip" because "raise" copies the result.
            np.take(table, bits[row:end, index[1]], out=target, mode="clip")
            factors = scale[np.arange(row, end) // high]
            target *= factors if factors.shape[1] == 1 else factors[:, picked]
    return result[then]
