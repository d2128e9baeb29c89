"""The Mosaic decode kernel: its numbers and races in JAX's interpreter, which keys each thread block visits,
and that it lowers for both kinds of copies.

Every case has NaN in all places that nobody may see. A wrong count of barrier arrivals hangs the interpreter,
hence the timeouts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic_gpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from plain import plain

from pallas_kernels import Backend, Device, Geometry, pallas_mosaic
from pallas_kernels.cases import Step, StepCase, build
from pallas_kernels.pallas_mosaic import common, decode_plan
from pallas_kernels.pallas_mosaic.common import Target, async_copy_tile, shared_bytes, unsupported_shapes
from pallas_kernels.pallas_mosaic.decode_plan import Plan
from pallas_kernels.rule import Rule

decode_module = importlib.import_module("pallas_kernels.pallas_mosaic.decode")
pytestmark = pytest.mark.timeout(120)

ERROR = 8e-3  # of the largest output: one rounding of the probabilities to bfloat16, and one of the result
INTERPRETER = Target(tma=True, interpret=True, shared_bytes=100_000)
CASE = StepCase(heads=4, kv_heads=2, width=64, page_size=16, table_width=8, decode_rows=2, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """A failed run leaves state behind."""
    yield
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def sizes(case: StepCase, block: int, depth: int, splits: int) -> Plan:
    """A plan for tiny rows: shares of a single block are allowed."""
    own = decode_plan.plan(case.decode_rows, case.table_width, case.geometry, 232_448, 1, {})
    return dataclasses.replace(own, block=block, depth=depth, splits=splits, least=1)


def run(step: Step, case: StepCase, plan: Plan) -> np.ndarray:
    function = functools.partial(decode_module._decode, sizes=plan, rule=case.rule, target=INTERPRETER)
    batch = step.batch
    out = jax.jit(function)(step.q, step.k_pages, step.v_pages, batch.page_table, batch.kv_len)
    assert out.dtype == step.q.dtype
    assert not races_found(), "the interpreter found a race"
    return np.asarray(out, np.float32)


def races_found() -> bool:
    """jax 0.12 raises when it finds one, 0.11 only says so."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


def error(got: np.ndarray, step: Step, case: StepCase) -> float:
    """Largest error in parts of the largest output; NaN where anything leaked."""
    expected = plain(step, case)
    assert not got[~step.real].any(), "padding gave something"
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


def replaced(**changes) -> StepCase:
    return dataclasses.replace(CASE, **changes)


# ----------------------------------------------------------------------------------------- numbers and races


@pytest.mark.parametrize(
    ("case", "lengths", "holes", "plan"),
    [
        # around pages and blocks; a padding row; fewer blocks than slots, and many more
        (CASE, (33, 128), 0.0, (32, 2, 1)),
        (CASE, (128, 0), 0.0, (32, 3, 2)),
        # window and sinks over shares, some of them empty
        (replaced(heads=2, kv_heads=1, window=40, sinks=5, soft_cap=2.0), (128, 39), 0.0, (32, 3, 3)),
        (replaced(window=20, heads=2), (1, 121), 0.3, (64, 2, 3)),
        # blocks that are parts of pages; float16
        (
            replaced(heads=1, kv_heads=1, window=50, page_size=64, table_width=3, dtype="float16"),
            (190, 65),
            0.0,
            (32, 2, 2),
        ),
        # a width that two warps share; groups padded to whole transfers, and of all rows
        (replaced(width=80, heads=3, kv_heads=1), (90, 17), 0.3, (32, 2, 1)),
        (replaced(heads=16, kv_heads=1, width=96, page_size=32, table_width=3), (90, 65), 0.0, (32, 2, 2)),
    ],
    ids=str,
)
def test_against_the_reference(case: StepCase, lengths, holes: float, plan) -> None:
    step = build(case, lengths, holes=holes)
    got = run(step, case, sizes(case, *plan))
    assert error(got, step, case) <= ERROR


