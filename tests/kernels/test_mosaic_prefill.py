"""The Mosaic prefill kernels in JAX's GPU interpreter, with its race detector and NaN where nobody may see,
and planted faults: what the interpreter and the comparison with the reference are worth.

All of it runs in one child process: a wrong count of arrivals hangs the interpreter, and so do several
warpgroups where the CPU client has fewer threads than they wait with (NPROC sets how many it has).

    python tests/kernels/test_mosaic_prefill.py [name ...]     the cases and faults themselves
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.cases import Step, StepCase, build
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pallas_mosaic import common, prefill, prefill_common, prefill_mma, prefill_wgmma
from pallas_kernels.rule import Rule

BFLOAT16_ERROR = 8e-3  # of the largest value: probabilities are rounded to bfloat16 before p @ v

H200, A100 = Device("gpu", (9, 0)), Device("gpu", (8, 0))

# One grid cell a KV head and tile, a quarter of a second each: as few as show what is meant.
SMALL = dict(kv_heads=1, page_size=16, table_width=10, chunk_rows=2, dtype="bfloat16")
WINDOWED = StepCase(heads=4, chunk_tokens=20, window=30, sinks=5, **SMALL)
SPLIT = StepCase(heads=9, chunk_tokens=6, soft_cap=2.0, **SMALL)
PLAIN = StepCase(heads=4, chunk_tokens=20, **SMALL)
LONG = StepCase(4, 1, 64, 64, 8, 0, 20, 1, dtype="bfloat16")


class Case(NamedTuple):
    device: Device
    step: StepCase
    chunks: tuple[tuple[int, int], ...]  # (start, count)
    holes: float = 0.0
    stages: int | None = None  # instead of the kernel's own
    halves: bool = False  # tiles of half the tokens that the kernel can take


CASES = {
    # chunks from the middle of a page, of different rows, back to back, the second shorter than a tile
    "wgmma": Case(H200, WINDOWED, ((117, 17), (3, 2)), 0.2),
    "wgmma, heads split": Case(H200, SPLIT, ((37, 5),)),
    "wgmma, stages filled again": Case(H200, LONG, ((400, 20),), stages=2),  # four blocks
    "wgmma, small tiles": Case(H200, PLAIN, ((112, 18), (3, 2)), halves=True),
    "mma": Case(A100, PLAIN, ((141, 18), (0, 2))),  # three blocks: a stage is filled again
    "mma, window, sinks, holes": Case(A100, WINDOWED, ((117, 17), (3, 2)), 0.2),
    "mma, heads split, soft cap": Case(A100, SPLIT, ((37, 5),)),
    "mma, small tiles": Case(A100, PLAIN, ((56, 18), (3, 2)), halves=True),
    "mma, G 3, long pages": Case(
        A100, StepCase(3, 1, 80, 128, 2, 0, 12, 1, dtype="bfloat16"), ((140, 12),)
    ),
}  # fmt: skip

OWN_NAN = {"a row's own NaN, wgmma": "wgmma, small tiles", "a row's own NaN, mma": "mma, small tiles"}

FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    # name: (case, module, what it says, what it says instead, how it shows)
    "lost wait for V": ("mma", "prefill_mma", "wait(v_ready, number)", "", "raised"),
    "stage of V refilled early": (
        "mma", "prefill_mma",
        "synchronize(target)  # all have read V of the block before: its stage is free", "", "raised",
    ),
    "stage of K refilled early": (
        "mma", "prefill_mma", "synchronize(target)  # all have read K of this block", "", "raised",
    ),
    "lost causal mask": ("mma", "prefill_common", "visible = key <= position", "visible = key >= 0", "NaN"),
    "window one too wide": (
        "mma, window, sinks, holes", "prefill_common",
        "position - rule.window\n", "position - rule.window - 1\n", "wrong",
    ),
    "values of strangers": (
        "mma", "prefill_common",
        "strange = (first + blocks.keys > tile.keys) | (held != blocks.all_held)", "strange = first < 0",
        "NaN",
    ),
    "another row's tokens": (
        "mma", "prefill_common", "(place >= described.skipped[:, None])", "(place[None] >= 0)", "wrong",
    ),
    "lost commit before the store": (
        "wgmma", "prefill_wgmma",
        "            rows_smem.at[warpgroup][...] = rows\n            plgpu.commit_smem()\n",
        "            rows_smem.at[warpgroup][...] = rows\n", "raised",
    ),
    "lost wait for a free stage": (
        "wgmma, stages filled again", "prefill_wgmma", "plgpu.barrier_wait(free.at[slot])", "pass", "raised",
    ),
    "K free before it is read": (
        "wgmma, stages filled again", "prefill_wgmma",
        "scores = _scores(mine, k_smem.at[slot], swap, target)\n"
        "                plgpu.barrier_arrive(k_free.at[slot])\n",
        "plgpu.barrier_arrive(k_free.at[slot])\n"
        "                scores = _scores(mine, k_smem.at[slot], swap, target)\n", "raised",
    ),
    "V free before it is read": (
        "wgmma, stages filled again", "prefill_wgmma",
        "acc = _weighted(acc, narrow, v_smem.at[slot], target)\n"
        "                plgpu.barrier_arrive(v_free.at[slot])\n",
        "plgpu.barrier_arrive(v_free.at[slot])\n"
        "                acc = _weighted(acc, narrow, v_smem.at[slot], target)\n", "raised",
    ),
    "repair not awaited": ("wgmma", "prefill_wgmma", "plgpu.barrier_wait(repaired)", "", "raised"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ in the child


def made(case: Case, poison: float) -> Step:
    return build(case.step, (), case.chunks, tiles=(tile_of(case),), holes=case.holes, poison=poison)


def tile_of(case: Case) -> int:
    return prefill.query_tile(case.step.geometry, case.device) // (2 if case.halves else 1)


def program(case: Case) -> Callable[[Step], np.ndarray]:
    """The kernel of a case, traced once."""
    module = prefill_wgmma if case.device == H200 else prefill_mma
    blocks_of = module.blocks_of

    def blocks(width: int, page_size: int) -> prefill_common.Blocks:
        own = blocks_of(width, page_size)
        return dataclasses.replace(own, stages=case.stages or own.stages)

    @jax.jit
    def run(q, k_pages, v_pages, batch):
        with mock.patch.object(module, "blocks_of", blocks):
            return prefill.prefill(
                q, k_pages, v_pages, batch.page_table, batch.positions, batch.kv_len, *batch.tiles,
                batch.num_tiles, rule=case.step.rule, tile=tile_of(case),
                backend=Backend("pallas_mosaic", case.device, interpret=True),
            )  # fmt: skip

    return lambda step: np.asarray(run(*step[:4]), np.float32)


def attend(case: Case, *, twice: bool) -> dict[str, Any]:
    """Runs a case: what came out of it, and how far it is from the reference."""
    step, clean, run = made(case, np.nan), made(case, 0.0), program(case)
    got = run(step)
    again = run(step) if twice else got
    want = np.asarray(reference.paged_attention(*clean[:4], rule=case.step.rule), np.float32)
    if races_found():
        return {"is": "raised", "error": "races found"}
    if not np.isfinite(got).all():
        return {"is": "NaN"}
    error = float(np.abs(got - want).max() / np.abs(want).max())
    sound = error <= BFLOAT16_ERROR and not got[~step.real].any() and np.array_equal(got, again)
    return {"is": "right" if sound else "wrong", "error": error}


def own_nan(case: Case) -> dict[str, Any]:
    """NaN in the last value of row 0 and in the last key of row 1: whether it gets where `prefill` says."""
    step, run = made(case, np.nan), program(case)
    clean, (k_pages, v_pages), size = run(step), step[1:3], case.step.page_size
    last = [int(n) - 1 for n in step.batch.kv_len]
    page = [int(step.batch.page_table[row, key // size]) for row, key in enumerate(last)]
    k_pages = k_pages.at[page[1], :, last[1] % size].set(np.nan)
    v_pages = v_pages.at[page[0], :, last[0] % size].set(np.nan)
    got = run(step._replace(k_pages=k_pages, v_pages=v_pages))
    blocks = (prefill_wgmma if case.device == H200 else prefill_mma).blocks_of(case.step.width, size)
    reached = np.zeros(len(got), bool)
    for row, first, count in np.asarray(step.batch.tiles[0]):
        end = int(step.batch.positions[first + count - 1])
        if row == 0 and count and end // blocks.keys == last[0] // blocks.keys:
            reached[first : first + count] = True
        if row == 1 and count and end == last[1]:
            reached[first + count - 1] = True
    assert not reached[0], "the first tile reads blocks before the NaN"
    sound = np.isnan(got[reached]).all() and np.array_equal(got[~reached], clean[~reached])
    tokens = np.flatnonzero(np.isnan(got).any((1, 2))).tolist()
    return {"is": "right" if sound else "wrong", "tokens": tokens}


def races_found() -> bool:
    """jax 0.11 prints races, 0.12 raises."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.get_races().races_found)


