"""Weights of few bits: what rounding may lose, how bytes are packed, and products against their reference."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FORMATS, Backend, Device, QuantizedWeight, dequantize, int4_group
from pallas_kernels.matmul import matmul_unsupported, quant_matmul, resolve_matmul
from pallas_kernels.quantized import Format, quantize, quantize_fp8, quantize_int4, quantize_int8

pytestmark = pytest.mark.usefixtures("compile_cache")

GPU = Device("gpu", (9, 0), "NVIDIA H200", 132)
BACKENDS = {
    "xla on CPU": Backend("xla"),
    "xla on GPU": Backend("xla", GPU),  # its forms run anywhere
    "pallas_triton": Backend("pallas_triton", Device("cpu", num_cores=8), interpret=True),
}
ERROR = {"float32": 2e-6, "bfloat16": 8e-3}
"""Of a product of many terms, relative to the largest result."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def blocked(weight: QuantizedWeight, block: int) -> QuantizedWeight:
    """The same weight in blocks of outputs, as `pallas_kernels.quantized` describes them."""
    values, scales = np.asarray(weight.values), np.asarray(weight.scales)
    values = values.reshape(-1, block, values.shape[1]).transpose(0, 2, 1)
    if scales.ndim == 2:
        scales = scales.T.reshape(-1, block, len(scales)).transpose(0, 2, 1)
    return QuantizedWeight(values, scales)


def on_device(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(*map(jnp.asarray, weight))


def relative_error(
    x: np.ndarray, weight: QuantizedWeight, backend: Backend, dtype: str = "float32", truth=None
) -> float:
    """The largest difference from float64 numpy, over the largest result."""
    given, truth = jnp.asarray(x, dtype), dequantize(weight) if truth is None else truth
    multiply = jax.jit(quant_matmul, static_argnames=("backend",))
    got = multiply(given, on_device(weight), backend=backend)
    assert got.dtype == given.dtype
    assert got.shape == (len(x), weight.outputs)
    expected = np.asarray(given, np.float64) @ np.asarray(truth, np.float64).T
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max())


# ------------------------------------------------------------------------------------- rounding


def test_int8_is_off_by_half_a_scale() -> None:
    weight = normal(7, 96) * np.geomspace(1e-6, 1e3, 7)[:, None]
    rounded = quantize_int8(weight)
    scales = np.abs(weight).max(axis=1) / 127
    np.testing.assert_allclose(rounded.scales, scales, rtol=1e-6)
    assert (np.abs(dequantize(rounded) - weight) <= scales[:, None] * 0.501).all()
    assert np.abs(rounded.values).max(axis=1).tolist() == [127] * 7


def test_int4_is_off_by_half_a_scale_below_the_top() -> None:
    """The largest of a group is kept, whatever its sign; only what mirrors it is cut off, at 7 of 8."""
    weight = normal(9, 128)
    for group in (32, 64, 128):
        rounded = quantize_int4(weight, group)
        assert rounded.scales.shape == (128 // group, 9)
        grouped = weight.reshape(9, -1, group)
        scale = np.abs(grouped).max(axis=2, keepdims=True) / 8
        off = np.abs(np.asarray(dequantize(rounded)).reshape(grouped.shape) - grouped) / scale
        largest = grouped / np.where(np.abs(grouped) == 8 * scale, grouped, np.inf)
        sign = np.sign(np.where(largest == 1, grouped, 0).sum(axis=2, keepdims=True))
        mirrored = grouped * -sign > 7.5 * scale
        assert off[~mirrored].max() <= 0.501
        assert off.max() <= 1.001
        assert off[largest == 1].max() < 1e-5


def test_fp8_is_off_by_a_sixteenth() -> None:
    weight = normal(5, 64) * np.geomspace(1e-4, 1e4, 5)[:, None]
    rounded = quantize_fp8(weight)
    bound = np.maximum(np.abs(weight) / 16, np.asarray(rounded.scales)[:, None] * 2.0**-10)
    assert (np.abs(dequantize(rounded) - weight) <= bound * 1.001).all()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_rounded_each_by_itself(format: Format) -> None:
    """In parts as at once; a row of zeros stays zeros; a second rounding changes nothing."""
    weight = normal(10, 64)
    weight[4] = 0
    whole, first, rest = quantize(weight, format), quantize(weight[:3], format), quantize(weight[3:], format)
    np.testing.assert_array_equal(whole.values, np.concatenate([first.values, rest.values]))
    np.testing.assert_array_equal(whole.scales, np.concatenate([first.scales, rest.scales], axis=-1))
    values = np.asarray(dequantize(whole))
    assert not values[4].any()
    np.testing.assert_allclose(dequantize(quantize(values, format)), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_stays_visible(format: Format, bad: float) -> None:
    weight = normal(3, 64)
    weight[1, 5] = bad
    got = quant_matmul(jnp.ones((2, 64)), on_device(quantize(weight, format)), backend=Backend("xla"))
    assert np.isfinite(np.asarray(got)).tolist() == [[True, False, True]] * 2


def test_where_a_nibble_lies() -> None:
    """Byte j of a group: input j low, input j + half high; counted from -8."""
    weight = np.asarray([[-8, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, -8]], np.float32)
    packed = quantize_int4(weight, 8)
    assert packed.values.tolist() == [
        [0 | 12 << 4, 9 | 13 << 4, 10 | 14 << 4, 11 | 15 << 4, 15 | 11 << 4, 14 | 10 << 4, 13 | 9 << 4, 12]
    ]
    assert packed.scales.tolist() == [[1], [1]]
    np.testing.assert_array_equal(dequantize(packed), weight)
    np.testing.assert_array_equal(dequantize(quantize_int4(-weight, 8)), -weight)


def test_groups_that_divide() -> None:
    assert [int4_group(n) for n in (4096, 576, 96, 40)] == [64, 64, 32, None]


# ------------------------------------------------------------------------------------- products

SHAPES = [(1, 96, 64), (16, 64, 1), (33, 192, 192), (70, 128, 65)]
"""Rows, inputs, outputs: one row, odd numbers of outputs, groups of 32 and 64, past a tile of each size."""
SERVED = [(name, format) for name in BACKENDS for format in FORMATS if format == "int4" or "xla" in name]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "format"), SERVED)
def test_products_are_those_of_the_dequantised_weight(
    name: str, format: Format, shape: tuple[int, int, int]
) -> None:
    rows, inputs, outputs = shape
    weight = quantize(normal(outputs, inputs), format)
    x = normal(rows, inputs, seed=1)
    for dtype in ("float32", "bfloat16") if rows == 33 else ("float32",):
        assert relative_error(x, weight, BACKENDS[name], dtype) < ERROR[dtype]
    if outputs % 64 == 0 and name == "xla on CPU":
        assert relative_error(x, blocked(weight, 64), BACKENDS[name]) < ERROR["float32"]
        np.testing.assert_array_equal(dequantize(blocked(weight, 64)), dequantize(weight))