def test_the_public_function_twice() -> None:
    """Its own plan, bit for bit the same; a row without a visible key is zero."""
    step = build(CASE, (70, 40))
    batch = dataclasses.replace(step.batch, page_table=step.batch.page_table.at[1].set(0))
    step = step._replace(batch=batch)
    function = functools.partial(decode_module.decode, rule=CASE.rule, backend=Backend("", interpret=True))
    program = jax.jit(function)
    arguments = (step.q, step.k_pages, step.v_pages, batch.page_table, batch.kv_len)
    first, second = (np.asarray(program(*arguments), np.float32) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert error(first, step, CASE) <= ERROR
    assert not first[1].any()


def test_a_rows_own_nan_stays_in_that_row() -> None:
    case = replaced(heads=2, kv_heads=1)
    step, plan = build(case, (70, 40)), sizes(case, 64, 2, 1)
    page = int(step.batch.page_table[0, 1])
    clean = run(step, case, plan)
    pages = {name: getattr(step, name).at[page].set(np.nan) for name in ("k_pages", "v_pages")}
    got = run(step._replace(**pages), case, plan)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1], clean[1])


# -------------------------------------------------------------------------------------------- planted faults


def wrong(step: Step, plan: Plan, case: StepCase | None = None) -> str:
    """What the checks say: the interpreter's error, or the size of the difference; "" when all is well."""
    try:
        off = error(run(step, case or FAULTY, plan), step, case or FAULTY)
    except Exception as failure:  # of the interpreter, whose callbacks raise what they like
        return str(failure)
    return "" if off <= ERROR else f"off by {off}"


FAULTY = replaced(heads=2, kv_heads=1, decode_rows=1)


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(ring, number, later, at_end):
        del later, at_end
        return ring.slots.at[ring.slot(number)]

    monkeypatch.setattr(decode_module._Ring, "wait", wait)
    assert "race" in wrong(build(FAULTY, (128,)), sizes(FAULTY, 32, 2, 1)).lower()


def test_a_slot_refilled_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks under way as there are slots but one."""
    monkeypatch.setattr(decode_module._Ring, "slot", lambda ring, number: jnp.int32(number) % 2)
    assert "race" in wrong(build(FAULTY, (128,)), sizes(FAULTY, 32, 3, 1)).lower()


def test_a_wrong_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode_module._Share.page_ids
    monkeypatch.setattr(decode_module._Share, "page_ids", lambda share, n: right(share, n)[::-1])
    assert "off by" in wrong(build(FAULTY, (100,)), sizes(FAULTY, 32, 2, 1))


@pytest.mark.parametrize("fault", ["window", "values"])
def test_a_lost_selection_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Of the keys before a window, which are another's in a page that is still there; of V beyond the end."""
    share, case = decode_module._Share, dataclasses.replace(FAULTY, window=40)
    if fault == "window":
        right = share.visible

        def visible(self, *arguments):
            return right(dataclasses.replace(self, rule=Rule(self.rule.scale)), *arguments)

        monkeypatch.setattr(share, "visible", visible)
    else:
        monkeypatch.setattr(share, "all_visible", lambda self, *arguments: jnp.bool_(True))
    assert "off by" in wrong(build(case, (115,)), sizes(case, 32, 2, 1), case)


