"""What every test may use: the compile cache, the real model, and random tests that repeat themselves.

pytest puts this folder on the import path because of this file, so tests anywhere below may import
`tiny` and `fake_runner`.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

# An editable install is looked up after the import path, where the folder tests/checkpoints would pass for
# the package `checkpoints`: the project's own folder has to come first.
sys.path.insert(0, str(Path(__file__).parent.parent))

# A shell starts what runs in its background with SIGINT ignored, and tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failure must be the same on every machine, and a compile inside an example is no slow example.
settings.register_profile(
    "jaxinfer", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("jaxinfer")


@pytest.fixture(autouse=True)
def seeded_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without a seed takes one of the system, so that a test would draw other tokens at every run:
    once in some hundred runs the end of the text at once, or the token that was planted to break a step."""
    seeds = itertools.count()
    seeded = SimpleNamespace(Random=lambda seed: random.Random(next(seeds) if seed is None else seed))
    monkeypatch.setattr("jaxinfer.engine.engine.random", seeded)


@pytest.fixture(scope="session")
def compile_cache() -> None:
    """Keep compiled programs where the engine keeps its own, so that a second run of the tests is quick.

    `jax.config` is process-wide; tests that need no jax do not ask for this and do not import it.
    """
    from jaxinfer.runtime.loading import use_compile_cache

    use_compile_cache(None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M GGUF, downloaded on first use. Only for tests marked `model`."""
    import checkpoints

    checkpoints.pull("smollm2-135m", progress=False)
    return checkpoints.resolve("smollm2-135m")
