"""Float8 weights: as they are, and with the scales of the schemes that are understood."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from folder_writing import write_folder

import checkpoints
from checkpoints.float8 import scheme_of
from checkpoints.safetensors_folder import SafetensorsFolder
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FINE_GRAINED = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
PARTS = [
    (),
    (slice(3, 9),),
    (slice(100, 200), slice(120, 300)),
    (slice(-5, None), slice(None, None, 3)),
    (slice(290, 2, -4), slice(7, 8)),
    (slice(2, 2),),
]


def compressed(*strategies: str, **changes: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it, one group for each strategy."""

    def weights(strategy: str) -> dict[str, Any]:
        block = [128, 128] if strategy == "block" else None
        return {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False,
            "group_size": None, "block_structure": block, "actorder": None, "observer": "minmax",
            "observer_kwargs": {},
        }  # fmt: skip

    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    groups = {
        f"group_{number}": {
            "targets": ["Linear"], "weights": weights(strategy), "input_activations": activations,
            "output_activations": None,
        }
        for number, strategy in enumerate(strategies)
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5, "sparsity_config": {}, **changes,
    }  # fmt: skip


PER_TENSOR = {
    "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
    "modules_to_not_convert": ["lm_head"], "modules_to_convert": None, "scale_fmt": "float",
    "expert_dtype": "fp8",
}  # fmt: skip


def random_float8(rows: int = 300, columns: int = 333, kind: np.dtype = E4M3) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(kind)


def random_scale(*shape: int, kind: type = np.float32) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.001, 0.1, shape).astype(kind)


