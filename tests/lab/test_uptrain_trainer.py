"""The update: what it minimises, what it changes and what it leaves alone."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, tiny_config
from training import SMALL, arrays_of, parameters, random_blocks, start
from training import settings as training_settings

from jaxinfer.config import LayerConfig
from jaxinfer.core import ConfigError
from jaxinfer.lab import selection
from jaxinfer.lab.loss import Original, losses, text_losses
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.trainer import (
    Figures,
    TrainingError,
    batch_of,
    learning_rates,
    refuse_no_numbers,
)
from jaxinfer.model.weights import parameters as named_parameters

BIASED = dataclasses.replace(TINY, qkv_bias=True, qk_norm=True, layers=(LayerConfig(1),))
F32 = jnp.dtype(jnp.float32)

pytestmark = pytest.mark.usefixtures("compile_cache")


def direct_losses(config, states, tokens, counted, temperature):
    """As one reads it: all logits at once."""
    logits = []
    for graph, state in states:
        model = nnx.merge(graph, state)
        hidden = model.dense(tokens[:, :-1])[0]
        logits.append(model.logits(hidden.reshape(-1, config.hidden_size)))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), tokens[:, 1:].reshape(-1, 1), axis=1)[:, 0]
    wanted, got = (jax.nn.softmax(x / temperature) for x in (logits[1], logits[0]))
    divergence = jnp.sum(wanted * jnp.log(wanted / got), axis=1)
    weight = counted.reshape(-1)
    return -jnp.sum(chosen * weight), jnp.sum(divergence * weight), weight.sum()


@pytest.mark.parametrize(
    "config", [SMALL, tiny_config(num_layers=1, tie_word_embeddings=True)], ids=["head", "tied"]
)
@pytest.mark.parametrize("rows", [1, 5, 99])
def test_a_loss_in_chunks_is_the_loss_at_once(config, rows: int) -> None:
    blocks = random_blocks(3)
    tokens, counted = jnp.asarray(blocks.tokens), jnp.asarray(blocks.counted)
    graph, state = parameters(config)
    _, other = parameters(config, seed=1)
    expected = direct_losses(config, [(graph, state), (graph, other)], tokens, counted, 2.0)

    def found(state):
        model, teacher = nnx.merge(graph, state), nnx.merge(graph, other)
        original = Original(teacher.output(), teacher.dense(tokens[:, :-1])[0], 2.0)
        return losses(
            model.output(), model.dense(tokens[:, :-1])[0], tokens[:, 1:], counted, dtype=F32,
            original=original, chunk_bytes=rows * 4 * config.vocab_size * len(tokens),
        )  # fmt: skip

    np.testing.assert_allclose(found(state), expected, rtol=2e-5)
    if rows == 5:
        chunked = jax.grad(lambda s: found(s).cross_entropy + found(s).divergence)(state)
        plain = jax.grad(
            lambda s: sum(direct_losses(config, [(graph, s), (graph, other)], tokens, counted, 2.0)[:2])
        )(state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), chunked, plain)


def test_several_batches_are_one_large_one() -> None:
    blocks = random_blocks(6)
    numbers = np.asarray([5, 0, 1, 2, 3, 4])  # the one that is not full comes first: means of means differ
    results = {}
    for batch, accumulate in ((6, 1), (2, 3), (1, 6)):
        chosen = training_settings(batch=batch, accumulate=accumulate, clip=0)
        trainer, state, frozen = start(chosen)
        state, figures = trainer.step(state, frozen, 0, *batch_of(blocks, numbers, chosen))
        results[batch] = arrays_of(state), [float(x) for x in figures]
    for batch in (2, 1):
        np.testing.assert_allclose(results[batch][1], results[6][1], rtol=1e-5)
        for name, array in results[6][0].items():
            # the first update of Adam is the sign of the gradient, nearly: where that is 0 but for rounding,
            # the sign is anybody's, so the greatest part must agree and not all
            close = np.isclose(results[batch][0][name], array, rtol=1e-4, atol=1e-6)
            assert close.mean() > 0.995, name


@pytest.mark.parametrize("train", ["kv", "attention", "all"])
def test_frozen_rows_stay_and_all_others_move(train) -> None:
    """Also where weight decay would move everything."""
    chosen = training_settings(train=train, weight_decay=0.5, learning_rate=1e-2)
    trainer, state, frozen = start(chosen, BIASED)
    _, before = parameters(BIASED)
    blocks = random_blocks(8)
    for step in range(2):
        state, _ = trainer.step(state, frozen, step, *batch_of(blocks, np.arange(4), chosen))
    template = jax.eval_shape(lambda x: x, before)
    old, new = (dict(nnx.to_flat_state(s)) for s in (before, selection.join(template, state.trained, frozen)))
    queries = BIASED.num_heads * BIASED.head_dim
    for parameter in named_parameters(BIASED):
        a, b = (np.asarray(x[parameter.path][...]) for x in (old, new))
        moved = a != b
        if train == "all":
            first = 0
        elif "qkv" in parameter.path:
            first = queries if train == "kv" else 0
        else:
            first = 0 if train == "attention" and "attention" in parameter.path else len(a)
        assert not moved[:first].any(), parameter.path
        if "embedding" not in parameter.path and first < len(a):  # tokens that no text has stay, but decay
            assert moved[first:].mean() > 0.99, parameter.path
    # and the optimiser holds nothing of what is frozen
    count = selection.count(state.trained)
    moments = sum(x.size for x in jax.tree.leaves(state.optimizer) if x.ndim)
    assert moments == 2 * count


def test_norms_and_biases_do_not_decay() -> None:
    """Without gradients: all targets are left out."""
    chosen = training_settings(weight_decay=0.1, learning_rate=1e-2)
    trainer, state, frozen = start(chosen, BIASED)
    before = arrays_of(state)
    tokens, counted = batch_of(random_blocks(4), np.arange(4), chosen)
    state, figures = trainer.step(state, frozen, 0, tokens, np.zeros_like(counted))
    assert float(figures.gradient_norm) == 0
    for name, array in arrays_of(state).items():
        if array.ndim > 1:
            np.testing.assert_allclose(array, before[name] * (1 - 1e-2 * 0.1), rtol=1e-5)
        else:
            np.testing.assert_array_equal(array, before[name])


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(0, 60), st.floats(0, 1))
def test_the_rate_rises_to_the_highest_and_falls_to_its_share(steps: int, warmup: int, share: float) -> None:
    warmup = min(warmup, steps)
    rates = learning_rates(
        training_settings(steps=steps, warmup=warmup, learning_rate=0.5, final_share=share)
    )
    for step in range(steps):
        if step < warmup:
            expected = 0.5 * (step + 1) / warmup
        else:
            progress = (step - warmup) / max(1, steps - 1 - warmup)
            expected = 0.5 * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))
        assert float(rates(step)) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_the_rate_that_is_told_is_the_rate_that_is_used() -> None:
    """Weight decay alone moves, by the rate of its update."""
    chosen = training_settings(steps=6, warmup=2, weight_decay=1.0, learning_rate=1e-2)
    trainer, state, frozen = start(chosen)
    tokens, counted = batch_of(random_blocks(4), np.arange(4), chosen)
    for step in range(6):
        before = arrays_of(state)["norm.weight"], arrays_of(state)["head.weight"]
        state, figures = trainer.step(state, frozen, step, tokens, np.zeros_like(counted))
        ratio = arrays_of(state)["head.weight"] / before[1]
        assert 1 - float(np.median(ratio)) == pytest.approx(float(figures.learning_rate), rel=1e-3)


def test_clipping_bounds_the_norm_of_all_gradients() -> None:
    """To Adam's first moment, which is a tenth of the first gradient."""
    blocks = random_blocks(4)
    for clip in (0.0, 0.25):
        chosen = training_settings(clip=clip)
        trainer, state, frozen = start(chosen)
        state, figures = trainer.step(state, frozen, 0, *batch_of(blocks, np.arange(4), chosen))
        leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
        moments = [x for path, x in leaves if ".mu[" in jax.tree_util.keystr(path)]
        norm = 10 * float(jnp.sqrt(sum(jnp.vdot(x, x) for x in moments)))
        assert float(figures.gradient_norm) > 0.25
        assert norm == pytest.approx(clip or float(figures.gradient_norm), rel=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_model_has_nothing_to_learn_from_itself(temperature: float) -> None:
    chosen = training_settings(distill="itself", distill_weight=1.0, temperature=temperature, clip=0)
    trainer, state, frozen = start(chosen, original=parameters())
    tokens, counted = batch_of(random_blocks(4), np.arange(4), chosen)
    state, figures = trainer.step(state, frozen, 0, tokens, counted)
    assert abs(float(figures.divergence)) < 1e-6
    assert float(figures.gradient_norm) < 1e-4
    assert float(figures.cross_entropy) > 1  # which has no share in the loss here


def test_a_model_comes_nearer_to_its_original() -> None:
    chosen = training_settings(steps=30, distill="other", distill_weight=1.0, temperature=2.0)
    original = parameters(seed=1)
    trainer, state, frozen = start(chosen, original=original)
    batch = batch_of(random_blocks(4), np.arange(4), chosen)
    found = []
    for step in range(30):
        state, figures = trainer.step(state, frozen, step, *batch)
        found.append(float(figures.divergence))
        assert float(figures.loss) == pytest.approx(4 * found[-1], rel=1e-5)
    assert found[-1] < 0.5 * found[0]


def test_the_loss_is_a_mixture() -> None:
    chosen = training_settings(distill="other", distill_weight=0.25, temperature=2.0)
    trainer, state, frozen = start(chosen, original=parameters(seed=1))
    _, figures = trainer.step(state, frozen, 0, *batch_of(random_blocks(4), np.arange(4), chosen))
    expected = 0.75 * float(figures.cross_entropy) + 0.25 * 4 * float(figures.divergence)
    assert float(figures.loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"dtype": "bf16"}, {"remat": True}, {"train": "attention"}], ids=str)
