"""Parameters that lie on several devices: each device's part is read by itself, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
DEVICES = 4


def test_each_device_is_given_its_own_part() -> None:
    """Four CPU devices, in a process of their own: rows over two of them, columns over the other axis."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "model"), str(TESTS.parent)]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from test_weights import BIASED, Counting
    from tiny import random_tensors, tiny_build, tiny_params

    from jaxinfer.model import weights
    from jaxinfer.model.linear import layout_for

    assert jax.device_count() == DEVICES
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("rows", "columns"))

    def sharding(parameter: weights.Parameter) -> NamedSharding:
        if len(parameter.shapes[0]) == 1:
            return NamedSharding(mesh, P())
        layout = layout_for("cpu", parameter.outputs)
        rows = layout.shape(parameter.outputs, parameter.shapes[0][1])[0]
        return NamedSharding(mesh, P("rows" if rows % 2 == 0 else None, "columns"))

    source = Counting(random_tensors(BIASED))
    _, state = weights.load_params(BIASED, tiny_build(), source, sharding=sharding)
    whole = tiny_params(BIASED)[1]
    jax.tree.map(np.testing.assert_array_equal, whole, state)
    held = sum(shard.data.size for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    # Replicas are read once for each device at most, parts of one tensor never twice for the same device.
    assert sum(source.counts.values()) <= held
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    assert any(leaf.addressable_shards[0].data.size * DEVICES == leaf.size for leaf in matrices)
    for leaf in matrices:
        assert leaf.addressable_shards[0].data.size < leaf.size
    from_orbax(sharding)


def from_orbax(sharding: Any) -> None:
    """The same from a folder that convert wrote."""
    import jax
    import numpy as np
    from tiny import GOLDEN, tiny_build

    import checkpoints
    from jaxinfer.config import ModelConfig
    from jaxinfer.convert import convert
    from jaxinfer.model import weights

    source = GOLDEN / "grid" / "llama_gqa"
    with tempfile.TemporaryDirectory() as folder:
        held = checkpoints.open_checkpoint(convert(source, Path(folder) / "orbax", progress=False))
        config = ModelConfig.from_hf(held.config)
        _, state = weights.load_params(config, tiny_build(), held, sharding=sharding)
        _, whole = weights.load_params(config, tiny_build(), checkpoints.open_checkpoint(source))
    jax.tree.map(np.testing.assert_array_equal, whole, state)
    assert any(len(leaf.sharding.device_set) == DEVICES for leaf in jax.tree.leaves(state))


if __name__ == "__main__":
    main()
