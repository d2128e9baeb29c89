"""Writes and copies of pages on the device: the numbers of the CPU, in the memory that was donated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import copy_pages, create_pages, write_kv
from pallas_kernels.device import KV_DTYPES

M, K, Z, H, T = 33, 2, 16, 64, 40


def pointers(pages: Any) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pages)]


def bits(pages: Any) -> list[np.ndarray]:
    """Copies: what numpy still looks at cannot be donated on CPU."""
    return [np.array(array).view(np.uint8) for array in jax.tree.leaves(pages)]


def places() -> tuple[jax.Array, jax.Array]:
    """Of T tokens: some at the last page's last place, some padding."""
    flat = np.random.default_rng(0).permutation(np.arange(Z, M * Z))[:T]
    flat[0], flat[-4:] = M * Z - 1, 0
    return jnp.asarray(flat // Z, jnp.int32), jnp.asarray(flat % Z, jnp.int32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_write_is_in_place_and_right(device: Any, kv_dtype: str) -> None:
    del device
    new = np.random.default_rng(1).standard_normal((T, K, H)).astype(np.float32)
    got = {}
    for platform in ("cpu", jax.default_backend()):
        with jax.default_device(jax.devices(platform)[0]):
            pages = jax.block_until_ready(create_pages(M, K, Z, H, kv_dtype))
            before = pointers(pages)
            written = jax.jit(write_kv, donate_argnums=0)(pages, jnp.asarray(new, jnp.bfloat16), *places())
            assert pointers(written) == before, f"{platform}: the pool was copied"
            got[platform] = bits(written)
    for mine, cpu in zip(got[jax.default_backend()], got["cpu"], strict=True):
        if kv_dtype == "int8":  # a division may round its last bit another way, and a value with it
            difference = np.abs(mine.astype(int) - cpu.astype(int))
            assert np.count_nonzero(difference) <= mine.size // 100
        else:
            np.testing.assert_array_equal(mine[1:], cpu[1:])  # page 0 takes the padding, in any order


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_are_in_place_and_right(device: Any, kv_dtype: str) -> None:
    """A swap and a chain: all are read before any is written."""
    del device
    drawn = jax.random.normal(jax.random.key(0), (M * Z, K, H), jnp.float32)
    at = jnp.arange(M * Z, dtype=jnp.int32)
    pages = jax.jit(write_kv, donate_argnums=0)(create_pages(M, K, Z, H, kv_dtype), drawn, at // Z, at % Z)
    before, addresses = bits(jax.block_until_ready(pages)), pointers(pages)
    sources, targets = [1, 2, 3, 4, M - 1, 0], [2, 1, 4, 5, 7, 0]
    copied = jax.jit(copy_pages, donate_argnums=0)(
        pages, jnp.asarray(sources, jnp.int32), jnp.asarray(targets, jnp.int32)
    )
    assert pointers(copied) == addresses, "the pool was copied"
    for new, old in zip(bits(copied), before, strict=True):
        expected = old.copy()
        expected[targets] = old[sources]
        np.testing.assert_array_equal(new, expected)
