"""Agreement and divergence of two models, against whole distributions in numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from dense import dense_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import byte_llm, few_tokens, logprobs_of
from tiny import TINY, random_tensors, tiny_config

from jaxinfer.config import EngineConfig, TopPages, TopPagesSpan
from jaxinfer.core import Logprob, RequestError
from jaxinfer.lab.evaluate import (
    ModelResults,
    Report,
    Text,
    Windowing,
    agreement,
    evaluate_agreement,
    evaluate_perplexity,
)
from jaxinfer.lab.evaluate.agreement import compare_spans
from jaxinfer.lab.evaluate.divergence import bounded, exact
from jaxinfer.lab.evaluate.scoring import Span

WINDOWING = Windowing(window=24, stride=12)
TEXT = Text(name="t", content="Once upon a time there was a small model of bytes.")
FEW = few_tokens(16)
"""A vocabulary that the engine's top k (20) holds whole."""


@pytest.fixture(scope="module")
def models(compile_cache):
    return byte_llm(), byte_llm(seed=1)


def divergence_by_hand(config, ids: list[int], first: int) -> tuple[np.ndarray, np.ndarray]:
    """(KL of seed 0 and seed 1 per token from `first` on, whether their most likely tokens are the same)."""
    p, q = (logprobs_of(dense_logits(config, random_tensors(config, seed), ids)) for seed in (0, 1))
    kl = (np.exp(p) * (p - q)).sum(-1)[first - 1 : -1]
    return kl, (p.argmax(-1) == q.argmax(-1))[first - 1 : -1]


def spans_of(vocab_size: int, count: int = 3) -> list[Span]:
    draw = np.random.default_rng(5)
    return [Span(tuple(draw.integers(0, vocab_size, 20 + i).tolist()), 1 + i, f"s{i}") for i in range(count)]


def test_a_model_agrees_with_itself(models) -> None:
    found = evaluate_agreement(models[0], models[0], TEXT, WINDOWING, greedy_tokens=8)
    assert found.same_next.value == 1.0
    assert found.kl is not None
    assert found.kl.value == found.kl_bound.value == 0.0
    assert found.same_prefix is not None
    assert found.same_throughout is not None
    assert (found.same_prefix.value, found.same_throughout.value) == (8.0, 1.0)
    assert found.counted == len(TEXT.content) - 1


def test_two_models_differ_as_whole_distributions_say(models) -> None:
    spans = spans_of(TINY.vocab_size)
    found = compare_spans(*models, spans, "t", WINDOWING, True, 8, 8)
    by_hand = [divergence_by_hand(TINY, list(span.token_ids), span.first) for span in spans]
    kl, same = (np.concatenate(parts) for parts in zip(*by_hand, strict=True))
    assert found.kl is not None
    assert found.kl.value == pytest.approx(kl.mean(), rel=1e-4)
    for part, span in zip(exact(*models, spans), spans, strict=True):
        np.testing.assert_allclose(
            part, divergence_by_hand(TINY, list(span.token_ids), span.first)[0], rtol=1e-3
        )
    assert found.same_next.value == pytest.approx(same.mean())
    assert 0.0 < found.kl_bound.value < found.kl.value  # 20 of 300 tokens
    assert found.same_prefix is not None
    assert found.same_prefix.value < 8


def test_the_bound_is_exact_when_every_token_is_reported(compile_cache) -> None:
    few = byte_llm(FEW), byte_llm(FEW, seed=1)
    spans = spans_of(FEW.vocab_size)
    found = compare_spans(*few, spans, "t", WINDOWING, True, 8, 0)
    assert found.kl is not None
    assert found.same_prefix is None
    kl = np.concatenate([divergence_by_hand(FEW, list(span.token_ids), span.first)[0] for span in spans])
    assert found.kl_bound.value == pytest.approx(kl.mean(), rel=1e-4)
    assert found.kl_bound.value == pytest.approx(found.kl.value, rel=1e-4)


@settings(max_examples=200)
@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 10_000), st.floats(0.1, 4))
def test_the_bound_holds(vocab: int, k: int, seed: int, spread: float) -> None:
    draw = np.random.default_rng(seed)
    p, q = (logprobs_of(spread * draw.standard_normal((1, vocab)))[0] for _ in range(2))
    text = int(draw.integers(vocab))

    def entries(logprobs: np.ndarray) -> dict[int, Logprob]:
        top = np.argsort(-logprobs)[:k].tolist()
        return {i: Logprob(float(np.float32(logprobs[i])), 1) for i in {text, *top}}

    kl = float((np.exp(p) * (p - q)).sum())
    assert -1e-12 <= bounded(entries(p), entries(q)) <= kl + 1e-5
    assert bounded(entries(p), entries(p)) == 0.0
    if k >= vocab:
        assert bounded(entries(p), entries(q)) == pytest.approx(kl, abs=1e-5)


