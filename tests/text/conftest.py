from __future__ import annotations

import pytest
from small_tokenizers import GOLDEN

import checkpoints
from jaxinfer.text import Tokenizer


@pytest.fixture(scope="session")
def stories() -> Tokenizer:
    """SentencePiece with byte fallback: the tokenizer of stories260k."""
    return Tokenizer.from_folder(GOLDEN / "stories260k")


@pytest.fixture(scope="session")
def smollm2_source() -> checkpoints.TokenizerSource:
    """The tokenizer keys of the real SmolLM2 GGUF. Only for tests marked `model`."""
    checkpoints.pull("smollm2-135m", progress=False)
    return checkpoints.open_checkpoint(checkpoints.resolve("smollm2-135m")).tokenizer_source()


@pytest.fixture(scope="session")
def smollm2(smollm2_source: checkpoints.GGUFTokenizerSource) -> Tokenizer:
    """Byte-level BPE: the tokenizer of SmolLM2."""
    return Tokenizer.from_gguf(smollm2_source)