def test_texts_are_learnt(changes: dict) -> None:
    chosen = training_settings(steps=40, weight_decay=0.0, learning_rate=1e-2, **changes)
    trainer, state, frozen = start(chosen)
    blocks = random_blocks(4)
    before = trainer.evaluate(state, frozen, blocks)
    for step in range(40):
        state, figures = trainer.step(state, frozen, step, *batch_of(blocks, np.arange(4), chosen))
        if step == 0:
            assert float(figures.loss) == pytest.approx(before, rel=1e-3)  # bf16 adds in another order
    assert trainer.evaluate(state, frozen, blocks) < 0.5 * before
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.trained))


def test_remat_changes_nothing_but_memory() -> None:
    blocks, results = random_blocks(4), []
    for remat in (False, True):
        chosen = training_settings(remat=remat)
        trainer, state, frozen = start(chosen)
        _, figures = trainer.step(state, frozen, 0, *batch_of(blocks, np.arange(4), chosen))
        results.append([float(x) for x in figures])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_held_out_loss_counts_each_target_once() -> None:
    """However the blocks fall into batches, the last of which is not full."""
    blocks = random_blocks(5)
    graph, state = parameters()
    expected = text_losses(graph, state, jnp.asarray(blocks.tokens), jnp.asarray(blocks.counted), dtype=F32)
    for batch in (1, 2, 4, 5):
        trainer, begun, frozen = start(training_settings(batch=batch))
        found = trainer.evaluate(begun, frozen, blocks)
        assert found == pytest.approx(float(expected.cross_entropy) / blocks.num_targets, rel=1e-5)


