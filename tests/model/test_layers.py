"""The parts of the model by themselves: products and their layouts, norms, tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_build

from jaxinfer.model.linear import Blocked, Layout, RowMajor, layout_for
from jaxinfer.model.llama import RMSNorm


def packed_by(layout: Layout, weight: np.ndarray) -> np.ndarray:
    """The weight in its layout, stored in two uneven parts."""
    packed = np.empty(layout.shape(*weight.shape), weight.dtype)
    cut = len(weight) // 5
    layout.store(packed, 0, weight[:cut])
    layout.store(packed, cut, weight[cut:])
    return packed


LAYOUTS = [RowMajor(), Blocked(), Blocked(16)]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_product_is_the_same_in_every_layout(layout: Layout, rows: int) -> None:
    """y = x W^T, one row included (it takes a path of its own)."""
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((rows, 24)).astype(np.float32)
    weight = generator.standard_normal((192, 24)).astype(np.float32)
    packed = jnp.asarray(packed_by(layout, weight))
    assert packed.shape == layout.shape(192, 24)
    got = jax.jit(layout.matmul)(jnp.asarray(x), packed)
    assert got.shape == (rows, 192)
    np.testing.assert_allclose(got, x.astype(np.float64) @ weight.T.astype(np.float64), atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_of_a_packed_table(layout: Layout) -> None:
    """Embedding look-ups give back the rows bit for bit: first, last, and both sides of a block's edge."""
    weight = np.random.default_rng(0).standard_normal((192, 24)).astype(np.float32)
    ids = [0, 15, 16, 63, 64, 127, 128, 191, 0]
    got = layout.rows(jnp.asarray(packed_by(layout, weight)), jnp.asarray(ids))
    np.testing.assert_array_equal(got, weight[ids])


def test_a_block_is_where_it_says() -> None:
    """Element (o, i) moves to (o // block, i, o % block)."""
    weight = np.arange(12).reshape(4, 3)
    assert packed_by(Blocked(2), weight).tolist() == [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]]


def test_the_layout_of_a_platform() -> None:
    assert layout_for("cpu", 192) == Blocked(64)
    assert layout_for("cpu", 300) == RowMajor()
    assert layout_for("gpu", 192) == RowMajor()


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm(eps: float) -> None:
    """eps is inside of the root: it decides what becomes of small inputs."""
    norm = RMSNorm(8, eps, tiny_build())
    norm.weight[...] = jnp.arange(1.0, 9.0)
    x = np.random.default_rng(0).standard_normal((3, 8)) * [[1e-3], [1.0], [100.0]]
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.arange(1, 9)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5)
    assert not np.asarray(norm(jnp.zeros((1, 8)))).any()


def test_rms_norm_is_computed_in_float32() -> None:
    """300 ** 2 * 8 leaves the precision of bfloat16, and the result is bfloat16 all the same."""
    norm = RMSNorm(8, 1e-5, tiny_build("bfloat16"))
    x = jnp.asarray([[300.0, 301, 302, 303, 304, 305, 306, 307]], jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), wide / np.sqrt((wide**2).mean()), rtol=2**-8)