@pytest.mark.parametrize("format", FORMATS)
def test_the_reference(format: Format) -> None:
    weight, x = quantize(normal(70, 96), format), normal(3, 96, seed=1)
    assert relative_error(x, weight, Backend("reference")) < ERROR["float32"]
    assert relative_error(x, weight, Backend("reference"), "bfloat16") < ERROR["bfloat16"]


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_walk_in_parts_that_do_not_divide(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five blocks, two at a time: the last part begins early and overlaps."""
    weight, x = quantize(normal(80, 64), "int4"), normal(20, 64, seed=1)
    weight = blocked(weight, 16) if in_blocks else weight
    monkeypatch.setattr("pallas_kernels.matmul._BLOCK_BYTES", 64 * 32 * 4 + 5)
    assert relative_error(x, weight, Backend("xla")) < ERROR["float32"]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_scale_of_the_wrong_group_is_seen(name: str) -> None:
    """A planted fault: one output takes one group's scale from its neighbour."""
    weight, x = quantize(normal(65, 192), "int4"), normal(3, 192, seed=1)
    wrong = weight.scales.copy()
    wrong[1, 64] = wrong[2, 64]
    error = relative_error(x, weight._replace(scales=wrong), BACKENDS[name], truth=dequantize(weight))
    assert error > 100 * ERROR["float32"]
    assert relative_error(x, weight, BACKENDS[name]) < ERROR["float32"]


def test_twice_the_same_to_the_last_bit() -> None:
    weight, x = on_device(quantize(normal(64, 320), "int4")), jnp.asarray(normal(4, 320, seed=1))
    first, second = (quant_matmul(x, weight, backend=BACKENDS["pallas_triton"]) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_who_serves_where() -> None:
    ampere, rocm = Device("gpu", (8, 0), "NVIDIA A100", 108), Device("gpu", None, "MI300X", 304)
    assert resolve_matmul("int4", GPU).name == resolve_matmul("int4", ampere).name == "pallas_triton"
    assert resolve_matmul("int4", Device("cpu")).name == resolve_matmul("int4", rocm).name == "xla"
    assert resolve_matmul("int8", GPU).name == resolve_matmul("fp8", GPU).name == "xla"
    assert not matmul_unsupported("fp8", Device("gpu", (8, 9), "NVIDIA L4", 58))
    for device in (ampere, rocm):
        with pytest.raises(NotImplementedError, match=r"fp8 weights need compute capability 8\.9"):
            resolve_matmul("fp8", device)


def test_without_pallas_triton_int4_is_multiplied_by_xla() -> None:
    """JAX has deprecated it: the day it is gone, the package must import, and everything else run."""
    script = """
        import sys
        class Gone:
            def find_spec(self, name, path=None, target=None):
                if name == "jax.experimental.pallas.triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Gone())
        import pallas_kernels
        assert "jax.experimental.pallas" not in sys.modules, "Pallas is imported before anyone asks for it"
        import jaxinfer.model.kv
        from pallas_kernels import Backend, Device, Geometry, matmul
        h200 = Device("gpu", (9, 0), "NVIDIA H200", 132)
        print(pallas_kernels.resolve_matmul("int4", h200).name)
        print(matmul.kernel_unsupported(Backend("pallas_triton", h200), "int4"))
        print(pallas_kernels.backends(h200, Geometry(32, 8, 128, 16))["pallas_triton"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parents[2], capture_output=True,
        text=True, timeout=120, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name, product, attention = done.stdout.splitlines()
    assert name == "xla"
    for reason in (product, attention):
        assert reason.startswith("cannot be imported with jax")
        assert "triton" in reason
