"""Block formats against the gguf package's own dequantisation, whole and in part, and what they cost."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cpu_time import cpu_time
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as BlockType
from gguf.quants import dequantize, quantize
from gguf_writing import permute_rows, random_blocks, random_weights, write_gguf

import checkpoints
from checkpoints.blocks import can_read, read_blocks, value_type
from checkpoints.gguf_file import restore_rotary_rows
from checkpoints.parts import checked_index

PLAIN = [BlockType.F32, BlockType.F16, BlockType.BF16]
# All that the package can read, so that a new version of it brings its new types into these tests.
BLOCKS = [item for item in BlockType if can_read(item) and item not in (*PLAIN, BlockType.F64)]
QUANTISABLE = [BlockType.Q8_0, BlockType.Q4_0, BlockType.Q4_1, BlockType.Q5_0, BlockType.Q5_1]
NEEDED = [
    *QUANTISABLE, BlockType.Q2_K, BlockType.Q3_K, BlockType.Q4_K, BlockType.Q5_K, BlockType.Q6_K,
    BlockType.IQ4_NL,
]  # fmt: skip
PARTS = [
    (),
    (slice(3, 9),),
    (slice(None), slice(256, 512)),
    (slice(5, 40), slice(100, 301)),
    (slice(-7, None), slice(-3, None)),
    (slice(1, 70, 9), slice(None, None, 2)),
    (slice(60, 2, -3), slice(500, 10, -50)),
    (slice(69, 2000), slice(0, 1)),
    (slice(4, 4), slice(None)),
    (slice(0, 1), slice(9, 3)),
]


def named(items: list[BlockType]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block_type", items, ids=lambda item: item.name)


def test_every_kind_that_files_use_is_read() -> None:
    assert set(NEEDED) <= set(BLOCKS)
    assert not any(can_read(item) for item in (BlockType.Q8_1, BlockType.Q8_K, BlockType.I8, BlockType.I32))


@named(BLOCKS)
def test_random_blocks_equal_the_gguf_package(block_type: BlockType) -> None:
    raw = random_blocks(block_type, 70, 512)
    expected = dequantize(raw, block_type)
    assert len(np.unique(expected)) > 2
    for part in PARTS:
        got = read_blocks(raw.reshape(-1), block_type, (70, 512), checked_index(part, (70, 512), ""))
        assert got.dtype == value_type(block_type) == np.float32
        np.testing.assert_array_equal(got, expected[part], err_msg=str(part))
    np.testing.assert_array_equal(read_blocks(raw[0], block_type, (512,)), expected[0])
    third = read_blocks(raw.reshape(-1), block_type, (7, 10, 512), (slice(2, 5), slice(1, 4), slice(7, 300)))
    np.testing.assert_array_equal(third, expected.reshape(7, 10, 512)[2:5, 1:4, 7:300])


@named(QUANTISABLE)
def test_quantised_values_come_back(block_type: BlockType) -> None:
    values = np.random.default_rng(2).standard_normal((70, 96)).astype(np.float32)
    raw = quantize(values, block_type)
    got = read_blocks(raw.reshape(-1).copy(), block_type, values.shape)
    np.testing.assert_array_equal(got, dequantize(raw, block_type))
    assert np.abs(got - values).max() < 0.3


@named(PLAIN)
def test_plain_types_keep_their_type(block_type: BlockType) -> None:
    values = np.arange(70 * 512, dtype=np.float32).reshape(70, 512).astype(value_type(block_type))
    for part in PARTS:
        got = read_blocks(
            values.reshape(-1).view(np.uint8), block_type, values.shape, checked_index(part, values.shape, "")
        )
        assert got.dtype == values.dtype
        np.testing.assert_array_equal(got, values[part])


def test_q4_1_block_in_literal_numbers() -> None:
    # d = 0.5, m = -1: nibble n is n / 2 - 1; the byte 0x2F holds value 0 (15) and value 16 (2).
    block = np.concatenate([np.array([0.5, -1.0], np.float16).view(np.uint8), np.full(16, 0x2F, np.uint8)])
    got = read_blocks(block, BlockType.Q4_1, (1, 32))
    assert got[0, :16].tolist() == [6.5] * 16
    assert got[0, 16:].tolist() == [0.0] * 16


@named([*PLAIN, *BLOCKS])
def test_tensors_of_a_file(tmp_path: Path, block_type: BlockType) -> None:
    """Through the file, with q and k put back: the whole and every part of it."""
    weights = random_weights(hidden=256, head_dim=32, ffn=512)
    blocks = {
        name: (block_type, random_blocks(block_type, *array.shape, seed=seed))
        for seed, (name, array) in enumerate(weights.items())
        if array.ndim == 2 and block_type in BLOCKS
    }
    plain = block_type if block_type in PLAIN else BlockType.F32
    path = write_gguf(tmp_path / "tiny.gguf", weights, head_dim=32, block_type=plain, blocks=blocks)
    opened = checkpoints.open_checkpoint(path)
    for name, original in weights.items():
        heads = 8 if ".q_proj." in name else 2 if ".k_proj." in name else 0
        if original.ndim == 1:
            expected = original
        elif name in blocks:
            expected = dequantize(blocks[name][1], block_type)
            expected = restore_rotary_rows(expected, heads) if heads else expected
        else:
            expected = original.astype(value_type(block_type))
        assert opened.shape(name) == original.shape
        for part in PARTS if original.ndim == 2 else [(), (slice(3, 9),), (slice(None, None, -2),)]:
            got = opened.read(name, part)
            assert got.dtype == opened.dtype(name)
            np.testing.assert_array_equal(got, expected[part], err_msg=f"{name}{part}")


@named([BlockType.Q8_0, BlockType.Q5_1, BlockType.Q4_K, BlockType.IQ3_S, BlockType.F32])
@pytest.mark.parametrize("module", ["q_proj", "v_proj"])
def test_dequantising_takes_little_more_than_the_result(
    tmp_path: Path, block_type: BlockType, module: str
) -> None:
    name = f"model.layers.0.self_attn.{module}.weight"
    weights = random_weights(hidden=2048, heads=32, kv_heads=32, head_dim=64, ffn=256, layers=1)
    some = {} if block_type == BlockType.F32 else {name: (block_type, random_blocks(block_type, 2048, 2048))}
    path = write_gguf(
        tmp_path / "wide.gguf", weights, heads=32, kv_heads=32, head_dim=64, layers=1, blocks=some
    )
    opened = checkpoints.open_checkpoint(path)
    opened.read(name, (slice(0, 64),))  # tables of the gguf package, made once
    for part, size in (((), 2048 * 2048), ((slice(64, 320), slice(0, 2048)), 256 * 2048)):
        tracemalloc.start()
        values = opened.read(name, part)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # A slice of some MB is being worked on, which counts beside a small part only.
        assert values.size == size
        assert peak <= 1.2 * size * 4 + 6e6 * (size < 2e6), (part, peak)


def test_known_rows_of_one_head_are_put_back() -> None:
    # The example of the docstring: one head of four rows, stored as 0, 2, 1, 3.
    stored = np.array([0, 2, 1, 3])
    assert restore_rotary_rows(stored, 1).tolist() == [0, 1, 2, 3]
    rows = np.arange(8 * 8)
    assert restore_rotary_rows(permute_rows(rows, 8), 8).tolist() == rows.tolist()
    # llama.cpp#3364: the wrong divisor for k is not seen with 9/3 heads, and is with 8/2.
    assert restore_rotary_rows(permute_rows(np.arange(16), 2), 4).tolist() != list(range(16))


def test_an_index_must_fit() -> None:
    assert checked_index((slice(1, 2),), (3, 4), "t") == (slice(1, 2), slice(None))
    for wrong in ((slice(1), slice(1), slice(1)), (1,), [slice(1)], slice(1), (None,), (...,)):
        with pytest.raises(checkpoints.CheckpointError, match=r"^t: got"):
            checked_index(wrong, (3, 4), "t")  # type: ignore[arg-type]


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    assert {GGML_QUANT_SIZES[item][0] for item in BLOCKS} <= {16, 32, 64, 256}
    assert value_type(BlockType.BF16) == ml_dtypes.bfloat16


@pytest.mark.model
def test_smollm2_opens_and_reads_fast(smollm2_path: Path) -> None:
    with cpu_time() as spent:
        opened = checkpoints.open_checkpoint(smollm2_path)
        open_seconds = spent()
        count = sum(opened.read(name).size for name in opened.names())
        read_seconds = spent() - open_seconds
    assert count == 134_515_008
    assert opened.config["num_key_value_heads"] == 3
    assert opened.config["rms_norm_eps"] == 1e-5
    # Measured 0.02 s and 0.25 s; the bounds leave room for a busy machine.
    assert open_seconds < 0.7, open_seconds
    assert read_seconds < 3.0, read_seconds
