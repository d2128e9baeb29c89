"""Matrix products with a weight, and how the weight lies in memory.

A checkpoint stores [out, in]. What is fastest to multiply with depends on the device, so a weight has a
layout, chosen once when the model is built; there is never a second copy in another layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True, slots=True)
class RowMajor:
    """[out, in], as stored. What GPU libraries take as it is."""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, inputs

    def store(self, packed: np.ndarray, start: int, weight: np.ndarray) -> None:
        """Put the rows `weight` [n, in] at start .. start + n - 1 of a weight [out, in], in its dtype."""
        packed[start : start + len(weight)] = weight

    def source(self, index: tuple[slice, ...], outputs: int, inputs: int) -> tuple[range, range]:
        """Which rows and columns of the checkpoint's [out, in] the part `index` of the weight holds."""
        return range(outputs)[index[0]], range(inputs)[index[1]]

    def matmul(self, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """x [T, in] times the weight transposed -> [T, out] in `dtype` (None: that of x)."""
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    def rows(self, weight: jax.Array, ids: jax.Array) -> jax.Array:
        return weight[ids]


@dataclass(frozen=True, slots=True)
class Blocked:
    """[out / block, in, block]: each block of outputs is one stretch of memory, read front to back.

    XLA's CPU products want the weight as [in, out] and read it in strips of some 64 outputs: from [out, in]
    it is transposed on every call, from [in, out] each row of a strip lies on another memory page. Blocks
    are those strips. 8 rows: 30 ms as [out, in], 22 ms as [in, out], 15 ms blocked (SmolLM2's MLP weights;
    docs/log.md). The broadcast below costs nothing once it is fused into the product, which
    `runtime.steps.compile_options` asks for.
    """

    block: int = 64

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs // self.block, inputs, self.block

    def store(self, packed: np.ndarray, start: int, weight: np.ndarray) -> None:
        """Element (o, i) of a weight [out, in] lies at (o // block, i, o % block)."""
        done = 0
        while done < len(weight):
            block, place = divmod(start + done, self.block)
            count = min(self.block - place, len(weight) - done)
            packed[block, :, place : place + count] = weight[done : done + count].T
            done += count

    def source(self, index: tuple[slice, ...], outputs: int, inputs: int) -> tuple[range, range]:
        blocks, columns, inside = range(outputs // self.block)[index[0]], range(inputs)[index[1]], index[2]
        assert range(self.block)[inside] == range(self.block), f"a block cannot be cut: {index}"
        return range(blocks.start * self.block, blocks.stop * self.block), columns

    def matmul(self, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        if x.shape[0] == 1:  # one row leaves the fast products for a slower path, two do not
            return self.matmul(jnp.pad(x, ((0, 1), (0, 0))), weight, dtype)[:1]
        rows = jnp.broadcast_to(x, (weight.shape[0], *x.shape))
        product = lax.dot_general(  # [blocks, T, block]
            rows, weight, (((2,), (1,)), ((0,), (0,))), preferred_element_type=dtype
        )
        return product.transpose(1, 0, 2).reshape(x.shape[0], -1)

    def rows(self, weight: jax.Array, ids: jax.Array) -> jax.Array:
        return weight[ids // self.block, :, ids % self.block]


Layout = RowMajor | Blocked


def layout_for(platform: str, outputs: int) -> Layout:
    """The layout of a weight with this many outputs on this platform ("cpu", "gpu")."""
    blocked = Blocked()
    if platform == "cpu" and outputs % blocked.block == 0:
        return blocked
    return RowMajor()