def with_fault(module: types.ModuleType, says: str, instead: str) -> Callable[[], None]:
    """Puts the functions of an altered source in the place of the module's; returns what takes them back."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(says) == 1, f"{says!r} is {source.count(says)} times in {module.__name__}"
    altered = types.ModuleType(module.__name__)
    sys.modules[module.__name__], kept = altered, dict(vars(module))
    exec(compile(source.replace(says, instead), module.__file__, "exec"), vars(altered))
    sys.modules[module.__name__] = module
    functions = {
        name: value for name, value in vars(altered).items() if isinstance(value, types.FunctionType)
    }
    vars(module).update(functions)
    return functools.partial(vars(module).update, kept)


def main(names: list[str]) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    for name in names or [*CASES, *OWN_NAN, *FAULTS]:
        undo = None
        if name in FAULTS:
            case, module, says, instead, _ = FAULTS[name]
            undo = with_fault(getattr(prefill, module, prefill_common), says, instead)
        else:
            case = OWN_NAN.get(name, name)
        try:
            result = own_nan(CASES[case]) if name in OWN_NAN else attend(CASES[case], twice=name in CASES)
        except Exception as error:
            result = {"is": "raised", "error": str(error)[-300:]}
            interpret_pallas_call.reset_gpu_interpret_mode_state()
        if undo:
            undo()
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])


# ------------------------------------------------------------------------------------------- in the parent


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    environment = os.environ | {
        "NPROC": "16",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__]
    try:
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        printed, said = child.stdout, child.stderr[-2000:]
    except subprocess.TimeoutExpired as expired:
        printed, said = (expired.stdout or b"").decode(), "hung"
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines} | {"": {"said": said}}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    assert name in results, results[""]["said"]
    assert results[name]["is"] == "right", results[name]


@pytest.mark.parametrize("name", OWN_NAN)
def test_a_rows_own_nan_reaches_what_prefill_says(results: dict[str, dict[str, Any]], name: str) -> None:
    assert name in results, results[""]["said"]
    assert results[name]["is"] == "right", results[name]


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(results: dict[str, dict[str, Any]], name: str) -> None:
    assert name in results, results[""]["said"]
    assert results[name]["is"] == FAULTS[name][-1], results[name]


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_layouts_hold_every_head_once(group: int, warpgroups: int) -> None:
    layout = prefill_common.Layout(group, warpgroups)
    assert layout.tokens >= 8
    assert layout.tokens & (layout.tokens - 1) == 0
    assert layout.heads * layout.tokens <= prefill_common.ROWS
    parts = 2 if layout.splits_heads else 1
    assert layout.heads * (parts - 1) < group <= layout.heads * parts


@pytest.mark.parametrize(
    "rule", [Rule(1.0), Rule(1.0, window=1), Rule(1.0, window=40, sinks=3), Rule(1.0, window=200, sinks=70)]
)
def test_visits_are_the_blocks_that_some_token_sees(rule: Rule) -> None:
    layout, blocks = prefill_common.Layout(4, 1), prefill_common.Blocks(32, 8, 2)
    chunks = [(start, count) for start in (0, 5, 31, 32, 33, 100, 250) for count in (1, 16)]
    first = np.cumsum([0, *(count for _, count in chunks)])
    tiles = np.asarray([(row, first[row], count) for row, (_, count) in enumerate(chunks)], np.int32)
    positions = np.concatenate([np.arange(start, start + count) for start, count in chunks]).astype(np.int32)
    kv_len = np.asarray([sum(chunk) for chunk in chunks], np.int32)
    table = np.ones((len(chunks), 40), np.int32)
    arguments = (np.pad(tiles, ((0, 2), (0, 0))), np.asarray([len(chunks)]), positions, kv_len, table)
    work = prefill_common.plan_work(
        *(jnp.asarray(x, jnp.int32) for x in arguments), rule=rule, layout=layout, blocks=blocks
    )
    assert np.all(np.diff(np.asarray(work.tiles)[:, 6]) <= 0)
    sinks = prefill_common.sink_blocks(rule, blocks)
    seen = 0
    for row in np.asarray(work.tiles):
        tile = prefill_common.Tile(*row)
        visited = [int(tile.block(np.int32(n), sinks)) for n in range(tile.visits)]
        if not tile.length:
            assert not visited
            continue
        seen += 1
        start, count = chunks[tile.row]
        assert (tile.base + tile.skipped, tile.length, tile.keys) == (start, count, start + count)
        key, query = np.arange(320)[None], np.arange(start, start + count)[:, None]
        visible = key <= query
        if rule.window:
            visible &= (key > query - rule.window) | (key < rule.sinks)
        needed = sorted({int(k) // blocks.keys for k in np.flatnonzero(visible.any(axis=0))})
        assert set(needed) <= set(visited), (start, count)
        assert visited == sorted(set(visited))
        assert len(visited) <= len(needed) + 1
    assert seen == len(chunks)


def test_query_tiles() -> None:
    assert [prefill.query_tile(Geometry(32, 8, 128, 16), device) for device in (H200, A100)] == [32, 16]


def test_blocks_fit_shared_memory() -> None:
    """Queries and stages; mma on the GPU with the least of it."""
    for width in common.WIDTHS:
        wgmma, mma = (module.blocks_of(width, 16) for module in (prefill_wgmma, prefill_mma))
        assert min(wgmma.stages, mma.stages) >= 2
        assert 2 * width * (128 + 2 * wgmma.stages * wgmma.keys) <= common.shared_bytes(H200) - 1024
        assert 2 * width * (64 + 2 * mma.stages * mma.keys) <= common.DEFAULT_SHARED_BYTES - 1024
