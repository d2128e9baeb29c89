"""Checkpoints written by Hugging Face transformers, with the logits and tokens that it computes from them.

tests/golden/grid/NAME: config.json in its old or new spelling, random weights (one of them in shards), and
reference.npz from float32 eager attention. Of models that this version refuses there is config.json only.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dense import chunk_logits
from tiny import GOLDEN, assert_idle, greedy, tiny_build

import checkpoints
from jaxinfer import LLM
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model import weights

pytestmark = pytest.mark.usefixtures("compile_cache")

GRID = GOLDEN / "grid"
SUPPORTED = [
    "llama_bias", "llama_gqa", "llama_head_dim", "llama_mha", "llama_mqa", "llama_odd_heads",
    "llama_rope_linear", "llama_rope_llama3", "llama_rope_theta", "llama_tied",
]  # fmt: skip
REFUSED = {
    "llama_rope_dynamic": "rope kind 'dynamic'",
    "llama_rope_yarn": "rope kind 'yarn'",
    "mistral_window": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3_nope": "SmolLM3ForCausalLM",
}
LOGIT_ERROR = 2e-4


def test_the_lists_are_the_folder() -> None:
    assert {path.name for path in GRID.iterdir()} == {*SUPPORTED, *REFUSED}


@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_of_every_position(name: str) -> None:
    reference = np.load(GRID / name / "reference.npz")
    checkpoint = checkpoints.open_checkpoint(GRID / name)
    config = ModelConfig.from_hf(checkpoint.config)
    graph, state = weights.load_params(config, tiny_build(), checkpoint)
    got = chunk_logits(config, graph, state, reference["input_ids"].tolist())
    assert got.shape == reference["logits"].shape
    assert np.abs(got - reference["logits"]).max() <= LOGIT_ERROR


@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_tokens(name: str) -> None:
    """Through the front door, in chunks of 16: prompts of 48 and 160 tokens are three and ten of them."""
    reference = np.load(GRID / name / "reference.npz")
    llm = LLM(str(GRID / name), max_num_seqs=1, max_num_batched_tokens=16, num_pages=33, progress=False)
    answer = llm.generate(reference["input_ids"].tolist(), greedy(len(reference["greedy"])))[0].outputs[0]
    assert answer.token_ids == tuple(reference["greedy"].tolist())
    assert answer.finish_reason == "length"
    assert_idle(llm)
    assert llm.stats()["programs"] == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = json.loads((GRID / name / "config.json").read_text())
    with pytest.raises(ConfigError, match=REFUSED[name]):
        ModelConfig.from_hf(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=REFUSED[name]):
        LLM(f"random:{tmp_path}", progress=False)
