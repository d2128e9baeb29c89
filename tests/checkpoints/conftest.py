from __future__ import annotations

from pathlib import Path

import pytest

import checkpoints


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2 GGUF; downloaded on first use. Only for tests marked `model`."""
    checkpoints.pull("smollm2-135m", progress=False)
    return checkpoints.resolve("smollm2-135m")
