"""Prefill by mma.sync, on GPUs without wgmma: one warpgroup of 64 rows a tile, which copies for itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mosaic_gpu

from pallas_kernels.pallas_mosaic import prefill_common as common
from pallas_kernels.pallas_mosaic.common import Target, async_copy_tile, dot, store, swizzled, synchronize
from pallas_kernels.pallas_mosaic.prefill_common import ROWS, Blocks, Layout, Tile, Work
from pallas_kernels.rule import Rule

_SUM = plgpu.Layout.MMA_ACC(jnp.bfloat16)  # the same for all 16-bit operands: 64 rows over four warps
_ROW = _SUM.reduce(1)


def blocks_of(width: int, page_size: int) -> Blocks:
    """64 keys and two stages: 96 KiB at H 128, which every GPU has. 32 keys where 64 x H of accumulators take
    half of the registers."""
    return Blocks(keys=64 if width <= 128 else 32, page_size=page_size, stages=2)


def prefill(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, work: Work,
    *, rule: Rule, layout: Layout, blocks: Blocks, target: Target,
) -> jax.Array:  # fmt: skip
    """Rows of every tile, [C, K * parts, 64, H], as `Layout` orders them; q is [T, N * H].

    Tiles are stored whole: without TMA there is no store of a part of a register tile.
    """
    kv_heads, _, width = k_pages.shape[1:]
    parts = 2 if layout.splits_heads else 1
    piece = common.piece_of(width)
    pieces = width // piece  # loaded and multiplied one after the other
    copied = common.rows_layout(ROWS, width, q.dtype)
    tile_bytes = 128 if target.tma else async_copy_tile(blocks.copied, width)
    left, right = plgpu.Layout.MMA_LHS(q.dtype), plgpu.Layout.MMA_RHS(q.dtype)
    sinks = common.sink_blocks(rule, blocks)
    in_flight = 2 * (blocks.stages - 1) * blocks.pages  # copies issued after the one that is awaited
    hold_q = width <= 128

    def kernel(tiles_ref, table_ref, held_ref, q_ref, k_ref, v_ref, out_ref, queries, k_smem, v_smem,
               k_ready, v_ready):  # fmt: skip
        q_smem, rows_smem = queries
        part = lax.axis_index("head")
        kv_head = lax.div(part, parts)
        first_head = lax.rem(part, parts) * layout.heads if layout.splits_heads else 0
        tile = Tile.read(tiles_ref, lax.axis_index("tile"))

        def look_up(visit):
            # cp.async counts copies: past the end it repeats the last block
            block = tile.block(jnp.minimum(visit, tile.visits - 1), sinks)
            return [common.page_of(table_ref, tile.row, block, j, blocks) for j in range(blocks.pages)]

        def copy(source, smem, ready, visit, pages):
            places = common.places_in_page(tile.block(jnp.minimum(visit, tile.visits - 1), sinks), blocks)
            slot = lax.rem(visit, blocks.stages)

            def issue():
                for j, page in enumerate(pages):
                    taken = source.at[page, kv_head, places]
                    place = smem.at[slot, pl.ds(j * blocks.copied, blocks.copied)]
                    if target.tma:
                        plgpu.copy_gmem_to_smem(taken, place, ready.at[slot])
                    else:
                        plgpu.copy_gmem_to_smem(taken, place, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

            if target.tma:
                pl.when(visit < tile.visits)(issue)
            else:
                issue()

        def wait(ready, visit):
            if target.tma:
                plgpu.barrier_wait(ready.at[lax.rem(visit, blocks.stages)])
            else:
                plgpu.wait_gmem_to_smem(in_flight)

        @pl.when(tile.visits > 0)
        def _():
            # K 0, V 0, K 1, V 1, ...: the order of all copies
            pages = [look_up(jnp.int32(n)) for n in range(blocks.stages)]
            for n in range(blocks.stages):
                copy(k_ref, k_smem, k_ready, jnp.int32(n), pages[n])
                if n < blocks.stages - 1:
                    copy(v_ref, v_smem, v_ready, jnp.int32(n), pages[n])

            for head in range(layout.heads):
                inside = jnp.minimum(first_head + head, layout.group - 1) if layout.splits_heads else head
                column = pl.multiple_of((kv_head * layout.group + inside) * width, width)
                rows = pl.ds(head * layout.tokens, layout.tokens)
                box = q_ref.at[pl.ds(tile.start, layout.tokens), pl.ds(column, width)]
                rows_smem[rows] = plgpu.load(box, optimized=False)
            synchronize(target)
            rows = plgpu.load(rows_smem, layout=copied)
            synchronize(target)
            q_smem[...] = rows
            synchronize(target)

            def q_piece(c: int):
                return plgpu.load(q_smem.at[:, pl.ds(c * piece, piece)], layout=left)

            held_q = [q_piece(c) for c in range(pieces)] if hold_q else []
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW)
            positions = (row & (layout.tokens - 1)) + tile.base

            def visit(number, carry):
                sums, peak, total, pages = carry
                slot = lax.rem(number, blocks.stages)
                block = tile.block(number, sinks)
                held = held_ref[tile.row, block]
                wait(k_ready, number)
                synchronize(target)  # all have read V of the block before: its stage is free
                copy(v_ref, v_smem, v_ready, number + blocks.stages - 1, pages)
                pages = look_up(number + blocks.stages)

                scores = plgpu.layout_cast(jnp.zeros((ROWS, blocks.keys), jnp.float32), _SUM)
                for c in range(pieces):
                    k = k_smem.at[slot, :, pl.ds(c * piece, piece)].transpose((1, 0))
                    k = plgpu.load(k, layout=right)
                    scores = dot(target, scores, held_q[c] if hold_q else q_piece(c), k)

                scores, unit = common.capped(scores, rule)
                scores = lax.cond(
                    common.is_masked(tile, block, held, tile.base, rule, blocks),
                    lambda: common.mask(
                        scores, positions, block, held,
                        rule=rule, blocks=blocks, layout=_SUM,
                    ),
                    lambda: scores,
                )  # fmt: skip
                higher = jnp.maximum(peak, scores.max(axis=1) * unit)
                decay = jnp.exp2(peak - higher)
                weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(higher, scores.shape, (0,)))
                total = total * decay + weights.sum(axis=1)
                narrow = _as_left_operand(weights, q.dtype, left, target)

                wait(v_ready, number)
                synchronize(target)  # all have read K of this block
                copy(k_ref, k_smem, k_ready, number + blocks.stages, pages)

                @pl.when(common.holds_strangers(tile, block, held, rule, blocks))
                def _():
                    _repair(v_smem, slot, tile, block, held, rule, blocks, tile_bytes)
                    synchronize(target)

                scaled = []
                for c in range(pieces):
                    v = plgpu.load(v_smem.at[slot, :, pl.ds(c * piece, piece)], layout=right)
                    rest = sums[c] * lax.broadcast_in_dim(decay, sums[c].shape, (0,))
                    scaled.append(dot(target, rest, narrow, v))
                return tuple(scaled), higher, total, pages

            zero = plgpu.layout_cast(jnp.zeros((ROWS, piece), jnp.float32), _SUM)
            start = (
                (zero,) * pieces,
                plgpu.layout_cast(jnp.full((ROWS,), common.LOWEST, jnp.float32), _ROW),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
                pages[-1],
            )
            sums, _, total, _ = lax.fori_loop(0, tile.visits, visit, start)
            if not target.tma:
                plgpu.wait_gmem_to_smem(0)

            share = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)
            for c in range(pieces):
                result = sums[c] * lax.broadcast_in_dim(share, sums[c].shape, (0,))
                q_smem[:, pl.ds(c * piece, piece)] = result.astype(q.dtype)
            synchronize(target)
            store(out_ref.at[lax.axis_index("tile"), part], plgpu.load(q_smem, layout=copied))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((work.tiles.shape[0], kv_heads * parts, ROWS, width), q.dtype),
        scratch_types=[
            plgpu.RefUnion(swizzled((ROWS, width), q.dtype), plgpu.SMEM((ROWS, width), q.dtype)),
            swizzled((blocks.stages, blocks.keys, width), q.dtype, most_bytes=tile_bytes),
            swizzled((blocks.stages, blocks.keys, width), q.dtype, most_bytes=tile_bytes),
            plgpu.Barrier(num_arrivals=blocks.pages, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=blocks.pages, num_barriers=blocks.stages),
        ],
        grid=(work.tiles.shape[0], kv_heads * parts),
        grid_names=("tile", "head"),
        kernel_name="ragged_prefill_mma",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=target.interpret_params,
    )(work.tiles, work.table, work.held, q, k_pages, v_pages)


def _as_left_operand(weights: jax.Array, dtype: Any, left: Any, target: Target) -> jax.Array:
    """float32 accumulators as the 16-bit left operand of the next product: two tiles of 8 columns are one of
    16, the same registers in the same order, for which Pallas has no layout cast."""
    if target.interpret:
        return weights.astype(dtype)

    inline: Any = plgpu.inline_mgpu(  # its function takes a context beside the arguments
        arg_types=(_SUM,), return_type=plgpu.ShapeDtypeStruct(weights.shape, dtype, layout=left)
    )

    @inline
    def regroup(_context: Any, wide: Any) -> Any:
        narrow = wide.astype(mosaic_gpu.utils.dtype_to_ir_type(dtype))
        layout = left.to_mgpu()
        registers = narrow.registers.reshape(layout.registers_shape(narrow.shape))
        return mosaic_gpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return regroup(weights)


def _repair(v_smem, slot, tile: Tile, block, held, rule: Rule, blocks: Blocks, tile_bytes: int) -> None:
    """Zeroes the values of a stage that are nobody's."""
    shape = v_smem.shape[1:]
    layout = common.rows_layout(shape[0], shape[1], v_smem.dtype, tile_bytes=tile_bytes)
    place = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    values = plgpu.load(v_smem.at[slot], layout=layout)
    keep = common.owned(tile, place, block, held, rule, blocks)
    v_smem.at[slot][...] = jnp.where(keep, values, jnp.zeros_like(values))