# ---------------------------------------------------------------------- which keys, and copies in their order


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(
    "rule", [Rule(1.0), Rule(1.0, 40), Rule(1.0, 100, 4), Rule(1.0, 7, 70), Rule(1.0, 4096, 1)], ids=str
)
def test_shares_hold_every_visible_key_once(rule: Rule, page_size: int) -> None:
    """Whatever the length and the number of shares; pages wholly before the window are not visited."""
    block, pages, splits = 32, 1024 // page_size, 3
    plan = Plan(block, 3, splits, 2, 1, 2, 64, page_size, pages)
    table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    @functools.partial(jax.vmap, in_axes=(None, 0, None))
    @functools.partial(jax.vmap, in_axes=(None, None, 0))
    def visit(length, split, number):
        share = decode_module._Share.of(table, jnp.int32(0), length, split, plan, rule)
        holes = jnp.int32(0)
        seen = share.visible(number, holes, (1, block), 1, None)[0] & (number < share.count)
        all_seen = share.all_visible(number, holes) & (number < share.count)
        key = share.first_key(number) + jnp.arange(block)
        page = jnp.repeat(jnp.stack(share.page_ids(number)), min(block, page_size))
        return share.count, key, page, seen, all_seen

    lengths = np.asarray([0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 200, 511, 640, 1000, 1024], np.int32)
    numbers = np.arange(-(-1024 // block) + 1, dtype=np.int32)
    counts, keys, page, seen, all_seen = map(
        np.asarray, visit(lengths, np.arange(splits, dtype=np.int32), numbers)
    )
    np.testing.assert_array_equal(all_seen, seen.all(-1))
    np.testing.assert_array_equal(page[seen], keys[seen] // page_size + 1)
    for n, length in enumerate(lengths):
        expected = [
            k for k in range(length)
            if rule.window is None or k >= length - rule.window or k < rule.sinks
        ]  # fmt: skip
        assert np.sort(keys[n][seen[n]]).tolist() == expected
        visited = {k // page_size for k in expected}
        assert counts[n, :, 0].sum() * block <= (len(visited) + 1) * page_size + 2 * block


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_copies_in_flight_are_counted(monkeypatch: pytest.MonkeyPatch, count: int, depth: int) -> None:
    """cp.async: what `wait` leaves under way is what the kernel has started after the block it waits for."""
    plan = Plan(64, depth, 1, 1, 1, 2, 64, 16, 64)
    share = dataclasses.replace(
        decode_module._Share.of(jnp.zeros((1, 64), jnp.int32), 0, 64 * count, 0, plan, Rule(1.0)), count=count
    )
    ring = decode_module._Ring(None, np.zeros(depth), None, share, Target(False, False, 0))
    ring.slots = type("Slots", (), {"at": np.zeros(depth)})()
    waited: list[int] = []
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", waited.append)
    monkeypatch.setattr(decode_module.pl, "when", lambda holds: lambda body: body() if holds else None)
    monkeypatch.setattr(decode_module.lax, "rem", lambda number, depth: int(number) % depth)

    started = [
        name for n in range(min(depth, count)) for name in (("k", n), ("v", n)) if name != ("v", depth - 1)
    ]

    def left_after(name: tuple[str, int]) -> int:
        return (len(started) - 1 - started.index(name)) * plan.copies

    for n in range(count):
        ring.wait(n, 2 * depth - 2, 1)
        assert waited.pop() == left_after(("k", n))
        started += [("v", n + depth - 1)] * (n + depth - 1 < count) + [("k", n + depth)] * (n + depth < count)
        ring.wait(n, 2 * depth - 1, 0)
        assert waited.pop() == left_after(("v", n))
        assert not waited


# ---------------------------------------------------------------------------------------- devices and shapes

H200 = Device("gpu", (9, 0), "NVIDIA H200", 132)
A100 = Device("gpu", (8, 0), "NVIDIA A100", 108)
L4 = Device("gpu", (8, 9), "NVIDIA L4", 58)
LLAMA = Geometry(32, 8, 128, 16)


def plan_of(device: Device, rows: int, pages: int = 512, geometry: Geometry = LLAMA, **tuned: int) -> Plan:
    return decode_plan.plan(rows, pages, geometry, shared_bytes(device), device.num_cores, tuned)


def test_plans() -> None:
    """Two thread blocks a multiprocessor, bytes under way, shares that fill the chip and are no crumbs."""
    h200, a100, l4 = (plan_of(device, 1) for device in (H200, A100, L4))
    assert [(p.block, p.depth) for p in (h200, a100, l4)] == [(64, 3), (64, 2), (32, 2)]
    assert [plan_of(H200, rows).splits for rows in (1, 16, 64, 256)] == [32, 5, 2, 1]
    assert plan_of(H200, 1, pages=8192).splits == 64
    assert plan_of(H200, 64, blocks_per_core=8, block=32).splits == 3
    assert plan_of(H200, 64, blocks_per_core=8, block=32).block == 32
    assert plan_of(H200, 4, geometry=Geometry(9, 3, 64, 16)).group == 4
    assert {"blocks_per_core": 4, "block": 64} in decode_plan.candidates(H200, LLAMA)
    copies = ((64, 128), (16, 128), (16, 64), (16, 80))
    assert [async_copy_tile(rows, columns) for rows, columns in copies] == [128, 128, 64, 16]


@pytest.mark.parametrize("device", [H200, A100, L4], ids=lambda device: device.kind)
def test_all_that_is_served_has_a_plan(device: Device) -> None:
    for width in common.WIDTHS:
        for group in range(1, common.MOST_GROUP + 1):
            for page_size in common.PAGE_SIZES:
                geometry = Geometry(2 * group, 2, width, page_size)
                if not unsupported_shapes(device, geometry):
                    plan = plan_of(device, 3, geometry=geometry)
                    assert plan.depth >= 2
                    assert plan.rows >= plan.group >= group
                    assert plan.group * width % 128 == 0
                    assert page_size % plan.block == 0 or plan.block % page_size == 0


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (H200, {}, ""),
        (H200, {"heads": 128}, ""),
        (A100, {"width": 64, "heads": 72}, ""),
        (H200, {"dtype": "float32", "kv_dtype": "float32"}, "bfloat16 or float16, got float32 and float32"),
        (H200, {"dtype": "float16"}, "queries and pages both bfloat16 or float16, got float16 and bfloat16"),
        (H200, {"kv_dtype": "int8"}, "queries and pages both bfloat16 or float16, got bfloat16 and int8"),
        (H200, {"width": 112}, "a head width of 64, 80, 96, 128 or 256, got 112"),
        (H200, {"page_size": 8}, "pages of 16, 32, 64 or 128 tokens, got 8"),
        (H200, {"page_size": 256}, "pages of 16, 32, 64 or 128 tokens, got 256"),
        (H200, {"heads": 136}, "1 to 16 query heads per KV head, got 136 and 8"),
        (H200, {"heads": 36}, "1 to 16 query heads per KV head, got 36 and 8"),
        (H200, {"width": 80}, ""),
        (A100, {"width": 96}, ""),
        (A100, {"width": 80}, "pages of 32 tokens or more for cp.async of width 80, got 16"),
        (A100, {"width": 80, "page_size": 32}, ""),
    ],
    ids=str,
)
def test_what_is_refused(device: Device, changes: dict, reason: str) -> None:
    geometry = dataclasses.replace(LLAMA, **changes)
    told = pallas_mosaic.unsupported(device, geometry, interpret=False)
    assert reason in told
    assert bool(told) == bool(reason)
    assert "\n" not in told


@pytest.mark.parametrize(
    ("device", "width", "page_size"), [(H200, 128, 16), (A100, 64, 16), (A100, 128, 64)], ids=str
)
def test_it_lowers(monkeypatch: pytest.MonkeyPatch, device: Device, width: int, page_size: int) -> None:
    """Layouts are found, shared memory is enough, copies are of the architecture's kind. It takes no
    compiler; without a GPU Mosaic supposes 9.0."""
    if device.capability != (9, 0):
        kind = type(mosaic_gpu_utils._infer_arch())
        arch = kind(*device.capability) if kind is not tuple else device.capability
        monkeypatch.setattr(mosaic_gpu_utils, "_infer_arch", lambda: arch)
    rule = Rule(width**-0.5, 4096, 4, 50.0)

    def like(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = like(64, 8, page_size, width)
    function = functools.partial(decode_module.decode, rule=rule, backend=Backend("", device))
    traced = jax.jit(function).trace(
        like(4, 32, width), pages, pages, like(4, 512, dtype=jnp.int32), like(4, dtype=jnp.int32)
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
