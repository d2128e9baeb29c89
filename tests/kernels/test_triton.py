"""The Pallas Triton kernels in JAX's interpreter, which runs the kernel's own program on the CPU, and their
lowering for GPUs that are not there.

Every case has NaN in all places that nobody may see. The interpreter plays an H200, so that a row's keys are
split as they are there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Backend, Device, Geometry, QuantizedPages, RaggedBatch, Rule
from pallas_kernels.cases import StepCase, attend, build, vector_error

triton = pytest.importorskip("pallas_kernels.pallas_triton")
from pallas_kernels.pallas_triton import common, decode  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("compile_cache"),
    # Raised whenever one of these kernels is lowered for a GPU, and said so in the docs.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

H200 = Device("gpu", (9, 0), "NVIDIA H200", 132)
A100 = Device("gpu", (8, 0), "NVIDIA A100-SXM4-80GB", 108)
L4 = Device("gpu", (8, 9), "NVIDIA L4", 58)
B200 = Device("gpu", (10, 0), "NVIDIA B200", 148)

TRITON = Backend("pallas_triton", H200, interpret=True)
REFERENCE = Backend("reference")

BOUNDS = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1.5e-3}
"""Of |out - reference| / |reference| for each token and head."""

DECODE = StepCase(page_size=16, table_width=41, decode_rows=8)
CHUNKS = StepCase(width=8, page_size=16, table_width=41, chunk_tokens=320, chunk_rows=4)
MIXED = StepCase(width=8, page_size=8, table_width=16, decode_rows=4, chunk_tokens=64, chunk_rows=4)


def check(case: StepCase, decodes=(), chunks=(), *, seed=0, holes=0.0, poison=np.nan, backend=TRITON) -> None:
    tiles = triton.query_tiles(backend.device, case.geometry)
    step = build(case, decodes, chunks, seed=seed, holes=holes, poison=poison, tiles=tiles)
    clean = build(case, decodes, chunks, seed=seed, holes=holes, poison=0.0, tiles=tiles)
    expected = attend(clean, case, REFERENCE)
    got, name = attend(step, case, backend), f"{case} {decodes} {chunks}"
    assert np.isfinite(got).all(), f"{name}: poison leaked"
    assert not got[~step.real].any(), f"{name}: padding gave something"
    error = vector_error(got, expected).max()
    assert error <= BOUNDS[case.dtype], f"{name}: error {error}"


# --------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("cores", [1, 132], ids=["whole rows", "split rows"])
def test_decode_lengths(cores: int) -> None:
    """Around pages, blocks and the parts of a row; padding rows; the whole table next to one key."""
    backend = dataclasses.replace(TRITON, device=dataclasses.replace(H200, num_cores=cores))
    for decodes in [
        (1, 2, 15, 16, 17, 31, 32, 33),
        (63, 64, 65, 127, 128, 129, 192, 191),
        (656, 640, 641, 577, 1, 600, 300, 639),
        (0, 656, 0, 17, 0, 1, 0, 0),
        (0, 0, 0, 0, 0, 0, 0, 0),
    ]:
        check(DECODE, decodes, backend=backend)


def test_chunk_lengths() -> None:
    """Around tiles and blocks, to the end of the table, several chunks in a step, and none."""
    for chunks in [
        ((0, 320),),
        ((0, 2), (0, 42), (5, 43), (31, 33)),
        ((1, 257), (639, 2)),
        ((336, 320),),
        ((15, 2), (16, 16), (0, 17), (512, 100)),
        ((63, 65), (64, 64), (62, 2), (127, 129)),
        (),
    ]:
        check(CHUNKS, (), chunks)


@pytest.mark.parametrize("holes", [0.0, 0.3])
def test_mixed_steps(holes: float) -> None:
    """Random rows of both kinds, padding rows and padding tokens among them, with and without holes."""
    for seed in range(6):
        generator = np.random.default_rng(seed)
        decodes = tuple(int(n) for n in generator.integers(0, MIXED.most_keys + 1, 4))
        counts = generator.integers(2, 17, generator.integers(0, 5))
        chunks = tuple((int(generator.integers(0, MIXED.most_keys - c + 1)), int(c)) for c in counts)
        check(MIXED, decodes, chunks, seed=seed, holes=holes)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (9, 3), (4096, 20)])
def test_windows_and_sinks(window: int, sinks: int) -> None:
    """With the pages behind every window gone."""
    case = dataclasses.replace(MIXED, window=window, sinks=sinks)
    check(case, (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40)))
    check(case, (min(128, window), min(128, window + 1), 100, 63), ((100, 5), (0, 40)), holes=0.2)


@pytest.mark.parametrize(("window", "sinks"), [(100, 70), (300, 0)])
def test_windows_over_many_blocks(window: int, sinks: int) -> None:
    check(dataclasses.replace(DECODE, window=window, sinks=sinks), (656, 640, 17, 577, 1, 0, 300, 639))
    check(dataclasses.replace(CHUNKS, window=window, sinks=sinks), (), ((336, 310), (600, 2), (0, 8)))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", ""),
        ("float16", ""),
        ("bfloat16", "int8"),
        ("float32", "int8"),
        ("bfloat16", "float8_e4m3fn"),
    ],
)
def test_types_of_queries_and_pages(dtype: str, kv_dtype: str) -> None:
    """Under a soft cap, and with holes."""
    case = StepCase(9, 3, 64, 32, 4, 4, 48, 3, soft_cap=5.0, dtype=dtype, kv_dtype=kv_dtype)
    check(case, (1, 32, 0, 128), ((0, 2), (31, 2), (33, 41)), holes=0.1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "page_size"),
    [(2, 2, 8, 16), (6, 2, 80, 8), (4, 2, 96, 128), (71, 1, 16, 16), (5, 1, 64, 48)],
)
def test_head_counts_widths_and_page_sizes(heads: int, kv_heads: int, width: int, page_size: int) -> None:
    """MHA, GQA, MQA of more heads than a program has rows; widths and pages that are no powers of two."""
    case = StepCase(heads, kv_heads, width, page_size, 4, 4, 48, 3)
    check(case, (1, page_size, 0, 4 * page_size), ((0, 2), (page_size - 1, 2), (page_size + 1, 13)))


def test_infinity_does_not_leak_either() -> None:
    for poison in (np.inf, 1e30):
        check(MIXED, (9, 0, 33), ((3, 5),), poison=poison)


def test_a_rows_own_nan_stays_in_that_row() -> None:
    tiles = triton.query_tiles(H200, MIXED.geometry)
    clean = build(MIXED, (5, 17, 128), ((0, 9), (3, 30), (0, 2)), tiles=tiles)
    expected = attend(clean, MIXED, TRITON)
    np.testing.assert_array_equal(attend(clean, MIXED, TRITON), expected)  # twice is equal bit for bit
    for row in (1, MIXED.decode_rows + 1):
        page = int(clean.batch.page_table[row, 0])
        assert not isinstance(clean.k_pages, QuantizedPages)
        step = clean._replace(k_pages=clean.k_pages.at[page].set(np.nan))
        got = attend(step, MIXED, TRITON)
        mine = np.asarray(step.batch.token_row) == row
        assert np.isnan(got[mine]).all()
        np.testing.assert_array_equal(got[~mine], expected[~mine])


def test_tiles_may_be_smaller_than_those_it_asks_for() -> None:
    """Layers of several shapes share one batch, cut for the smallest of their tiles."""
    step = build(CHUNKS, (), ((0, 100), (37, 50)), tiles=(8,))
    error = np.abs(attend(step, CHUNKS, TRITON) - attend(step, CHUNKS, REFERENCE))[step.real].max()
    assert error <= BOUNDS["float32"]


# ------------------------------------------------------------------------------- faults that must be caught


def _wrong_page(monkeypatch) -> None:
    find = common.find

    def planted(table_ref, row, keys, wanted, page_size):
        found = find(table_ref, row, keys, wanted, page_size)
        return found._replace(page_ids=jnp.where(keys == 20, found.page_ids + 1, found.page_ids))

    monkeypatch.setattr(common, "find", planted)


def _lost_window(monkeypatch) -> None:
    monkeypatch.setattr(common, "seen_by", lambda position, keys, rule: keys <= position)


def _lost_hole(monkeypatch) -> None:
    find = common.find

    def planted(table_ref, row, keys, wanted, page_size):
        return find(table_ref, row, keys, wanted, page_size)._replace(held=wanted)

    monkeypatch.setattr(common, "find", planted)


def _lost_scores_of_parts(monkeypatch) -> None:
    merge = decode._merge
    monkeypatch.setattr(decode, "_merge", lambda out, largest, total: merge(out, 0 * largest, total))


def _lost_sinks(monkeypatch) -> None:
    blocks_of = common.blocks_of

    def planted(first_position, num_keys, block_keys, rule):
        return blocks_of(first_position, num_keys, block_keys, dataclasses.replace(rule, sinks=0))

    monkeypatch.setattr(common, "blocks_of", planted)


@pytest.mark.parametrize("plant", [_wrong_page, _lost_window, _lost_hole, _lost_scores_of_parts, _lost_sinks])
def test_planted_faults_are_caught(plant, monkeypatch) -> None:
    case = StepCase(2, 1, 8, 16, 16, decode_rows=3, window=40, sinks=5)
    backend = dataclasses.replace(TRITON, device=dataclasses.replace(H200, kind=plant.__name__))
    check(case, (250, 45, 33), holes=0.3, seed=1)
    plant(monkeypatch)  # under a device of its own, so that jit shares no program with other tests
    with pytest.raises(AssertionError, match=r"error|leaked"):
        check(case, (250, 45, 33), holes=0.3, seed=1, backend=backend)


# ------------------------------------------------------------------------------------ what it does not serve

LLAMA = Geometry(32, 8, 128, 16)
FLOAT8_PAGES = dataclasses.replace(LLAMA, kv_dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("device", "geometry", "interpret", "reason"),
    [
        (H200, LLAMA, False, ""),
        (A100, dataclasses.replace(LLAMA, kv_dtype="int8"), False, ""),
        (L4, FLOAT8_PAGES, False, ""),
        (Device("cpu"), LLAMA, True, ""),
        (Device("cpu"), LLAMA, False, "not for cpu"),
        (Device("gpu", None, "AMD Instinct MI300X", 304), LLAMA, False, "NVIDIA GPUs only"),
        (Device("gpu", (7, 5), "Tesla T4", 40), LLAMA, False, "needs compute capability 8.0"),
        (A100, FLOAT8_PAGES, False, "need compute capability 8.9, not 8.0"),
        (H200, dataclasses.replace(LLAMA, dtype="float64"), False, "queries of float64"),
        (H200, dataclasses.replace(LLAMA, dtype="float32"), True, "pages of bfloat16 for queries of float32"),
        (H200, dataclasses.replace(LLAMA, width=512), True, "at most 256"),
    ],
)
def test_reasons(device: Device, geometry: Geometry, interpret: bool, reason: str) -> None:
    said = triton.unsupported(device, geometry, interpret)
    assert reason in said
    assert bool(said) == bool(reason)
    assert "\n" not in said


def _arguments(decode_rows: int, tokens: int, num_pages: int, geometry: Geometry, tile: int):
    """Shapes of a step of Llama 3 8B's attention."""
    g, int32 = geometry, jnp.int32
    pages = jax.ShapeDtypeStruct((num_pages, g.kv_heads, g.page_size, g.width), g.kv_dtype)
    if g.kv_dtype == "int8":
        pages = QuantizedPages(pages, jax.ShapeDtypeStruct(pages.shape[:-1], jnp.float32))  # type: ignore
    shapes = [(tokens,), (tokens,), (decode_rows + 1, 512), (decode_rows + 1,), (tokens // tile + 1, 3), (1,)]
    row, positions, table, kv_len, tiles, num_tiles = (jax.ShapeDtypeStruct(s, int32) for s in shapes)
    batch = RaggedBatch(row, positions, table, kv_len, (tiles,), num_tiles, (tile,))  # type: ignore[arg-type]
    return jax.ShapeDtypeStruct((tokens, g.heads, g.width), g.dtype), pages, pages, batch


def test_pools_that_pallas_cannot_index_are_refused() -> None:
    """2^32 bytes of int8: the places of its second half are beyond a signed 32-bit index."""
    geometry = dataclasses.replace(LLAMA, kv_dtype="int8")
    backend = Backend("pallas_triton", H200)
    step = _arguments(4, 4, 2**18, geometry, 32)
    with pytest.raises(AssertionError, match="Pallas Triton can index"):
        jax.eval_shape(
            lambda *step: triton.paged_attention(*step, decode_rows=4, rule=Rule(0.1), backend=backend), *step
        )


@pytest.mark.parametrize("device", [H200, A100, L4, B200], ids=lambda device: device.kind)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_it_lowers_for_gpus_that_are_not_there(device: Device, kv_dtype: str) -> None:
    """To Triton's own language, which refuses sizes that are no powers of two and missing operations."""
    for geometry in (LLAMA, Geometry(6, 2, 80, 48)):
        geometry = dataclasses.replace(geometry, kv_dtype=kv_dtype)
        if triton.unsupported(device, geometry, interpret=False):
            continue
        backend = Backend("pallas_triton", device)
        (tile,) = triton.query_tiles(device, geometry)
        step = _arguments(4, 68, 512, geometry, tile)
        rule = Rule(0.1, window=1024, sinks=4, soft_cap=30.0)
        program = jax.jit(
            lambda *step, b=backend, r=rule: triton.paged_attention(*step, decode_rows=4, rule=r, backend=b)
        )
        there = jax.sharding.AbstractDevice(
            device_kind=device.kind, num_cores=device.num_cores, platform="gpu"
        )
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=there)):
            lowered = program.trace(*step).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        assert "paged_decode" in text
        assert "paged_prefill" in text


def test_parts_of_rows() -> None:
    """As many programs as keep the GPU busy, no more than a row has blocks."""
    assert decode.splits_of(8, 8192, 64, 132) == 64
    assert decode.splits_of(512, 8192, 64, 132) == 2
    assert decode.splits_of(2048, 8192, 64, 132) == 1
    assert decode.splits_of(8, 100, 64, 132) == 2
    assert decode.splits_of(8, 8192, 64, 1) == 1


def test_how_many_pages_it_can_index() -> None:
    """8-bit pools end at 2^31 elements of a layer; the engine asks before it makes one."""
    llama = Geometry(32, 8, 128, 16, "bfloat16", "int8")
    assert pallas_kernels.most_pages(Backend("pallas_triton"), llama) == 2**31 // (8 * 16 * 128)
    wide, narrow = dataclasses.replace(llama, kv_dtype="bfloat16"), dataclasses.replace(llama, kv_heads=4)
    assert pallas_kernels.most_pages(Backend("pallas_triton"), wide) is None
    assert pallas_kernels.most_pages(Backend("pallas_triton"), llama, narrow) == 2**31 // (8 * 16 * 128)
    assert pallas_kernels.most_pages(Backend("xla"), llama) is None
