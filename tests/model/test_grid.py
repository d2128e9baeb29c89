"""Checkpoints written by Hugging Face transformers, with the logits and tokens that it computes from them.

tests/golden/grid/NAME: config.json in its old or new spelling, random weights (some of them in shards), and
reference.npz from float32 eager attention. $JAXINFER_GRID names another folder of the same form.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from dense import chunk_logits, paged_logits
from tiny import GOLDEN, assert_idle, greedy, tiny_build

import checkpoints
from jaxinfer import LLM
from jaxinfer.config import ModelConfig
from jaxinfer.model import weights

pytestmark = pytest.mark.usefixtures("compile_cache")

GRID = Path(os.environ.get("JAXINFER_GRID") or GOLDEN / "grid")
NAMES = sorted(path.name for path in GRID.iterdir() if (path / "reference.npz").exists())
LOGIT_ERROR = 2e-4


def test_all_sixteen_are_here() -> None:
    assert len(NAMES) >= 16


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_position(name: str) -> None:
    """In one chunk; and in chunks of 16, the last ten tokens one by one, over pages that windows release."""
    reference = np.load(GRID / name / "reference.npz")
    checkpoint = checkpoints.open_checkpoint(GRID / name)
    config = ModelConfig.from_hf(checkpoint.config)
    graph, state = weights.load_params(config, tiny_build(), checkpoint)
    tokens = reference["input_ids"].tolist()
    got = chunk_logits(config, graph, state, tokens)
    assert got.shape == reference["logits"].shape
    assert np.abs(got - reference["logits"]).max() <= LOGIT_ERROR
    chunked = len(tokens) - 10
    counts = [16] * (chunked // 16) + [chunked % 16] * (chunked % 16 > 0) + [1] * 10
    got = paged_logits(config, graph, state, tokens, counts)
    assert np.abs(got - reference["logits"]).max() <= LOGIT_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str) -> None:
    """Through the front door, in chunks of 16: prompts of 48 and 160 tokens are three and ten of them."""
    reference = np.load(GRID / name / "reference.npz")
    llm = LLM(str(GRID / name), max_num_seqs=1, max_num_batched_tokens=16, num_pages=33, progress=False)
    sampling = greedy(len(reference["greedy"]), logprobs=0)
    answer = llm.generate(reference["input_ids"].tolist(), sampling)[0].outputs[0]
    last = reference["logits"][-1].astype(np.float64)
    logprob = last.max() - np.log(np.exp(last - last.max()).sum()) - last.max()
    assert answer.logprobs is not None
    assert answer.logprobs[0][answer.token_ids[0]].logprob == pytest.approx(logprob, abs=LOGIT_ERROR)
    expected = reference["greedy_cached"] if "greedy_cached" in reference else reference["greedy"]
    assert answer.token_ids == tuple(expected.tolist())
    assert answer.finish_reason == "length"
    assert_idle(llm)
    assert llm.stats()["programs"] == 3, "two forward, one to sample"
