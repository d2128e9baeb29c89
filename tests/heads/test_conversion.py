"""Models with other KV heads against what they are by definition, as logits, answers and bytes of pages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from head_models import (
    FAMILIES,
    KEYS,
    METHODS,
    STORIES,
    assert_close,
    drawn,
    equal_heads,
    heads_of,
    logits_of,
    model_folder,
    opened,
    regrouped,
    tensors_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import engine_over, greedy, prompts, tiny_runner, token_ids

from jaxinfer.config import ModelConfig, StepShape, invariant_ladder
from jaxinfer.convert import convert
from jaxinfer.heads import HeadChange, HeadPlan, Regrouped, calibrate, decide, kv_bytes, lines
from jaxinfer.heads.decide import _Layer
from jaxinfer.planner import ModelCosts

FEW = (StepShape(4, 4, 0), StepShape(36, 4, 4))
"""Two programs: one of decodes, one of everything."""


# --------------------------------------------------------------------------------------- what loses nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_heads_lose_nothing_by_any_method(tmp_path: Path, family: str) -> None:
    keys = KEYS | FAMILIES[family]
    together, apart = [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 3, 5, 6), (1, 2, 4, 7)]
    runs = model_folder(tmp_path / "runs", keys, equal_heads(keys, drawn(keys), together))
    mixed = model_folder(tmp_path / "mixed", keys, equal_heads(keys, drawn(keys), apart))
    expected = {folder: logits_of(opened(folder)) for folder in (runs, mixed)}
    plans: list[dict[str, Any]] = [{"method": method, "measure": "weights"} for method in METHODS]
    plans += [{"method": method, "calibration_tokens": 200} for method in ("norm-weighted", "align", "svd")]
    for plan in plans:
        folder = mixed if plan["method"] == "similarity" else runs
        view, change = regrouped(folder, kv_heads=2, **plan)
        assert_close(logits_of(view), expected[folder])
        errors = [e for x in change.layers for e in (x.key_error, x.value_error, x.attention_error or 0)]
        assert max(errors) < 1e-3, plan
    view, change = regrouped(mixed, kv_heads=2, method="align", grouping="alike", calibration_tokens=200)
    assert [g.kv_heads for g in change.layers[0].groups] == apart
    assert_close(logits_of(view), expected[mixed])
    # and the heads do matter: other groups lose
    view, change = regrouped(mixed, kv_heads=2)
    assert np.abs(logits_of(view) - expected[mixed]).max() > 0.1
    assert min(layer.key_error for layer in change.layers) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_any_order_of_heads_and_any_repetition_change_nothing(tmp_path: Path, family: str) -> None:
    keys = KEYS | FAMILIES[family] | {"num_key_value_heads": 4}
    folder = model_folder(tmp_path / "model", keys, drawn(keys))
    expected = logits_of(opened(folder))
    scrambled = (((2,), (0,), (3,), (1,)), ((3,), (2,), (1,), (0,)))
    view, change = regrouped(folder, groups=scrambled)
    assert change.after == change.before
    assert_close(logits_of(view), expected)
    old = heads_of(tensors_of(opened(folder)), 0, "k", 16)
    np.testing.assert_array_equal(heads_of(tensors_of(view), 0, "k", 16), old[[2, 0, 3, 1]])
    for count, unequal, heads in (
        (8, False, 8),
        (4, False, 8),
        (7, True, 14),
        (5, True, 10),
        ((8, 4), False, 8),
    ):
        view, change = regrouped(folder, kv_heads=count, method="repeat", unequal_groups=unequal)
        assert change.after.num_heads == heads
        if heads == 8:  # without heads of zeros: 1e-5 of a logit, whatever their size
            np.testing.assert_allclose(logits_of(view), expected, atol=1e-5, rtol=0)
        assert_close(logits_of(view), expected)


def test_the_same_heads_are_the_same_bits(tmp_path: Path) -> None:
    convert(STORIES, tmp_path / "same", to="safetensors", heads=HeadPlan(kv_heads=4, method="svd"))
    before, after = tensors_of(opened(STORIES)), tensors_of(opened(tmp_path / "same"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)


@pytest.mark.usefixtures("compile_cache")
@pytest.mark.parametrize("invariant", [True, False])
def test_repeated_heads_serve_the_same_answers(tmp_path: Path, invariant: bool) -> None:
    """GQA = MHA, by way of a folder on disk and the engine: tokens, and logprobs within 1e-5. Decodes weigh
    the keys of one query head at a time, or of the two that share them, and round otherwise: of a likely
    token below 1e-5; of the least likely ones, whose float32 logprobs near -20 are multiples of 2e-6, a few
    of those more. Batch-invariant steps, and prompts in any, go by tiles of queries."""
    convert(STORIES, tmp_path / "mha", heads=HeadPlan(kv_heads=8, method="repeat"))
    assert json.loads((tmp_path / "mha" / "config.json").read_text())["num_key_value_heads"] == 8
    ladder = invariant_ladder(4, 32) if invariant else FEW
    answers = []
    for folder in (STORIES, tmp_path / "mha"):
        llm = served(opened(folder), ladder)
        asked = prompts([3, 17, 30], vocab_size=512)
        answers.append(llm.generate(asked, greedy(12, logprobs=20, prompt_logprobs=20)))
    assert token_ids(answers[0]) == token_ids(answers[1])
    for one, other in zip(*answers, strict=True):
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        assert_near(pairs, last_bits=0 if invariant else 1e-6)
        assert_near(zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True), last_bits=0)


def assert_near(pairs: Any, last_bits: float) -> None:
    """Logprobs of the same tokens within 1e-5, and a share of what they are."""
    for one, other in pairs:
        both = one.keys() & other.keys()
        assert len(both) >= 20 - 2  # the last of the top 20 may change places
        for token in both:
            wanted = one[token].logprob
            assert abs(other[token].logprob - wanted) <= 1e-5 + last_bits * abs(wanted)


def served(source: Any, ladder: Any = FEW) -> Any:
    config = ModelConfig.from_hf(source.config)
    return engine_over(tiny_runner(config, tensors=tensors_of(source), ladder=ladder))


# ----------------------------------------------------------------------------- what it is, by definition


def by_definition(folder: Path, groups: list[list[tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Tensors of an MHA model in which each query head has the mean of its group for its own: no padding, no
    sharing and no order of heads but the source's."""
    tensors = {name: tensor.copy() for name, tensor in tensors_of(opened(folder)).items()}
    config = ModelConfig.from_hf(opened(folder).config)
    size = config.num_heads // config.layers[0].num_kv_heads
    for layer, members in enumerate(groups):
        for kind in "kv":
            name = f"model.layers.{layer}.self_attn.{kind}_proj.weight"
            old = heads_of(tensors, layer, kind, config.head_dim).astype(np.float64)
            own = [
                np.mean([old[j] for group in members if i // size in group for j in group], axis=0)
                for i in range(config.num_heads)
            ]
            tensors[name] = np.concatenate(own).astype(np.float32)
    return tensors


members_of_a_layer = st.lists(st.integers(0, 3), min_size=4, max_size=4).map(
    lambda labels: tuple(
        tuple(head for head in range(4) if labels[head] == label) for label in dict.fromkeys(labels)
    )
)


@settings(max_examples=8)
@given(members=st.tuples(members_of_a_layer, members_of_a_layer), seed=st.integers(0, 3))
def test_any_groups_are_a_dense_model_of_that_head_map(
    tmp_path_factory: pytest.TempPathFactory, members: Any, seed: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("model")
    keys = KEYS | {"num_key_value_heads": 4}
    folder = model_folder(tmp_path / "model", keys, drawn(keys, seed))
    view, change = regrouped(folder, groups=members)
    dense = keys | {"num_key_value_heads": 8}
    reference = model_folder(tmp_path / "dense", dense, by_definition(folder, members))
    assert_close(logits_of(view), logits_of(opened(reference)))
    assert [layer.num_kv_heads for layer in change.after.layers] == list(map(len, members))
    assert change.after.num_heads <= 16


def test_means_by_hand(tmp_path: Path) -> None:
    keys = KEYS | {"attention_bias": True}
    tensors = drawn(keys)
    folder = model_folder(tmp_path / "mha", keys, tensors)
    view, change = regrouped(folder, kv_heads=2)
    for kind in "kv":
        weight = view.read(f"model.layers.1.self_attn.{kind}_proj.weight")
        old = heads_of(tensors, 1, kind, 16)
        by_hand = np.concatenate(
            [(old[0] + old[1] + old[2] + old[3]) / 4, (old[4] + old[5] + old[6] + old[7]) / 4]
        )
        np.testing.assert_allclose(weight, by_hand, rtol=1e-5, atol=1e-7)
        bias = (
            tensors[f"model.layers.1.self_attn.{kind}_proj.bias"].reshape(2, 4, 16).mean(axis=1).reshape(-1)
        )
        np.testing.assert_allclose(
            view.read(f"model.layers.1.self_attn.{kind}_proj.bias"), bias, rtol=1e-5, atol=1e-7
        )
    for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.o_proj.weight"):
        name = f"model.layers.0.{name}"
        np.testing.assert_array_equal(view.read(name), tensors[name])
    assert change.after == dataclasses.replace(
        change.before, layers=(dataclasses.replace(change.before.layers[0], num_kv_heads=2),) * 2
    )
    part = view.read("model.layers.1.self_attn.v_proj.weight", (slice(3, 9), slice(0, 5)))
    np.testing.assert_array_equal(part, view.read("model.layers.1.self_attn.v_proj.weight")[3:9, :5])


@pytest.mark.parametrize("method", ["align", "svd"])
def test_turned_heads_align_and_their_mean_does_not(tmp_path: Path, method: str) -> None:
    """Keys turned within the pairs of RoPE, values by any orthogonal matrix, made good in q and o."""
    tensors, draw = equal_heads(KEYS, drawn(KEYS), [(0, 1, 2, 3, 4, 5, 6, 7)]), np.random.default_rng(1)
    for layer in range(2):
        for kind in "kv":
            heads = heads_of(tensors, layer, kind, 16)
            for head in range(8):
                if kind == "k":
                    angles = draw.uniform(0, 2 * np.pi, 8)
                    low, high = heads[head, :8].copy(), heads[head, 8:].copy()
                    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
                    heads[head] = np.concatenate([low * cos - high * sin, high * cos + low * sin])
                else:
                    heads[head] = np.linalg.qr(draw.standard_normal((16, 16)))[0] @ heads[head]
    folder = model_folder(tmp_path / "model", KEYS, tensors)
    expected = logits_of(opened(folder))
    for count in (1, 4):
        view, _ = regrouped(folder, kv_heads=count, method=method, calibration_tokens=300)
        assert_close(logits_of(view), expected)
        view, _ = regrouped(folder, kv_heads=count, method="mean")
        assert np.abs(logits_of(view) - expected).max() > 0.3


def test_factors_of_enough_rank_are_exact(tmp_path: Path) -> None:
    """Values of two heads that are any two mixtures of 16 directions."""
    keys = KEYS | {"num_key_value_heads": 2}
    tensors, draw = drawn(keys), np.random.default_rng(1)
    for layer in range(2):
        values = heads_of(tensors, layer, "v", 16)
        values[1] = draw.standard_normal((16, 16)) @ values[0]
        heads_of(tensors, layer, "k", 16)[1] = 0.4 * heads_of(tensors, layer, "k", 16)[0]
    folder = model_folder(tmp_path / "model", keys, tensors)
    view, _ = regrouped(folder, kv_heads=1, method="svd", measure="weights")
    assert_close(logits_of(view), logits_of(opened(folder)))
    view, _ = regrouped(folder, kv_heads=1, method="align", measure="weights")
    assert np.abs(logits_of(view) - logits_of(opened(folder))).max() > 0.1


# ------------------------------------------------------------------------------------------ counts by layer


@pytest.mark.usefixtures("compile_cache")
@pytest.mark.parametrize("counts", [(4, 2, 1, 1, 2), (4, 3, 2, 1, 4)])
def test_counts_by_layer_are_served_at_their_own_memory(tmp_path: Path, counts: tuple[int, ...]) -> None:
    unequal = 3 in counts
    seen: list[HeadChange] = []
    convert(
        STORIES, tmp_path / "model", heads=HeadPlan(kv_heads=counts, unequal_groups=unequal),
        on_heads=seen.append, progress=False,
    )  # fmt: skip
    source = opened(tmp_path / "model")
    config = ModelConfig.from_hf(source.config)
    assert source.config["num_key_value_heads"] == list(counts)
    assert config == seen[0].after
    assert config.num_heads == (12 if unequal else 8)
    llm, view = served(source), Regrouped(opened(STORIES), seen[0])
    pages = [leaf for leaf in jax.tree.leaves(llm.engine.runner.kv)]
    assert [page.shape[1] for page in pages] == list(counts) * 2
    token_bytes = sum(page.nbytes for page in pages) / (pages[0].shape[0] * pages[0].shape[2])
    assert token_bytes == 2 * sum(counts) * 8 * 4 == ModelCosts(config, kv_dtype="float32").kv_bytes_per_token
    assert kv_bytes(seen[0], "float32") == (2 * 20 * 8 * 4, token_bytes)
    asked = prompts([9, 21], vocab_size=512)
    for prompt, output in zip(asked, llm.generate(asked, greedy(6)), strict=True):
        text = prompt + list(output.outputs[0].token_ids)
        logits = logits_of(view, np.asarray([text]))[0]
        assert text[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()


def test_a_budget_keeps_heads_where_they_are_needed(tmp_path: Path) -> None:
    """One layer's heads are equal: nothing is lost by merging them, and all else is kept."""
    keys = KEYS | {"num_hidden_layers": 3}
    tensors = drawn(keys)
    for kind in "kv":
        heads_of(tensors, 1, kind, 16)[:] = heads_of(tensors, 1, kind, 16)[0]
    folder = model_folder(tmp_path / "model", keys, tensors)
    view, change = regrouped(folder, kv_budget=17 / 24, calibration_tokens=200)
    assert [layer.num_kv_heads for layer in change.after.layers] == [8, 1, 8]
    assert_close(logits_of(view), logits_of(opened(folder)))
    assert change.layers[1].attention_error == pytest.approx(0, abs=1e-3)
    for budget in (0.2, 0.5, 1.0):
        for unequal in (False, True):
            _, change = regrouped(
                folder, kv_budget=budget, method="similarity", unequal_groups=unequal, calibration_tokens=100
            )
            assert sum(layer.num_kv_heads for layer in change.after.layers) <= budget * 24
            assert change.after.num_heads <= (16 if unequal else 8)
    assert "%" in "\n".join(lines(change))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_budget_measures_is_what_one_converted_layer_does(tmp_path: Path, family: str) -> None:
    """The model with one layer's K/V changed in place diverges as the model converted in that layer does."""
    keys = KEYS | FAMILIES[family]
    folder = model_folder(tmp_path / "model", keys, drawn(keys))
    source = opened(folder)
    pieces = np.random.default_rng(2).integers(3, 512, (2, 20)).astype(np.int32)
    divergence = calibrate.Divergence(calibrate.loaded(source, progress=False), pieces)

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        wide = logits.astype(np.float64)
        return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))

    before = log_softmax(logits_of(source, pieces))
    members = ((0, 1, 2), (3, 4, 5, 6, 7))
    for layer in (1, 0):  # the second finds the model as it was
        plan = HeadPlan(
            groups=tuple(members if i == layer else tuple((h,) for h in range(8)) for i in range(2)),
            method="svd", measure="weights",
        )  # fmt: skip
        change = decide(source, plan)
        after = log_softmax(logits_of(Regrouped(source, change), pieces))
        expected = float(np.mean(np.sum(np.exp(before) * (before - after), axis=-1)))
        rows = _Layer(change.before, plan, source, layer, None, change.before.layers[layer]).rows(members)
        assert divergence.of(layer, rows) == pytest.approx(expected, rel=1e-3)
        assert expected > 0.01
    whole = _Layer(change.before, plan, source, 0, None, change.before.layers[0]).rows(
        tuple((h,) for h in range(8))
    )
    assert divergence.of(0, whole) == pytest.approx(0, abs=1e-6)


def test_attention_errors_are_none_where_nothing_is_merged(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", KEYS, drawn(KEYS))
    errors = {}
    for method in ("first", "svd"):
        _, change = regrouped(folder, kv_heads=2, calibration_tokens=250, measure="text", method=method)
        errors[method] = np.asarray([layer.attention_error for layer in change.layers])
    assert np.all(errors["svd"] < errors["first"])
    _, change = regrouped(folder, kv_heads=8, calibration_tokens=250)
    assert [layer.attention_error for layer in change.layers] == [0, 0]


def test_a_trained_model_keeps_more_by_better_methods() -> None:
    """stories260k, 4 -> 2 KV heads: the loss on its own kind of text, from best to worst."""
    source = opened(STORIES)
    text = (
        "Once upon a time, there was a little dog named Tim. He liked to play with his red ball in the park. "
    )
    tokens = calibrate.load_tokenizer(source.tokenizer_source())
    assert tokens is not None
    ids = np.asarray([tokens.encode(text * 4)[:200]])

    def nll(view: Any) -> float:
        logits = logits_of(view, ids)[0].astype(np.float64)
        scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return -float(np.mean(scores[np.arange(ids.shape[1] - 1), ids[0, 1:]]))

    losses = {
        method: nll(regrouped(STORIES, kv_heads=2, method=method)[0]) for method in ("mean", "align", "svd")
    }
    assert nll(source) < losses["svd"] < losses["mean"]
    assert losses["align"] < losses["mean"]
    spread = nll(regrouped(STORIES, kv_budget=0.5, method="mean", calibration_tokens=512)[0])
    assert spread < losses["mean"] - 0.3  # as many heads, where they are needed
