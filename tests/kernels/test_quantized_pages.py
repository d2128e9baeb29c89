"""int8 and float8 pages: what quantising costs, and that values and scales stay together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import QuantizedPages, copy_pages, create_pages, write_kv
from pallas_kernels.pages import dequantize, quantize

INDEX = np.int32


@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_int8_is_within_half_a_step(seed: int, magnitude: float) -> None:
    vectors = np.random.default_rng(seed).standard_normal((5, 3, 16)).astype(np.float32) * np.float32(
        magnitude
    )
    values, scales = quantize(jnp.asarray(vectors))
    assert values.dtype == jnp.int8
    assert scales.shape == (5, 3)
    largest = np.abs(vectors).max(axis=-1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert (np.abs(np.asarray(values)).max(axis=-1) == 127).all()
    error = np.abs(np.asarray(dequantize(values, scales)) - vectors)
    assert (error <= np.asarray(scales)[..., None] * 0.5001).all()


def test_int8_of_zeros_nan_and_infinity() -> None:
    """A zero vector stays zero; one with NaN or infinity is not finite afterwards (and only that one)."""
    vectors = np.ones((4, 8), np.float32)
    vectors[0] = 0
    vectors[1, 3] = np.nan
    vectors[2, 5] = -np.inf
    back = np.asarray(dequantize(*quantize(jnp.asarray(vectors))))
    assert not back[0].any()
    assert not np.isfinite(back[1]).any()
    assert not np.isfinite(back[2]).any()
    np.testing.assert_allclose(back[3], 1.0, rtol=1e-6)


def test_subnormal_vectors_do_not_become_nan() -> None:
    back = dequantize(*quantize(jnp.full((1, 8), 1e-44, jnp.float32)))
    assert np.isfinite(np.asarray(back)).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_write_changes_the_named_places_alone(seed: int) -> None:
    generator = np.random.default_rng(seed)
    pages = QuantizedPages(
        jnp.asarray(generator.integers(-127, 128, (6, 2, 4, 8)), jnp.int8),
        jnp.asarray(generator.standard_normal((6, 2, 4)), jnp.float32),
    )
    new = jnp.asarray(generator.standard_normal((3, 2, 8)), jnp.float32)
    ids, offsets = [2, 4, 0], [3, 1, 0]
    got = jax.jit(write_kv)(pages, new, np.asarray(ids, INDEX), np.asarray(offsets, INDEX))
    values, scales = np.array(pages.values), np.array(pages.scales)
    for token, (page, offset) in enumerate(zip(ids, offsets, strict=True)):
        values[page, :, offset], scales[page, :, offset] = quantize(new[token])
    np.testing.assert_array_equal(got.values, values)
    np.testing.assert_allclose(got.scales, scales, rtol=1e-6)


def test_a_copy_takes_the_scales_along() -> None:
    generator = np.random.default_rng(0)
    pages = QuantizedPages(
        jnp.asarray(generator.integers(-127, 128, (5, 2, 4, 8)), jnp.int8),
        jnp.asarray(generator.standard_normal((5, 2, 4)), jnp.float32),
    )
    got = copy_pages(pages, jnp.asarray([1, 2, 0], INDEX), jnp.asarray([2, 3, 0], INDEX))
    for new, old in zip(got, pages, strict=True):
        np.testing.assert_array_equal(np.asarray(new)[[1, 2, 3, 4]], np.asarray(old)[[1, 1, 2, 4]])


@pytest.mark.parametrize(("kv_dtype", "largest"), [("float8_e4m3fn", 448), ("float16", 65504)])
def test_narrow_types_saturate(kv_dtype: str, largest: float) -> None:
    """A cast alone would make NaN of what is beyond 448, and infinity of what is beyond 65504."""
    pages = create_pages(2, 1, 4, 2, kv_dtype)
    new = jnp.asarray([[[1e5, -1e5]], [[0.5, np.nan]]], jnp.bfloat16)
    got = np.asarray(write_kv(pages, new, jnp.asarray([1, 1]), jnp.asarray([0, 1])), np.float32)
    assert got[1, 0, 0].tolist() == [largest, -largest]
    assert got[1, 0, 1, 0] == 0.5
    assert np.isnan(got[1, 0, 1, 1])


def test_new_pages_are_zeros_of_their_type() -> None:
    int8 = create_pages(3, 2, 4, 8, "int8")
    assert isinstance(int8, QuantizedPages)
    assert (int8.shape, int8.scales.shape, int8.dtype) == ((3, 2, 4, 8), (3, 2, 4), jnp.int8)
    for kind in ("float32", "bfloat16", "float16", "float8_e4m3fn"):
        pages = create_pages(3, 2, 4, 8, kind)
        assert pages.dtype == jnp.dtype(kind)
        assert not np.asarray(pages, np.float32).any()
