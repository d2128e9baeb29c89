"""The Mosaic prefill kernels in JAX's GPU interpreter, with its race detector and NaN where nobody may see,
and planted faults: what the interpreter and the comparison with the reference are worth.

All of it runs in one child process: a wrong count of arrivals hangs the interpreter, and so do several
warpgroups where the CPU client has fewer threads than they wait with (NPROC sets how many it has).

    python tests/kernels/test_mosaic_prefill.py [name ...]     the cases and faults themselves
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.cases import StepCase, build
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pallas_mosaic import prefill, prefill_common, prefill_mma, prefill_wgmma
from pallas_kernels.rule import Rule

BFLOAT16_ERROR = 8e-3  # of the largest value: probabilities are rounded to bfloat16 before p @ v

H200, A100, L4 = Device("gpu", (9, 0)), Device("gpu", (8, 0)), Device("gpu", (8, 9))

# One grid cell a KV head and tile, a quarter of a second each: as few as show what is meant.
SMALL = dict(kv_heads=1, page_size=16, table_width=10, chunk_rows=2, dtype="bfloat16")
WINDOWED = StepCase(heads=4, chunk_tokens=20, window=30, sinks=5, **SMALL)
SPLIT = StepCase(heads=9, chunk_tokens=6, soft_cap=2.0, **SMALL)
PLAIN = StepCase(heads=4, chunk_tokens=20, **SMALL)

CASES: dict[str, tuple[Device, StepCase, tuple[tuple[int, int], ...], float]] = {
    # chunks from the middle of a page, of different rows, back to back, the second shorter than a tile
    "wgmma": (H200, WINDOWED, ((117, 17), (3, 2)), 0.2),
    "wgmma, heads split": (H200, SPLIT, ((37, 5),), 0.0),
    "mma": (A100, PLAIN, ((141, 18), (0, 2)), 0.0),  # three blocks: a stage is filled again
    "mma, window, sinks, holes": (A100, WINDOWED, ((117, 17), (3, 2)), 0.2),
    "mma, heads split, soft cap": (A100, SPLIT, ((37, 5),), 0.0),
    "mma, G 3, long pages": (
        A100,
        StepCase(3, 1, 80, 128, 2, 0, 12, 1, dtype="bfloat16"),
        ((140, 12),),
        0.0,
    ),
}  # fmt: skip

FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    # name: (case, module, what it says, what it says instead, how it shows)
    "lost wait for V": ("mma", "prefill_mma", "wait(v_ready, number)", "", "raised"),
    "stage refilled early": (
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
    "repair not awaited": ("wgmma", "prefill_wgmma", "plgpu.barrier_wait(repaired)", "", "raised"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ in the child


def attend(
    device: Device, case: StepCase, chunks: tuple[tuple[int, int], ...], holes: float, *, twice: bool
) -> dict[str, Any]:
    """Runs a case: what came out of it, and how far it is from the reference."""
    tile = prefill.query_tile(case.geometry, device)
    step, clean = (
        build(case, (), chunks, tiles=(tile,), holes=holes, poison=poison) for poison in (np.nan, 0.0)
    )

    @jax.jit
    def run(q, k_pages, v_pages, batch):
        return prefill.prefill(
            q, k_pages, v_pages, batch.page_table, batch.positions, batch.kv_len, *batch.tiles,
            batch.num_tiles, rule=case.rule, tile=tile,
            backend=Backend("pallas_mosaic", device, interpret=True),
        )  # fmt: skip

    got = np.asarray(run(*step[:4]), np.float32)
    again = np.asarray(run(*step[:4]), np.float32) if twice else got
    want = np.asarray(reference.paged_attention(*clean[:4], rule=case.rule), np.float32)
    if races_found():
        return {"is": "raised", "error": "races found"}
    if not np.isfinite(got).all():
        return {"is": "NaN"}
    error = float(np.abs(got - want).max() / np.abs(want).max())
    sound = error <= BFLOAT16_ERROR and not got[~step.real].any() and np.array_equal(got, again)
    return {"is": "right" if sound else "wrong", "error": error}


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

    for name in names or [*CASES, *FAULTS]:
        undo = None
        if name in FAULTS:
            case, module, says, instead, _ = FAULTS[name]
            undo = with_fault(getattr(prefill, module, prefill_common), says, instead)
        else:
            case = name
        try:
            result = attend(*CASES[case], twice=name in CASES)
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


def test_what_is_not_served_says_why() -> None:
    llama = Geometry(32, 8, 128, 16)
    for device in (H200, A100, L4):
        assert prefill.unsupported_prefill(device, llama) == ""
    assert [prefill.query_tile(llama, device) for device in (H200, A100)] == [32, 16]
    for geometry, reason in (
        (Geometry(32, 1, 128, 16), "1 to 16 query heads per KV head"),
        (Geometry(32, 8, 128, 16, kv_dtype="int8"), "both bfloat16 or float16"),
        (Geometry(32, 8, 72, 16), "multiple of 16"),
        (Geometry(32, 8, 128, 48), "power of two"),
    ):
        assert reason in prefill.unsupported_prefill(H200, geometry)
    for page_size, width in ((8, 128), (16, 80)):
        geometry = Geometry(32, 8, width, page_size)
        assert prefill.unsupported_prefill(H200, geometry) == ""
        assert "larger pages for cp.async" in prefill.unsupported_prefill(A100, geometry)


def test_blocks_fit_shared_memory() -> None:
    for width in (64, 80, 96, 112, 128, 160, 192, 256):
        blocks = prefill_wgmma.blocks_of(width, 16)
        assert blocks.stages >= 2
        assert 2 * width * (128 + 2 * blocks.stages * blocks.keys) <= 232_448 - 1024
        assert prefill_mma.shared_bytes(width, prefill_mma.blocks_of(width, 16)) <= 101_376