def test_the_same_model_with_repeated_heads_is_the_same(compile_cache) -> None:
    """GQA is MHA with K/V heads repeated (2305.13245): the lab must find no difference."""
    tensors = random_tensors(TINY)
    repeated = dict(tensors)
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            apart = tensor.reshape(TINY.layers[0].num_kv_heads, TINY.head_dim, -1)
            repeated[name] = np.repeat(apart, 4, axis=0).reshape(-1, tensor.shape[1])
    original, variant = byte_llm(), byte_llm(tiny_config(num_kv_heads=8), tensors=repeated)
    found = evaluate_agreement(original, variant, TEXT, WINDOWING, greedy_tokens=8)
    assert found.kl is not None
    assert found.same_next.value == 1.0
    assert found.kl.value == pytest.approx(0.0, abs=1e-6)
    assert found.kl_bound.value == pytest.approx(0.0, abs=1e-6)


def test_other_vocabularies_are_refused(models) -> None:
    with pytest.raises(RequestError, match="16 tokens and tiny0 300"):
        evaluate_agreement(models[0], byte_llm(FEW), TEXT, WINDOWING)


def test_a_report_pairs_what_both_models_have(models) -> None:
    results = [
        ModelResults(
            model=llm.model_name, parameters_dtype="float32", kv_cache_dtype="float32",
            perplexity=tuple(evaluate_perplexity(llm, [TEXT], WINDOWING)),
        )
        for llm in models
    ]  # fmt: skip
    agreement = evaluate_agreement(*models, TEXT, WINDOWING, exact_kl=False, greedy_tokens=0)
    report = Report(results=results[1], original=results[0], agreement=(agreement,))
    value = json.loads(json.dumps(report.as_json(), allow_nan=False))
    mine, other = (value[side]["perplexity"][0]["per_token"]["value"] for side in ("model", "original"))
    difference = next(row for row in value["differences"] if row["metric"] == "perplexity per_token")
    assert difference["value"] == pytest.approx(mine - other)
    assert value["agreement"][0]["kl"] is None
    assert value["model"]["perplexity"][0]["windowing"] == {
        "window": 24,
        "stride": 12,
        "bos": "first",
        "limit": None,
    }
    table = report.as_table()
    assert f"{mine:.4f}" in table
    assert "windows of 24 tokens, stride 12" in table
    assert "at least" in table


@pytest.mark.slow
def test_the_command_measures_and_compares(compile_cache, tmp_path: Path, capsys) -> None:
    from jaxinfer.cli import main

    text, pairs = tmp_path / "t.txt", tmp_path / "b.jsonl"
    text.write_text(TEXT.content)
    pairs.write_text(json.dumps({"sentence_good": "a b", "sentence_bad": "b a"}) + "\n")
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }))  # fmt: skip
    model, kept = f"random:{shape}", tmp_path / "out.json"
    command = [
        "lab", "evaluate", model, "--perplexity", str(text), "--multiple-choice", str(pairs),
        "--last-word", str(text), "--against", model, "--window", "16", "--greedy-tokens", "4",
        "--output", str(kept), "--json", "--max-num-seqs", "2", "--max-num-batched-tokens", "16",
        "--num-pages", "64", "--warmup", "lazy",
    ]  # fmt: skip
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(kept.read_text())
    assert told["agreement"][0]["same_next"]["value"] == 1.0
    assert told["agreement"][0]["kl"]["value"] == 0.0
    assert {row["value"] for row in told["differences"]} == {0.0}
    assert math.isfinite(told["model"]["last_word"][0]["perplexity"]["value"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to evaluate"),
        (["--perplexity", "FILE", "--limit", "0"], "--limit 0"),
        (["--perplexity", "FILE", "--greedy-tokens", "3"], "it needs --against"),
        (["--perplexity", "FILE", "--against", "x", "--greedy-prompt", "0"], "--greedy-prompt takes"),
        (["--perplexity", "FILE", "--attention-span", "topk-pages:2"], "say from:P"),
        (
            ["--perplexity", "FILE", "--window", "8", "--attention-span", "topk-pages:2,from:8"],
            "none chooses",
        ),
        (
            ["--perplexity", "FILE", "--against", "x", "--attention-span", "topk-pages:1,from:0"],
            "--no-exact-kl",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_a_model_is_loaded(flags, said, capsys) -> None:
    from jaxinfer.cli import main

    assert main(["lab", "evaluate", "nothing-of-this-name", *flags]) == 2
    assert said in capsys.readouterr().err


def test_exact_kl_where_pages_are_chosen_is_refused_before_anything_is_run(
    compile_cache, monkeypatch
) -> None:
    config = TINY.spanned(TopPagesSpan(TopPages(1, 0)))
    spanned = [
        byte_llm(config, seed=seed, engine_config=EngineConfig(attention_span="topk-pages:1,from:0"))
        for seed in (0, 1)
    ]
    found = evaluate_agreement(*spanned, TEXT, WINDOWING, exact_kl=False, greedy_tokens=2)
    assert found.kl_bound.value > 0
    monkeypatch.setattr(agreement, "spans_with_top", None)
    with pytest.raises(RequestError, match=r"topk-pages:1,from:0.*--no-exact-kl"):
        evaluate_agreement(*spanned, TEXT, WINDOWING)
