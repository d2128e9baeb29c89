"""Named arrays of all kinds, and a folder with them: what the tests of reading and writing share."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from checkpoints.writing import PendingTensor, new_folder, write_json, write_orbax

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def random_arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)

    def new(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    return {
        "model.embed_tokens.weight": new(1000, 576),  # cut along both axes, rows unevenly
        "model.layers.0.mlp.down_proj.weight": new(64, 6000).astype(BFLOAT16),
        "model.layers.0.self_attn.q_proj.weight": new(24, 40).astype(np.float16),
        "model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32),  # all of it zarr's fill value
        "model.norm.weight": new(1),
        "special": np.array([np.nan, np.inf, -0.0, 1e-40], np.float32),
    }


ARRAYS = random_arrays()


def pending(arrays: dict[str, np.ndarray]) -> list[PendingTensor]:
    return [PendingTensor(name, a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()]


def write(folder: Path, arrays: dict[str, np.ndarray] = ARRAYS) -> Path:
    with new_folder(folder) as partial:
        write_orbax(partial, pending(arrays))
        write_json(partial / "config.json", {"model_type": "llama"})
    return folder


def assert_same(got: np.ndarray, expected: np.ndarray, name: str = "") -> None:
    """Equal to the bit: NaN and the sign of zero too."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
    assert got.tobytes() == expected.tobytes(), name
