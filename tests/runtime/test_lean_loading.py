"""Loading the real model: its peak memory, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.model


def test_peak_memory_above_the_parameters() -> None:
    """At most 1.2 times the largest parameter above what stays; mapped pages of the file are not counted,
    since the system may drop them at any time."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["parameters"] == 134_515_008 * 4
    assert measured["seconds"] < 8, "2 s on a quiet machine (docs/performance.md)"
    assert measured["peak"] - measured["parameters"] <= 1.2 * measured["largest"], measured


def main() -> None:
    import threading
    import time

    import jax
    import jax.numpy as jnp

    import checkpoints
    from jaxinfer.config import ModelConfig
    from jaxinfer.model import weights
    from jaxinfer.model.llama import Build
    from pallas_kernels import Backend

    def anonymous() -> int:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return int(fields["RssAnon"].split()[0]) * 1024

    checkpoint = checkpoints.open_checkpoint(checkpoints.resolve("smollm2-135m"))
    config = ModelConfig.from_hf(checkpoint.config)
    jax.block_until_ready(jnp.zeros(8))
    before, peak, running = anonymous(), 0, True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, anonymous() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.process_time()
    _, state = weights.load_params(config, Build(jnp.dtype("float32"), "cpu", Backend("xla")), checkpoint)
    leaves = jax.block_until_ready(jax.tree.leaves(state))
    seconds = time.process_time() - began
    running = False
    thread.join()
    sizes = [leaf.nbytes for leaf in leaves]
    print(json.dumps({"peak": peak, "parameters": sum(sizes), "largest": max(sizes), "seconds": seconds}))


if __name__ == "__main__":
    main()
