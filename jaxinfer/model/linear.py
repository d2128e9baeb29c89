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

    def pack(self, weight: np.ndarray) -> np.ndarray:
        return weight

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

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """[out, in] -> [out / block, in, block]; element (o, i) moves to (o // block, i, o % block)."""
        blocks = weight.reshape(-1, self.block, weight.shape[1])
        return np.ascontiguousarray(blocks.transpose(0, 2, 1))

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