def folder_with(tmp_path: Path, settings: Any, tensors: dict[str, np.ndarray]) -> SafetensorsFolder:
    write_folder(tmp_path, tensors, {} if settings is None else {"quantization_config": settings})
    return SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_without_scales_a_value_is_a_value(tmp_path: Path, kind: np.dtype) -> None:
    values = random_float8(kind=kind)
    opened = folder_with(tmp_path, None, {"x.weight": values})
    assert opened.dtype("x.weight") == kind
    for part in PARTS:
        got = opened.read("x.weight", part)
        assert got.dtype == kind
        np.testing.assert_array_equal(got.astype(np.float32), values[part].astype(np.float32))


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Every scale repeated over its block, f32[shape]."""
    whole = np.kron(scale.astype(np.float32), np.ones(block, np.float32))
    return whole[: shape[0], : shape[1]]


SCHEMES = {
    "fine-grained": (FINE_GRAINED, ".weight_scale_inv", (3, 3), (128, 128)),
    "fine-grained, other blocks": (
        FINE_GRAINED | {"weight_block_size": [64, 32]}, ".weight_scale_inv", (5, 11), (64, 32),
    ),
    "static, one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"}, ".weight_scale", (), (300, 333),
    ),
    # As transformers 5.24 saves it: null is one scale for the tensor, and an absent size its default.
    "fine-grained, one scale": (PER_TENSOR, ".weight_scale_inv", (), (300, 333)),
    "one scale, the other name": (PER_TENSOR, ".weight_scale", (1,), (300, 333)),
    "fine-grained, blocks not stated": ({"quant_method": "fp8"}, ".weight_scale_inv", (3, 3), (128, 128)),
    "tensor": (compressed("tensor"), ".weight_scale", (1,), (300, 333)),
    "channel": (compressed("channel"), ".weight_scale", (300, 1), (1, 333)),
    "block": (compressed("block"), ".weight_scale", (3, 3), (128, 128)),
    "tensor and channel": (compressed("tensor", "channel"), ".weight_scale", (300, 1), (1, 333)),
}  # fmt: skip


@pytest.mark.parametrize("scale_kind", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", SCHEMES)
def test_scales_are_applied(tmp_path: Path, case: str, scale_kind: type) -> None:
    settings, suffix, scale_shape, block = SCHEMES[case]
    values, scale = random_float8(), random_scale(*scale_shape, kind=scale_kind)
    other = np.ones((4, 5), ml_dtypes.bfloat16)
    tensors = {
        "x.weight": values, f"x{suffix}": scale, "x.input_scale": random_scale(1),
        "x.activation_scale": random_scale(), "lm_head.weight": other,
        "x.bias": np.ones(300, np.float32),
    }  # fmt: skip
    opened = folder_with(tmp_path, settings, tensors)
    assert opened.names() == ("lm_head.weight", "x.bias", "x.weight")
    assert "quantization_config" not in opened.config
    assert opened.applied_quantization == settings
    assert opened.shape("x.weight") == (300, 333)
    assert opened.dtype("x.weight") == np.float32
    assert opened.dtype("lm_head.weight") == ml_dtypes.bfloat16
    matrix = scale.reshape(scale.shape if scale.ndim == 2 else (1, 1))
    expected = values.astype(np.float32) * spread(matrix, block, values.shape)
    for part in PARTS:
        got = opened.read("x.weight", part)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected[part], err_msg=str(part))


def test_two_blocks_in_literal_numbers(tmp_path: Path) -> None:
    values = np.array([[1, 2, 4], [8, 16, 32]], E4M3)
    scale = np.array([[0.5, 10.0]], np.float32)
    settings = FINE_GRAINED | {"weight_block_size": [2, 2]}
    opened = folder_with(tmp_path, settings, {"x.weight": values, "x.weight_scale_inv": scale})
    assert opened.read("x.weight").tolist() == [[0.5, 1.0, 40.0], [4.0, 8.0, 320.0]]


def test_dequantising_takes_little_more_than_the_result(tmp_path: Path) -> None:
    tensors = {"x.weight": random_float8(2048, 2048), "x.weight_scale_inv": random_scale(16, 16)}
    opened = folder_with(tmp_path, FINE_GRAINED, tensors)
    for part, size in (((), 2048 * 2048), ((slice(64, 320), slice(0, 1024)), 256 * 1024)):
        tracemalloc.start()
        values = opened.read("x.weight", part)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert values.size == size
        assert peak <= 1.2 * size * 4 + 1.5e6 * (size < 2e6), (part, peak)


WEIGHT, SCALE = random_float8(), random_scale(3, 3)
REFUSED = {
    "weight without scale": ({"x.weight": WEIGHT}, r"x\.weight .*scale x\.weight_scale_inv is missing"),
    "scale without weight": (
        {"x.weight": WEIGHT, "x.weight_scale_inv": SCALE, "y.weight_scale_inv": SCALE},
        r"tensor y\.weight_scale_inv: a scale, but there is no float8 tensor y\.weight",
    ),
    "scale of a plain weight": (
        {"x.weight": WEIGHT.astype(np.float32), "x.weight_scale_inv": SCALE},
        r"x\.weight_scale_inv: a scale, but there is no float8",
    ),
    "activation scale without weight": (
        {"x.weight": WEIGHT, "x.weight_scale_inv": SCALE, "y.input_scale": SCALE}, r"y\.input_scale: a scale",
    ),
    "scale too short": (
        {"x.weight": WEIGHT, "x.weight_scale_inv": random_scale(2, 3)},
        r"x\.weight_scale_inv: got shape \(2, 3\), expected \(3, 3\)",
    ),
    "scale of one number": (
        {"x.weight": WEIGHT, "x.weight_scale_inv": random_scale(1)}, r"got shape \(1,\), expected \(3, 3\)",
    ),
    "scale of float8": (
        {"x.weight": WEIGHT, "x.weight_scale_inv": SCALE.astype(E4M3)}, r"weight_scale_inv: got type F8_E4M3",
    ),
    "float8 vector": (
        {"x.weight": WEIGHT[0].copy(), "x.weight_scale_inv": SCALE}, r"x\.weight: .* shape \(333,\)",
    ),
    "float8 bias": (
        {"x.weight": WEIGHT, "x.weight_scale_inv": SCALE, "x.bias": WEIGHT[0].copy()}, r"x\.bias of type F8",
    ),
}  # fmt: skip


def test_two_scales_of_one_weight_are_refused(tmp_path: Path) -> None:
    tensors = {"x.weight": WEIGHT, "x.weight_scale_inv": random_scale(), "x.weight_scale": random_scale()}
    with pytest.raises(checkpoints.CheckpointError, match=r"x\.weight: got scales \.weight_scale and"):
        folder_with(tmp_path, PER_TENSOR, tensors)


def test_a_scalar_is_no_scale_of_blocks_that_are_not_stated(tmp_path: Path) -> None:
    tensors = {"x.weight": WEIGHT, "x.weight_scale_inv": random_scale()}
    with pytest.raises(checkpoints.CheckpointError, match=r"got shape \(\), expected \(3, 3\)"):
        folder_with(tmp_path, {"quant_method": "fp8"}, tensors)


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(checkpoints.CheckpointError, match=message) as caught:
        folder_with(tmp_path, FINE_GRAINED, tensors)
    assert str(tmp_path) in str(caught.value)


def test_scale_of_inf_is_refused_when_read(tmp_path: Path) -> None:
    tensors = {"x.weight": WEIGHT, "x.weight_scale_inv": np.full((3, 3), np.inf, np.float32)}
    opened = folder_with(tmp_path, FINE_GRAINED, tensors)
    with pytest.raises(checkpoints.CheckpointError, match=r"x\.weight_scale_inv: got a scale of inf"):
        opened.read("x.weight")


def changed(path: str, value: Any) -> dict[str, Any]:
    """A compressed-tensors setting of channels, with one value (dots descend) replaced."""
    settings = json.loads(json.dumps(compressed("channel")))
    inner = settings
    *parents, last = path.split(".")
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return settings


NOT_UNDERSTOOD = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "fp8, unknown key": FINE_GRAINED | {"rotation": "hadamard"},
    "fp8 of embeddings": FINE_GRAINED | {"modules_to_convert": ["embed_tokens"]},
    "fp4 experts": FINE_GRAINED | {"expert_dtype": "fp4"},
    "fp8, unknown format": FINE_GRAINED | {"fmt": "e3m4"},
    "fp8, block of three": FINE_GRAINED | {"weight_block_size": [128, 128, 1]},
    "fp8, empty block": FINE_GRAINED | {"weight_block_size": [0, 128]},
    "fp8, block of text": FINE_GRAINED | {"weight_block_size": "128x128"},
    "int8 weights": changed("config_groups.group_0.weights.type", "int"),
    "4 bits": changed("config_groups.group_0.weights.num_bits", 4),
    "groups": changed("config_groups.group_0.weights.strategy", "group"),
    "asymmetric": changed("config_groups.group_0.weights.symmetric", False),
    "dynamic weights": changed("config_groups.group_0.weights.dynamic", True),
    "order of columns": changed("config_groups.group_0.weights.actorder", "group"),
    "quantised outputs": changed("config_groups.group_0.output_activations", {"num_bits": 8}),
    "group of another format": changed("config_groups.group_0.format", "pack-quantized"),
    "group that is text": changed("config_groups.group_0", "fp8"),
    "no groups": changed("config_groups", {}),
    "another format": changed("format", "naive-quantized"),
    "quantised cache": changed("kv_cache_scheme", {"num_bits": 8, "type": "float"}),
    "sparse": changed("sparsity_config", {"format": "sparse-24-bitmask"}),
    "transforms": changed("transform_config", {"config_groups": {"u": {}}}),
    "not compressed": changed("quantization_status", "calibration"),
    "list": [1, 2],
    "text": "fp8",
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_other_settings_stay_and_are_refused_by_name(tmp_path: Path, case: str) -> None:
    settings = NOT_UNDERSTOOD[case]
    assert scheme_of(settings) is None
    opened = folder_with(tmp_path, settings, {"x.weight": WEIGHT, "x.weight_scale": random_scale(300, 1)})
    assert opened.config["quantization_config"] == settings
    assert opened.applied_quantization is None
    with pytest.raises(ConfigError, match="quantization_config"):
        ModelConfig.from_hf(opened.config)


def test_settings_without_any_float8_weight_stay(tmp_path: Path) -> None:
    opened = folder_with(tmp_path, FINE_GRAINED, {"x.weight": WEIGHT.astype(np.float32)})
    assert "quantization_config" in opened.config


def test_packed_integers_name_the_method(tmp_path: Path) -> None:
    with pytest.raises(checkpoints.CheckpointError, match=r"tensor x\.qweight: got type I32.*'gptq'"):
        folder_with(tmp_path, {"quant_method": "gptq"}, {"x.qweight": np.ones((2, 2), np.int32)})
