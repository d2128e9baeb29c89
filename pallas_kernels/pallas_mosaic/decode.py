"""Decode in Pallas Mosaic GPU: one query a row over the row's pages, split over keys (flash-decoding).

One thread block (a warpgroup) serves one row, one KV head and one share of the row's keys; the query heads of
the group are the 16 rows of mma.sync. The work is reading pages, so the kernel is built around bytes in
flight: an H200 moves 36 kB/us for each multiprocessor with some 1 us of latency, so 40 kB or more must be
under way at any time.

* A block of keys is 32 KB of K and V (64 keys of width 128): several pages of 16, or a part of a page of 128.
  Slots form a ring as deep as leaves room for two thread blocks on a multiprocessor. With three slots each of
  them has two to three blocks of keys under way while it computes on one.
* Page ids are read one block before the copies that want them start, so no copy waits for the table. Bulk
  copies (TMA, 9.0 and newer) or cp.async of 16 bytes a thread (8.x) fill swizzled slots; ldmatrix reads them.
* One synchronisation a block does three things: the probabilities are in shared memory for all warps (each
  has scores of a quarter of the keys and wants all of them), K of this block and V of the block before have
  been read, and their slots are refilled. The maximum over keys is the only other exchange between warps; the
  sum is kept by element and added up once at the end.
* Keys are hidden by position, never by content: hidden scores are selected away, and V is selected in
  registers in the few blocks that are not wholly visible. A window starts at its first page.
* Shares are equal in blocks of keys, whatever the row's length. Partial results are float32 numerators,
  maxima and sums, which a few fused XLA operations merge in a fixed order. Nothing is atomic.
* Mosaic's automatic barriers (one before each copy, two around each store) are off: `_kernel` says where it
  relies on one of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Backend, Geometry
from pallas_kernels.pallas_mosaic.common import (
    LOG2_E,
    MASKED,
    Target,
    async_copy_tile,
    dot,
    store,
    swizzled,
    synchronize,
)
from pallas_kernels.pallas_mosaic.decode_plan import REDUCTION_BYTES, Plan, plan
from pallas_kernels.rule import Rule
from pallas_kernels.tuning import geometry_key, lookup


def decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    *,
    rule: Rule,
    backend: Backend,
) -> jax.Array:
    """Attention of the query at position kv_len[b] - 1 of each row b, as `Rule` defines it.

    q [B, N, H]; k_pages, v_pages [M, K, Z, H] of q's type; page_table int32 [B, P], ids in 0 .. M - 1, 0 a
    hole; kv_len int32 [B], 0 for padding rows. Returns [B, N, H] in q's dtype; softmax and sums in float32.
    Rows that see no key give zeros. `common.unsupported_shapes` says for which shapes there are kernels;
    `reference.paged_attention` is the specification.
    """
    rows, target, geometry = q.shape[0], Target.of(backend), Geometry.of(q, k_pages)
    device, pages = backend.device, page_table.shape[1]
    tuned = lookup(device.kind, "pallas_mosaic.decode", geometry_key(geometry, rows))
    sizes = plan(rows, pages, geometry, target.shared_bytes, device.num_cores, tuned)
    return _decode(q, k_pages, v_pages, page_table, kv_len, sizes=sizes, rule=rule, target=target)


def _decode(q, k_pages, v_pages, page_table, kv_len, *, sizes: Plan, rule: Rule, target: Target):
    rows, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    group, dtype = heads // kv_heads, q.dtype
    q = q.reshape(rows, kv_heads, group, width)
    if sizes.group != group:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, sizes.group - group), (0, 0)))
    lead = (rows, kv_heads, sizes.splits)
    split = sizes.splits > 1
    out_dtype = jnp.dtype(jnp.float32) if split else dtype
    out_type = [jax.ShapeDtypeStruct((*lead, sizes.group, width), out_dtype)]
    if split:
        sums_shape = (rows, kv_heads, sizes.rows, sizes.splits)
        out_type += [jax.ShapeDtypeStruct(sums_shape, jnp.float32)] * 2
    tile = 128 if target.tma else async_copy_tile(min(sizes.block, sizes.page_size), width)
    slots = swizzled((sizes.depth, sizes.block, width), dtype, most_bytes=tile)
    barriers = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=sizes.depth)
    out, *sums = plgpu.kernel(
        functools.partial(_kernel, sizes=sizes, rule=rule, target=target),
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((sizes.rows, width), dtype), slots, slots, swizzled((sizes.rows, sizes.block), dtype),
            plgpu.SMEM((sizes.rows, width), out_dtype), barriers, barriers,
        ],
        grid=lead,
        grid_names=("row", "head", "split"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        interpret=target.interpret_params,
        kernel_name="paged_decode",
    )(q, k_pages, v_pages, page_table, kv_len)  # fmt: skip
    out = _merge(out, *(x[:, :, : sizes.group] for x in sums)) if split else out[:, :, 0]
    return out[:, :, :group].reshape(rows, heads, width).astype(dtype)


def _merge(numerators: jax.Array, maxima: jax.Array, sums: jax.Array) -> jax.Array:
    """numerators float32 [B, K, splits, G, H], maxima (of scores in base 2) and sums [B, K, G, splits] ->
    [B, K, G, H]; zeros where no share saw a key. One launch: the weights are divided by their total along the
    last axis, as in a softmax, before they meet the numerators; other orders took three."""
    weights = jnp.exp2(maxima - jnp.max(maxima, axis=3, keepdims=True))
    total = jnp.sum(weights * sums, axis=3, keepdims=True)
    weights /= jnp.where(total == 0, 1.0, total)
    return jnp.sum(jnp.swapaxes(weights, 2, 3)[..., None] * numerators, axis=2)


@dataclass
class _Share:
    """The blocks of keys that one thread block visits, numbered from 0: its share of the row's, which are the
    sinks' and those from the first page on that the window touches."""

    table: Any  # [B, P] in device memory
    row: jax.Array
    length: jax.Array  # keys of the row
    begin: jax.Array  # block of the row that is number 0
    count: jax.Array
    window_from: jax.Array  # key with which the blocks after the sinks start
    sink_blocks: int
    sizes: Plan
    rule: Rule

    @classmethod
    def of(
        cls, table: Any, row: jax.Array, length: jax.Array, split: jax.Array, sizes: Plan, rule: Rule
    ) -> _Share:
        block = sizes.block
        sink_blocks = -(-rule.sinks // block)
        total = _ceil(length, block)
        window_from = jnp.int32(0)
        if rule.window is not None:
            granule = min(block, sizes.page_size)  # so that a block stays within a page that is larger
            window_from = lax.div(jnp.maximum(length - rule.window, 0), granule) * granule
            window_from = jnp.maximum(window_from, sink_blocks * block)
            total = jnp.minimum(total, sink_blocks) + _ceil(jnp.maximum(length - window_from, 0), block)
        share = jnp.maximum(_ceil(total, sizes.splits), sizes.least)
        begin = split * share
        count = jnp.clip(total - begin, 0, share)
        return cls(table, row, length, begin, count, window_from, sink_blocks, sizes, rule)

    def first_key(self, number: jax.Array | int) -> jax.Array:
        block, j = self.sizes.block, self.begin + number
        after = self.window_from + (j - self.sink_blocks) * block
        return jnp.where(j < self.sink_blocks, j * block, after) if self.sink_blocks else after

    def page_ids(self, number: jax.Array | int) -> list[jax.Array]:
        """The pages of a block. Beyond the row's keys: whatever the table holds, read and not seen."""
        first, last = lax.div(self.first_key(number), self.sizes.page_size), self.sizes.pages - 1
        return [self.table[self.row, jnp.minimum(first + n, last)] for n in range(self.sizes.copies)]

    def all_visible(self, number: jax.Array, holes: jax.Array) -> jax.Array:
        first = self.first_key(number)
        seen = (first + self.sizes.block <= self.length) & (holes == 0)
        if self.rule.window is not None:
            inside = first >= self.length - self.rule.window
            inside |= first + self.sizes.block <= self.rule.sinks
            seen &= inside
        return seen

    def visible(
        self, number: jax.Array, holes: jax.Array, shape: tuple[int, int], axis: int, layout: Any
    ) -> jax.Array:
        """bool `shape` with the keys of a block along `axis`: which of them the query sees."""
        key, first = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout), self.first_key(number)
        seen = key < self.length - first
        if self.rule.window is not None:
            inside = key >= self.length - self.rule.window - first
            if self.rule.sinks:
                inside |= key < self.rule.sinks - first
            seen &= inside
        if self.sizes.copies == 1:
            return seen & (holes == 0)
        return seen & ((lax.shift_right_logical(holes, lax.div(key, self.sizes.page_size)) & 1) == 0)


