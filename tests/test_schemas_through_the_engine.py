"""Every schema of text/test_grammar_schemas.py through the whole engine: together, whole and streamed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from tiny import tiny_runner

from jaxinfer.config import EngineConfig
from jaxinfer.core import Limits, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.text import ByteTokenizer

sys.path.append(str(Path(__file__).parent / "text"))
from test_grammar_schemas import SCHEMAS

pytestmark = pytest.mark.usefixtures("compile_cache")

EOS = 257
SPACES = dict.fromkeys((9, 10, 13, 32), -100.0)
"""A random model takes all the white space that a schema allows."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    runner = tiny_runner(max_num_seqs=8, max_model_len=256, num_pages=257)
    limits = Limits(
        num_pages=257, page_size=8, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=256,
        vocab_size=runner.config.vocab_size, eos_token_ids=frozenset({EOS}), sampled_vocab=259,
    )  # fmt: skip
    return LLM.from_parts(runner, limits, tokenizer=ByteTokenizer(), engine_config=EngineConfig())


def sampling(name: str) -> SamplingParams:
    return SamplingParams(json_schema=SCHEMAS[name], seed=len(name), max_tokens=200, logit_bias=SPACES)


def test_all_schemas_together_and_streamed(llm: LLM) -> None:
    """Those that end are instances of their schema; a stream says what the whole answer says."""
    assert len(SCHEMAS) >= 30
    names = list(SCHEMAS)
    outputs = llm.generate([f"{name}:" for name in names], [sampling(name) for name in names])
    complete = 0
    for name, output in zip(names, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason in ("stop", "length"), (name, answer.error)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMAS[name])
            complete += 1
        streamed = list(llm.stream(f"{name}:", sampling(name)))
        assert "".join(event.text for event in streamed) == answer.text, name
        assert tuple(t for event in streamed for t in event.token_ids) == answer.token_ids
        assert streamed[-1].finish_reason == answer.finish_reason
    assert complete >= 30, f"{complete} of {len(names)} came to an end"
