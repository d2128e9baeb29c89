"""Random parameters that a GPU draws for itself: here the CPU plays its part."""

from __future__ import annotations

import jax
import numpy as np
from tiny import TINY, tiny_build

from jaxinfer.model import weights


def drawn(platform: str, seed: int = 0, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    build = tiny_build(dtype, platform=platform)
    counted = []
    _, state = weights.random_params(TINY, build, seed, on_tensor=counted.append)
    assert len(counted) == sum(1 for _ in weights.parameters(TINY))
    flat, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in flat}


def test_the_distribution_is_that_of_the_host() -> None:
    device, host = drawn("gpu"), drawn("cpu")
    assert set(device) == set(host)
    for name, value in device.items():
        assert value.size == host[name].size  # on CPU some lie in blocks
        if "norm" in name:
            assert (value == 1).all()
            continue
        deviation = value.std() / 0.02 - 1
        assert abs(deviation) < 5 / np.sqrt(2 * value.size)
        assert abs(value.mean()) < 5 * 0.02 / np.sqrt(value.size)
    matrices = [value for name, value in device.items() if "norm" not in name]
    assert len({value.ravel()[:4].tobytes() for value in matrices}) == len(matrices)


def test_a_seed_draws_the_same_again() -> None:
    first, second, other = drawn("gpu", 3), drawn("gpu", 3), drawn("gpu", 4)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        assert "norm" in name or not np.array_equal(value, other[name])