@dataclass
class _Ring:
    """Slots of K or of V, and the copies into them. Copies start in one order, K 0, V 0, K 1, V 1, ...: those
    of 8.x are waited for by their number from the last."""

    pages: Any  # [M, K, Z, H] in device memory
    slots: Any  # [depth, block, H]
    full: Any  # a barrier for each slot
    share: _Share
    target: Target

    def slot(self, number: jax.Array | int) -> jax.Array:
        return lax.rem(jnp.int32(number), self.share.sizes.depth)

    def start(self, number: jax.Array | int, page_ids: list[jax.Array]) -> None:
        """Copy a block into its slot, which all warps have read."""
        sizes, head, slot = self.share.sizes, lax.axis_index("head"), self.slot(number)
        for n, page in enumerate(page_ids):
            source, place = self.pages.at[page, head], self.slots.at[slot]
            if sizes.page_size > sizes.block:
                offset = lax.rem(self.share.first_key(number), sizes.page_size)
                source = self.pages.at[page, head, pl.ds(offset, sizes.block)]
            elif sizes.copies > 1:
                place = self.slots.at[slot, pl.ds(n * sizes.page_size, sizes.page_size)]
            if self.target.tma:
                plgpu.copy_gmem_to_smem(source, place, self.full.at[slot])
            else:
                plgpu.copy_gmem_to_smem(source, place, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def wait(self, number: jax.Array, later: int, at_end: int) -> Any:
        """The slot of a block, once it is full. `later` blocks of K or V have been started after this one,
        and fewer near the end of the share: with r blocks of keys to come, no more than 2 r + `at_end`."""
        slot = self.slot(number)
        if self.target.tma:
            plgpu.barrier_wait(self.full.at[slot])
            return self.slots.at[slot]
        left, steady = self.share.count - 1 - number, -(-(later - at_end) // 2)
        for r in range(steady + 1):

            @pl.when(left == r if r < steady else left >= r)
            def _(r: int = r) -> None:
                plgpu.wait_gmem_to_smem(min(later, 2 * r + at_end) * self.share.sizes.copies)

        return self.slots.at[slot]


def _kernel(q, k_pages, v_pages, page_table, kv_len, *refs, sizes: Plan, rule: Rule, target: Target):
    """q [B, K, G, H]; outputs of `_merge`, or [B, K, 1, G, H] in q's dtype when there is one share."""
    out, *sums, q_shared, k_slots, v_slots, p_shared, out_shared, k_full, v_full = refs
    depth, shape = sizes.depth, (sizes.rows, sizes.block)
    where = tuple(map(lax.axis_index, ("row", "head", "split")))
    left, right, product = (
        layout(q.dtype, m_warps=sizes.m_warps)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    share = _Share.of(page_table, where[0], kv_len[where[0]], where[2], sizes, rule)
    k_ring = _Ring(k_pages, k_slots, k_full, share, target)
    v_ring = _Ring(v_pages, v_slots, v_full, share, target)

    def full(value: float, *shape: int) -> jax.Array:
        layout = product if len(shape) == 2 else product.reduce(1)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def along(by_row: jax.Array, columns: int) -> jax.Array:
        wide = lax.broadcast_in_dim(by_row, (sizes.rows, columns), (0,))
        return plgpu.layout_cast(wide, product)

    ids = [share.page_ids(n) for n in range(depth + 1)]
    for n in range(depth):

        @pl.when(n < share.count)
        def _(n: int = n) -> None:
            k_ring.start(n, ids[n])
            if n < depth - 1:
                v_ring.start(n, ids[n])

    q_shared[pl.ds(0, sizes.group)] = q[where[:2]]  # the rows of padding hold anything, and give anything
    synchronize(target)
    queries = plgpu.load(q_shared, layout=left, optimized=False)

    def step(number: jax.Array, carry: tuple) -> tuple:
        numerator, largest, total, v_ids, k_ids, holes = carry
        keys = plgpu.load(k_ring.wait(number, 2 * depth - 2, 1).transpose((1, 0)), layout=right)
        scores = _base2(dot(target, full(0.0, *shape), queries, keys), rule)
        seen = share.visible(number, holes[0], shape, 1, product)
        scores = jnp.where(seen, scores, MASKED)
        grown = jnp.maximum(largest, jnp.max(scores, axis=1))
        shrink = jnp.exp2(largest - grown)
        p = jnp.where(seen, jnp.exp2(scores - along(grown, sizes.block)), 0.0)
        # All warps have read what is overwritten here: the maximum over keys has synchronised them.
        p_shared[...] = p.astype(q.dtype)
        synchronize(target)

        @pl.when(number + depth - 1 < share.count)
        def _() -> None:
            v_ring.start(number + depth - 1, v_ids)

        @pl.when(number + depth < share.count)
        def _() -> None:
            k_ring.start(number + depth, k_ids)

        next_ids = share.page_ids(number + depth + 1)
        p_left = plgpu.load(p_shared, layout=left)
        values = plgpu.load(v_ring.wait(number, 2 * depth - 1, 0), layout=right)
        values = lax.cond(
            share.all_visible(number, holes[0]),
            lambda v: v,
            lambda v: jnp.where(share.visible(number, holes[0], v.shape, 0, right), v, jnp.zeros_like(v)),
            values,
        )
        numerator = dot(target, numerator * along(shrink, sizes.width), p_left, values)
        total = total * along(shrink, sizes.block) + p
        return numerator, grown, total, k_ids, next_ids, [*holes[1:], _holes(k_ids)]

    start = (
        full(0.0, sizes.rows, sizes.width), full(MASKED, sizes.rows), full(0.0, *shape),
        ids[depth - 1], ids[depth], [_holes(ids[n]) for n in range(depth)],
    )  # fmt: skip
    numerator, largest, total = lax.fori_loop(0, share.count, step, start)[:3]
    total = jnp.sum(total, axis=1)
    if not sums:
        numerator /= along(jnp.where(total == 0, 1.0, total), sizes.width)
    store(out_shared, numerator.astype(out_shared.dtype))
    synchronize(target)
    store(out.at[where], out_shared[pl.ds(0, sizes.group)])
    for reference, value in zip(sums, (largest, total), strict=False):
        store(reference.at[where[0], where[1], :, where[2]], value)


def _base2(products: jax.Array, rule: Rule) -> jax.Array:
    """Scores times log2(e), so that exp2 of them is what the softmax wants."""
    if rule.soft_cap is None:
        return products * (rule.scale * LOG2_E)
    # tanh(x) = (1 - t) / (1 + t), t = exp(-2 x): the hardware's tanh is too coarse for a cap of 50. Beyond 30
    # it is 1, and t stays finite.
    x = jnp.clip(products * (rule.scale / rule.soft_cap), -30.0, 30.0)
    t = jnp.exp2(x * (-2 * LOG2_E))
    return (1 - t) / (1 + t) * (rule.soft_cap * LOG2_E)


def _holes(page_ids: list[jax.Array]) -> jax.Array:
    """Bit n: page n of a block is a hole."""
    return functools.reduce(lax.bitwise_or, [jnp.where(p == 0, 1 << n, 0) for n, p in enumerate(page_ids)])


def _ceil(dividend: jax.Array, divisor: int) -> jax.Array:
    return lax.div(dividend + (divisor - 1), divisor)
