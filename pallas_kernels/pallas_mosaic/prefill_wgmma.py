"""Prefill on Hopper: a producer warpgroup and two consumers that take turns on the tensor cores."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pallas_mosaic import prefill_common as common
from pallas_kernels.pallas_mosaic.common import Target, swizzled
from pallas_kernels.pallas_mosaic.prefill_common import ROWS, Blocks, Layout, Tile, Work
from pallas_kernels.rule import Rule

CONSUMERS = 2
_SHARED_BYTES = 232_448 - 1024  # of 9.0; the rest is for barriers
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Of 512 for three warpgroups; the producer holds up to 8 page ids."""
_ROW = plgpu.Layout.WGMMA.reduce(1)


def blocks_of(width: int, page_size: int) -> Blocks:
    """128 keys, 64 where an accumulator of 64 x H takes 128 registers; as many stages as shared memory holds
    beside the queries: three and 32 + 3 * 64 KiB at H 128."""
    keys = 128 if width <= 128 else 64
    stages = (_SHARED_BYTES - 2 * CONSUMERS * ROWS * width) // (2 * 2 * keys * width)
    return Blocks(keys=keys, page_size=page_size, stages=min(stages, 4))


def prefill(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, work: Work, out,
    *, rule: Rule, layout: Layout, blocks: Blocks, target: Target,
) -> None:  # fmt: skip
    """Writes the tokens of every tile into the mutable array `out`; q and out are [T, N * H]."""
    kv_heads, _, width = k_pages.shape[1:]
    piece = common.piece_of(width)
    # Rows as they lie in q and out, for TMA boxes that begin at any token: those of tiled arrays begin at
    # multiples of 8.
    copied = common.rows_layout(ROWS, width, q.dtype)
    sinks = common.sink_blocks(rule, blocks)

    def kernel(
        tiles_ref, table_ref, held_ref, q_ref, k_ref, v_ref, out_ref,
        queries, k_smem, v_smem,
        q_ready, k_ready, v_ready, k_free, v_free, turn, repaired,
    ):  # fmt: skip
        q_smem, rows_smem = queries
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.axis_index("head")
        tile = Tile.read(tiles_ref, lax.axis_index("tile"))

        def produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def fetch(visit, _):
                slot = lax.rem(visit, blocks.stages)
                block = tile.block(visit, sinks)
                places = common.places_in_page(block, blocks)
                for source, smem, ready, free in (
                    (k_ref, k_smem, k_ready, k_free),
                    (v_ref, v_smem, v_ready, v_free),
                ):

                    @pl.when(visit >= blocks.stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    pages = [
                        common.page_of(table_ref, tile.row, block, j, blocks) for j in range(blocks.pages)
                    ]
                    for j, page in enumerate(pages):
                        plgpu.copy_gmem_to_smem(
                            source.at[page, kv_head, places],
                            smem.at[slot, pl.ds(j * blocks.copied, blocks.copied)],
                            ready.at[slot],
                        )

            lax.fori_loop(0, tile.visits, fetch, None)
            if target.interpret:  # jax 0.11: whoever has waited at a barrier sees all that it completes

                def observe(visit, _):
                    for free in (k_free, v_free):
                        plgpu.barrier_wait(free.at[lax.rem(visit, blocks.stages)])

                lax.fori_loop(jnp.maximum(tile.visits - blocks.stages, 0), tile.visits, observe, None)

        def consume():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            first_token = 0 if layout.splits_heads else warpgroup * layout.tokens
            first_head = warpgroup * layout.heads if layout.splits_heads else 0
            mine = q_smem.at[warpgroup]

            def columns(head: int):
                """Of a head, in q and out as [T, N * H]: with N between them, tokens and width are no box."""
                inside = jnp.minimum(first_head + head, layout.group - 1) if layout.splits_heads else head
                return pl.ds(pl.multiple_of((kv_head * layout.group + inside) * width, width), width)

            for head in range(layout.heads):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(tile.start + first_token, layout.tokens), columns(head)],
                    rows_smem.at[warpgroup, pl.ds(head * layout.tokens, layout.tokens)],
                    q_ready.at[warpgroup],
                )
            base = tile.base + first_token
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW)
            positions = (row & (layout.tokens - 1)) + base

            def swap():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            plgpu.barrier_wait(q_ready.at[warpgroup])
            rows = plgpu.load(rows_smem.at[warpgroup], layout=copied)
            plgpu.commit_smem()
            mine[...] = rows
            plgpu.commit_smem()
            pl.when(warpgroup == 1)(swap)

            def visit(number, carry):
                acc, peak, total = carry
                slot = lax.rem(number, blocks.stages)
                block = tile.block(number, sinks)
                held = held_ref[tile.row, block]
                plgpu.barrier_wait(k_ready.at[slot])
                scores = _scores(mine, k_smem.at[slot], swap, target)
                plgpu.barrier_arrive(k_free.at[slot])

                scores, unit = common.capped(scores, rule)
                scores = lax.cond(
                    common.is_masked(tile, block, held, base, rule, blocks),
                    lambda: common.mask(
                        scores, positions, block, held,
                        rule=rule, blocks=blocks, layout=plgpu.Layout.WGMMA,
                    ),
                    lambda: scores,
                )  # fmt: skip
                higher = jnp.maximum(peak, scores.max(axis=1) * unit)
                decay = jnp.exp2(peak - higher)
                weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(higher, scores.shape, (0,)))
                total = total * decay + weights.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, (0,))
                narrow = weights.astype(q.dtype)
                acc, total, higher, narrow = lax.optimization_barrier((acc, total, higher, narrow))

                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_ready.at[slot])

                @pl.when(common.holds_strangers(tile, block, held, rule, blocks))
                def _():
                    _repair(v_smem, slot, tile, block, held, rule, blocks, warpgroup, piece)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(repaired)
                    plgpu.barrier_wait(repaired)

                plgpu.barrier_wait(turn)
                acc = _weighted(acc, narrow, v_smem.at[slot], target)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, higher, total

            acc, _, total = lax.fori_loop(
                0,
                tile.visits,
                visit,
                (
                    plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA),
                    plgpu.layout_cast(jnp.full((ROWS,), common.LOWEST, jnp.float32), _ROW),
                    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
                ),
            )
            pl.when(warpgroup == 0)(swap)

            share = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)
            result = (acc * lax.broadcast_in_dim(share, acc.shape, (0,))).astype(q.dtype)
            skipped = jnp.clip(tile.skipped - first_token, 0, layout.tokens)
            count = jnp.clip(tile.skipped + tile.length - first_token, skipped, layout.tokens)
            whole = count - skipped == layout.tokens

            def stored(head: int):
                return jnp.bool_(True) if not layout.splits_heads else first_head + head < layout.group

            mine[...] = result
            rows = plgpu.load(mine, layout=copied)
            plgpu.commit_smem()
            rows_smem.at[warpgroup][...] = rows
            plgpu.commit_smem()

            def store(first: jax.Array | int, number: int):
                for head in range(layout.heads):

                    @pl.when(stored(head))
                    def _(head=head):
                        plgpu.copy_smem_to_gmem(
                            rows_smem.at[warpgroup, pl.ds(head * layout.tokens + first, number)],
                            out_ref.at[pl.ds(tile.start + first_token + first, number), columns(head)],
                        )

            @pl.when(whole)
            def _():
                store(0, layout.tokens)

            @pl.when(jnp.logical_not(whole))
            def _():  # the tokens around these are another row's
                lax.fori_loop(skipped, count, lambda token, _: store(token, 1), None)

            plgpu.wait_smem_to_gmem(0)

        @pl.when(tile.visits > 0)
        def _():
            pl.when(warpgroup == CONSUMERS)(produce)
            pl.when(warpgroup < CONSUMERS)(consume)

    # The same memory seen in two ways, one after the other; a warpgroup's half is its own in both. The
    # interpreter takes two views of one memory for a race whatever parts of it are used.
    queries = (
        swizzled((CONSUMERS, ROWS, width), q.dtype),
        plgpu.SMEM((CONSUMERS, ROWS, width), q.dtype),
    )
    run = plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=[
            queries if target.interpret else plgpu.RefUnion(*queries),
            swizzled((blocks.stages, blocks.keys, width), q.dtype),
            swizzled((blocks.stages, blocks.keys, width), q.dtype),
            plgpu.Barrier(num_arrivals=layout.heads, num_barriers=CONSUMERS),
            plgpu.Barrier(num_arrivals=blocks.pages, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=blocks.pages, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ],
        grid=(work.tiles.shape[0], kv_heads),
        grid_names=("tile", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="ragged_prefill_wgmma",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=target.interpret_params,
    )
    run(work.tiles, work.table, work.held, q, k_pages, v_pages, out)


def _scores(q_smem, k_smem, after_issue, target: Target) -> jax.Array:
    """q k^T [ROWS, keys] float32; `after_issue` runs while the tensor cores do."""
    if target.interpret:  # the interpreter's wgmma has no vector clocks: read as values, which it does check
        scores = jnp.dot(q_smem[...], k_smem[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # reads by registers end before the next TMA write: wgmma needs no such fence
        after_issue()
        return scores

    def product(acc):
        plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        after_issue()
        return acc[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((q_smem.shape[0], k_smem.shape[0]), jnp.float32))


def _weighted(acc: jax.Array, weights: jax.Array, v_smem, target: Target) -> jax.Array:
    """acc + weights @ v, the weights from registers."""
    if target.interpret:
        acc = acc + jnp.dot(weights, v_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc

    def product(acc_ref):
        plgpu.wgmma(acc_ref, weights, v_smem)

    start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(product)(start)


def _repair(v_smem, slot, tile: Tile, block, held, rule: Rule, blocks: Blocks, warpgroup, piece: int) -> None:
    """Zeroes the values of a stage that are nobody's; each warpgroup 64 keys of them, `piece` columns at a
    time: registers are full of accumulators here."""

    def zero(first: int):
        place = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW) + first
        keep = common.owned(tile, place, block, held, rule, blocks)
        keep = lax.broadcast_in_dim(keep, (ROWS, piece), (0,))
        for column in range(0, v_smem.shape[2], piece):
            part = v_smem.at[slot, pl.ds(first, ROWS), pl.ds(column, piece)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(keep, values, jnp.zeros_like(values))

    for number in range(blocks.keys // ROWS):
        pl.when(warpgroup == number)(lambda number=number: zero(number * ROWS))