def test_no_numbers_stop_training_by_name() -> None:
    good = Figures(*map(jnp.asarray, (1.0, 1.0, 0.0, 2.0, 1e-3)))
    refuse_no_numbers(7, good, "")
    for field, value in (("loss", math.nan), ("gradient_norm", math.inf)):
        with pytest.raises(TrainingError, match=r"step 7: .*(nan|inf).*learning_rate.*kept there"):
            refuse_no_numbers(7, good._replace(**{field: jnp.asarray(value)}), "kept there")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "one of steps and tokens"),
        ({"tokens": 5}, "one of steps and tokens"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"batch": True}, "batch must be 1 or more, got True"),
        ({"accumulate": -1}, "accumulate must be 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
        ({"final_share": 1.5}, "final_share must be 0 or more, at most 1"),
        ({"beta2": 1.0}, "beta2 must be below 1"),
        ({"warmup": 11}, "warmup must be 0 to 10"),
        ({"dtype": "float16"}, "dtype must be one of f32, bf16"),
        ({"train": "mlp"}, "train must be one of all, kv, attention"),
        ({"temperature": 2.0}, "temperature 2.0 is of a distillation"),
        ({"distill_weight": 0.1}, "distill_weight 0.1 is of a distillation"),
        ({"distill": "x", "temperature": 0.0}, "temperature must be above 0"),
        ({"eval_every": 3}, "eval_every 3 is of held-out texts"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_settings_that_cannot_be_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training_settings(**changes)


def test_tokens_are_rounded_up_to_steps() -> None:
    assert Settings(tokens=1001, batch=2, accumulate=5, sequence_length=10).num_steps == 11
