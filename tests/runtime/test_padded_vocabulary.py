"""Output matrices with more rows than the tokenizer has ids: the rows past the last id are never sampled."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_sample import run, settings, without
from tiny import GOLDEN

from jaxinfer.core import ConfigError, RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime.sample import sample

pytestmark = pytest.mark.usefixtures("compile_cache")

REAL, ROWS = 512, 544
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 33, "progress": False}
STORIES = GOLDEN / "stories260k"


# ------------------------------------------------------------------------------------------- the sampler


@pytest.mark.parametrize("planted", [50.0, 1e4, 3e38])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1e30},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_a_huge_logit_in_a_padding_row_is_never_chosen(planted: float, fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32)
    logits[:, 17:] = planted
    inputs = settings(64, top_logprobs=2, **fields)
    out = run(logits, inputs, without([[3, 18]] * 64), sampled_vocab=17)
    assert set(np.asarray(out.token).tolist()) <= set(range(17)) - {3}
    # The report stays that of the whole distribution.
    raw = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    expected = np.take_along_axis(np.asarray(raw), np.asarray(out.token)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(out.logprob, expected, rtol=1e-6)
    assert (np.asarray(out.rank) > 3).all()
    assert set(np.asarray(out.top_ids)[:, :2].ravel().tolist()) <= {17, 18, 19}


def test_a_bound_as_large_as_the_vocabulary_costs_nothing() -> None:
    logits, inputs = jnp.zeros((4, 20)), jax.tree.map(jnp.asarray, settings(4))
    lowered = jax.jit(sample, static_argnames="sampled_vocab").lower
    bounded = lowered(logits, inputs, sampled_vocab=20)
    assert bounded.as_text() == lowered(logits, inputs, sampled_vocab=None).as_text()


def test_draws_are_those_of_a_model_without_padding() -> None:
    """A row's noise belongs to its ids: padding the matrix changes no sample."""
    logits = np.random.default_rng(0).normal(size=(64, 17)).astype(np.float32)
    padded = np.concatenate([logits, np.full((64, 3), 9.0, np.float32)], axis=1)
    short = run(logits, settings(64, temperature=1.0))
    long = run(padded, settings(64, temperature=1.0), sampled_vocab=17)
    assert short.token.tolist() == long.token.tolist()


# ------------------------------------------------------------------------------------------- the model


def padded_folder(tmp_path: Path, rows: int = ROWS) -> Path:
    """stories260k with an output matrix of `rows` rows, those past 512 w and -w in turn, |w| huge: for any
    hidden state one of them beats every real token."""
    path = tmp_path / "padded"
    shutil.copytree(STORIES, path)
    config = json.loads((path / "config.json").read_text())
    config |= {"vocab_size": rows, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(STORIES / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    signs = np.where(np.arange(rows - REAL) % 2, -1.0, 1.0).astype(np.float32)[:, None]
    loud = signs * np.full((1, embedding.shape[1]), 100.0, np.float32)
    tensors["lm_head.weight"] = np.concatenate([embedding, loud])
    tensors["model.embed_tokens.weight"] = np.concatenate([embedding, np.zeros_like(loud)])
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_padded_model_generates_what_the_real_one_does(tmp_path: Path) -> None:
    padded, real = LLM(str(padded_folder(tmp_path)), **SMALL), LLM(str(STORIES), **SMALL)
    assert (padded.limits.vocab_size, padded.limits.sampled_vocab) == (ROWS, REAL)
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3),
        SamplingParams(temperature=1.0, seed=5, max_tokens=12),
        SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=5, max_tokens=12),
    ]
    answers = [llm.generate(["Once upon a time"] * 3, params) for llm in (padded, real)]
    ids = [[o.outputs[0].token_ids for o in outputs] for outputs in answers]
    assert ids[0] == ids[1]
    reported = answers[0][0].outputs[0].logprobs
    assert reported is not None
    for token_id, known in zip(ids[0][0], reported, strict=True):
        assert known[token_id].rank > (ROWS - REAL) // 2, (
            "the padding rows are likelier in the raw distribution"
        )
        assert max(known) >= REAL
        assert all(math.isfinite(entry.logprob) for entry in known.values())
    # Padding ids have embeddings: a prompt may hold one, as it may in other engines.
    assert len(padded.generate([[1, ROWS - 1]], params[:1])[0].outputs[0].token_ids) == 12


def test_without_a_tokenizer_every_row_counts(tmp_path: Path) -> None:
    path = padded_folder(tmp_path)
    (path / "tokenizer.json").unlink()
    llm = LLM(str(path), **SMALL)
    assert llm.limits.sampled_vocab == ROWS
    (output,) = llm.generate([[1, 403]], SamplingParams(temperature=0, max_tokens=3))
    assert min(output.outputs[0].token_ids) >= REAL


# --------------------------------------------------------------------------- tokenizers that are too large


def with_tokenizer(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "model"
    shutil.copytree(STORIES, path)
    spec = json.loads((path / "tokenizer.json").read_text())
    change(spec)
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


def test_a_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path, lambda spec: spec["model"]["vocab"].update({"▁zebra": 512}))
    with pytest.raises(ConfigError, match=r"vocabulary has 513 ids and the model's 512 \(vocab_size\)"):
        LLM(str(path), **SMALL)


def test_added_tokens_outside_the_model_are_refused_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    added = {"id": 512, "content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"normalized": False, "special": True}
    path = with_tokenizer(tmp_path, lambda spec: spec["added_tokens"].append(added))
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        llm = LLM(str(path), **SMALL)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "'[PAD]'" in record.message
    assert llm.limits.sampled_vocab == 512
    with pytest.raises(RequestError, match="512"):
        llm.generate("Once [PAD]")
    assert llm.generate("Once", SamplingParams(max_tokens=2))[0].outputs[0].text
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "[PAD]"}))
    with pytest.raises(ConfigError, match="bos_token_id 512 is outside the vocabulary of 512"):
        LLM(str(path), **SMALL)
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "[PAD]"}))
    with pytest.raises(ConfigError, match="eos_token_id 512 is outside the vocabulary of 512"):
        LLM(str(path), **SMALL)
