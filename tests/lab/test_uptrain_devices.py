"""Many devices train as one does. They are forced in a process of its own: a process has its devices once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEVICES = 4
TESTS = Path(__file__).parents[1]


def test_four_devices_train_as_one_does() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "lab")]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    import jax
    import numpy as np
    import pytest
    from training import SMALL, parameters, random_blocks, settings

    from jaxinfer.core import ConfigError
    from jaxinfer.lab import selection
    from jaxinfer.lab.trainer import Trainer, batch_of
    from jaxinfer.lab.uptrain import _mesh
    from jaxinfer.model import mesh as devices
    from jaxinfer.runtime.loading import use_compile_cache

    use_compile_cache(None)
    assert jax.device_count() == DEVICES
    blocks = random_blocks(8)
    results = {}
    for count, shard in ((1, False), (4, False), (4, True)):
        # with a batch of 4 and two of them, and an original that lies as the model does
        chosen = settings(
            devices=count, shard_params=shard, accumulate=2, distill="other", distill_weight=0.5,
            learning_rate=1e-2, eval_file=("x",), steps=3,
        )  # fmt: skip
        mesh = _mesh(chosen)
        assert mesh.size == count
        graph, state = parameters()
        original = parameters(seed=1)
        trained, frozen = selection.split(SMALL, state, "all")
        trainer = Trainer(graph, jax.eval_shape(lambda x: x, state), chosen, mesh, original)
        begun, frozen = trainer.begin(trained), trainer.place(frozen)
        figures = []
        for step in range(3):
            begun, found = trainer.step(begun, frozen, step, *batch_of(blocks, np.arange(8), chosen))
            figures.append([float(x) for x in found])
        held = sum(s.data.size for x in jax.tree.leaves(begun.trained) for s in x.addressable_shards)
        whole = selection.count(begun.trained)
        assert held == whole * (1 if shard else count), (held, whole)  # a part on each device, or a copy
        moments = [x for x in jax.tree.leaves(begun.optimizer) if x.ndim]
        parts = sum(s.data.size for x in moments for s in x.addressable_shards)
        assert parts == 2 * held
        loss = trainer.evaluate(begun, frozen, blocks)
        results[count, shard] = figures, loss, {n: np.array(x) for n, x in begun.trained.items()}
    one = results.pop((1, False))
    for figures, loss, arrays in results.values():
        np.testing.assert_allclose(figures, one[0], rtol=2e-3, atol=1e-5)
        assert abs(loss - one[1]) < 1e-2
        for name, array in arrays.items():
            # Adam moves by the sign of a gradient: where that is 0 but for rounding, it is anybody's
            assert np.isclose(array, one[2][name], rtol=1e-2, atol=2e-3).mean() > 0.99, name

    with pytest.raises(ConfigError, match="batch 3 cannot be shared by 4 devices"):
        _mesh(settings(batch=3))
    with pytest.raises(ConfigError, match="devices 5: there are 4"):
        _mesh(settings(devices=5, batch=5))
    with pytest.raises(ConfigError, match="4 devices cannot be split into groups of 3"):
        devices.device_mesh(model=3)
    grid = devices.device_mesh(model=2)
    assert dict(grid.shape) == {"data": 2, "model": 2}
    placed = jax.device_put(np.zeros((6, 4)), devices.split(grid, 1, devices.MODEL))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(6, 2)}
    assert devices.split_where_possible(grid, (3, 4)) == devices.split(grid, 1)
    assert devices.split_where_possible(grid, (3, 5)) == devices.replicated(grid)


if __name__ == "__main__":
    main()
