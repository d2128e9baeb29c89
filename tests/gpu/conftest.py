"""Tests for a machine with a GPU: `make test-gpu`. Without one they are skipped.

JAXINFER_GPU_TESTS=cpu runs them on the CPU instead, with the backends that serve it and the Triton kernels in
the interpreter: that proves the tests, not the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ON_CPU = os.environ.get("JAXINFER_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies here, and skip it where there is no GPU. jax is asked only if some of it is to run."""
    del config
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
    if mine and not ON_CPU and (reason := _no_gpu()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str:
    import jax

    platform = jax.default_backend()
    return "" if platform == "gpu" else f"there is no GPU here (jax runs on {platform})"


@pytest.fixture(scope="session")
def device() -> Any:
    """The pallas_kernels.Device that these tests are for."""
    import jax

    from pallas_kernels import Device

    return Device.of(jax.local_devices()[0])


@pytest.fixture
def on_cpu() -> Generator[None]:
    """A place for what a GPU is compared with."""
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield
