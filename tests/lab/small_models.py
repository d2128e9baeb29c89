"""Tiny models with a tokenizer, and their distributions as numpy has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tiny import TINY, random_tensors, tiny_runner

from jaxinfer.config import EngineConfig, ModelConfig, StepShape
from jaxinfer.core import Limits
from jaxinfer.llm import LLM
from jaxinfer.text.tokenizer import ByteTokenizer

LENGTH = 64
"""max_model_len of these models."""

LADDER = (StepShape(4, 4, 0), StepShape(68, 4, 4))
"""Two programs: one of decodes, one of everything."""


def byte_llm(
    config: ModelConfig = TINY,
    *,
    seed: int = 0,
    tensors: Any = None,
    tokenizer: Any = None,
    engine_config: EngineConfig | None = None,
) -> LLM:
    """A tiny model whose tokens are bytes; its tensors are `random_tensors(config, seed)`."""
    made = tiny_runner(
        config, ladder=LADDER, tensors=tensors or random_tensors(config, seed), max_model_len=LENGTH,
        max_num_seqs=4, max_num_batched_tokens=64,
    )  # fmt: skip
    limits = Limits(
        num_pages=made.num_pages, page_size=made.page_size, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=LENGTH, vocab_size=config.vocab_size,
    )  # fmt: skip
    return LLM.from_parts(
        made, limits, tokenizer=tokenizer or ByteTokenizer(), model_config=config,
        engine_config=engine_config or EngineConfig(seed=7), model_name=f"tiny{seed}",
    )  # fmt: skip


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    """float64 [T, V] -> natural logprobs."""
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def few_tokens(vocab_size: int) -> ModelConfig:
    """TINY with a small vocabulary."""
    return dataclasses.replace(TINY, vocab_size=vocab_size)
