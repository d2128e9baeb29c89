"""One update after the other: losses, gradients of batches added up, AdamW; on one device or many."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxinfer.core import JaxInferError
from jaxinfer.lab.data import Blocks
from jaxinfer.lab.loss import Losses, text_losses
from jaxinfer.lab.selection import Arrays, join
from jaxinfer.lab.settings import Settings
from jaxinfer.model import mesh as devices

DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


class TrainingError(JaxInferError, RuntimeError):
    """Training cannot go on: its numbers are no numbers any more."""


class TrainState(NamedTuple):
    """All that an update changes: the trained rows, in float32, and what the optimiser knows of them."""

    trained: Arrays
    optimizer: Any


class Figures(NamedTuple):
    """Of one update, float32 scalars: losses are means over its targets in nats, before the update;
    `gradient_norm` is that before clipping."""

    loss: jax.Array
    cross_entropy: jax.Array
    divergence: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array


def learning_rates(settings: Settings) -> optax.Schedule:
    """The rate of update i, from 0 on: (i + 1) / warmup of the highest until i = warmup - 1, then down a half
    cosine from the highest, which ends at `final_share` of it with the last update."""
    warmup, highest = settings.warmup_steps, settings.learning_rate
    falling = optax.cosine_decay_schedule(
        highest, max(1, settings.num_steps - 1 - warmup), alpha=settings.final_share
    )
    if warmup == 0:
        return falling
    rising = optax.linear_schedule(highest / warmup, highest, max(1, warmup - 1))
    if warmup == 1:
        rising = optax.constant_schedule(highest)
    return optax.join_schedules([rising, falling], [warmup])


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW on gradients whose norm together is at most `clip`; only matrices decay."""
    adamw = optax.adamw(
        learning_rates(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        weight_decay=settings.weight_decay,
        mask=lambda arrays: jax.tree.map(lambda array: array.ndim > 1, arrays),
    )
    return adamw if settings.clip == 0 else optax.chain(optax.clip_by_global_norm(settings.clip), adamw)


def placement(settings: Settings, mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Where parameters and moments of a shape lie."""
    if settings.shard_params:
        return devices.split_where_possible(mesh, shape)
    return devices.replicated(mesh)


class Trainer:
    """The compiled update and evaluation of one model, and where on `mesh` everything lies.

    `graph` and `template` are the structure of a row-major model (`abstract_model`). `original` is the
    structure and the parameters of the model to learn from, in the type that products have.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        template: nnx.State,
        settings: Settings,
        mesh: Mesh,
        original: tuple[nnx.GraphDef, nnx.State] | None = None,
    ):
        assert (original is None) == (settings.distill is None), settings
        self.settings, self.mesh = settings, mesh
        self._graph, self._template = graph, template
        self._original_graph, self._original = (None, None) if original is None else original
        self._optimizer, self._rates = optimizer(settings), learning_rates(settings)
        self._evaluate = jax.jit(self._losses)
        self._step: Any = None

    def shapes(self, trained: Arrays) -> TrainState:
        """The state of training these rows (arrays or their shapes): shapes, types and places."""
        state = jax.eval_shape(lambda rows: TrainState(rows, self._optimizer.init(rows)), trained)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=placement(self.settings, self.mesh, x.shape)
            ),
            state,
        )

    def begin(self, trained: Arrays) -> TrainState:
        """The state before the first update, which takes copies of `trained`."""
        places = jax.tree.map(lambda x: x.sharding, self.shapes(trained))
        begin = jax.jit(
            lambda rows: TrainState(jax.tree.map(jnp.copy, rows), self._optimizer.init(rows)),
            out_shardings=places,
        )
        return begin(trained)

    def place(self, frozen: Arrays) -> Arrays:
        """The frozen rows, in the type that products have, where they belong."""
        dtype = DTYPES[self.settings.dtype]
        return {
            name: jax.device_put(x.astype(dtype), placement(self.settings, self.mesh, x.shape))
            for name, x in frozen.items()
        }

    def step(
        self, state: TrainState, frozen: Arrays, step: int, tokens: np.ndarray, counted: np.ndarray
    ) -> tuple[TrainState, Figures]:
        """Update number `step`, from 0 on, of tokens int32 [accumulate, batch, S + 1] and counted bool
        [accumulate, batch, S]. Uses `state` up. Waits for nothing."""
        if self._step is None:
            places = jax.tree.map(lambda x: x.sharding, self.shapes(state.trained))
            self._step = jax.jit(
                self._update, donate_argnums=0, out_shardings=(places, devices.replicated(self.mesh))
            )
        batch = [jax.device_put(x, devices.split(self.mesh, 1)) for x in (tokens, counted)]
        return self._step(state, frozen, self._original, np.int32(step), *batch)

    def evaluate(self, state: TrainState, frozen: Arrays, blocks: Blocks) -> float:
        """Mean cross entropy in nats over the counted targets of blocks."""
        size, total, count = self.settings.batch, 0.0, 0.0
        for start in range(0, len(blocks), size):
            numbers = np.arange(start, start + size)
            tokens, counted = blocks.take(np.where(numbers < len(blocks), numbers, -1))
            batch = [jax.device_put(x, devices.split(self.mesh, 0)) for x in (tokens, counted)]
            found = self._evaluate(state.trained, frozen, None, *batch)
            total, count = total + float(found.cross_entropy), count + float(found.targets)
        return total / count

    def _losses(
        self,
        trained: Arrays,
        frozen: Arrays,
        original: nnx.State | None,
        tokens: jax.Array,
        counted: jax.Array,
    ) -> Losses:
        teaching = None
        if original is not None and self._original_graph is not None:
            teaching = self._original_graph, original, self.settings.temperature
        return text_losses(
            self._graph,
            join(self._template, trained, frozen),
            tokens,
            counted,
            dtype=DTYPES[self.settings.dtype],
            remat=self.settings.remat,
            original=teaching,
        )

    def _weighed(self, found: Losses) -> jax.Array:
        """(1 - w) · cross entropy + w · t² · divergence, whose gradients shrink by t² (1503.02531)."""
        if self.settings.distill is None:
            return found.cross_entropy
        share, scale = self.settings.distill_weight, self.settings.temperature**2
        return (1 - share) * found.cross_entropy + share * scale * found.divergence

    def _gradients(
        self,
        trained: Arrays,
        frozen: Arrays,
        original: nnx.State | None,
        tokens: jax.Array,
        counted: jax.Array,
    ) -> tuple[Losses, Arrays]:
        """Sums over the targets of all batches: a step of several batches is a step of one large one."""

        def weighed(trained: Arrays, tokens: jax.Array, counted: jax.Array) -> tuple[jax.Array, Losses]:
            found = self._losses(trained, frozen, original, tokens, counted)
            return self._weighed(found), found

        def one(tokens: jax.Array, counted: jax.Array) -> tuple[Losses, Arrays]:
            gradients, found = jax.grad(weighed, has_aux=True)(trained, tokens, counted)
            return found, gradients

        if tokens.shape[0] == 1:
            return one(tokens[0], counted[0])
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(one, tokens[0], counted[0]))

        def add(sums, batch):
            return jax.tree.map(jnp.add, sums, one(*batch)), None

        return jax.lax.scan(add, zeros, (tokens, counted))[0]

    def _update(
        self,
        state: TrainState,
        frozen: Arrays,
        original: nnx.State | None,
        step: jax.Array,
        tokens: jax.Array,
        counted: jax.Array,
    ) -> tuple[TrainState, Figures]:
        sums, gradients = self._gradients(state.trained, frozen, original, tokens, counted)
        count = jnp.maximum(sums.targets, 1)
        mean = Losses(*(x / count for x in sums))
        gradients = jax.tree.map(lambda g: g / count, gradients)
        changes, known = self._optimizer.update(gradients, state.optimizer, state.trained)
        trained: Any = optax.apply_updates(state.trained, changes)
        figures = Figures(
            self._weighed(mean),
            mean.cross_entropy,
            mean.divergence,
            jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients))),
            jnp.asarray(self._rates(step), jnp.float32),
        )
        return TrainState(trained, known), figures


def batch_of(blocks: Blocks, numbers: np.ndarray, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """tokens [accumulate, batch, S + 1] and counted [accumulate, batch, S] of the blocks of one update."""
    return blocks.take(numbers.reshape(settings.accumulate, settings.batch))


def refuse_no_numbers(step: int, figures: Figures, kept: str) -> None:
    """Raise TrainingError unless loss and gradients of update `step` (from 1 on) are finite."""
    values = {name: float(value) for name, value in figures._asdict().items()}
    if all(map(np.isfinite, values.values())):
        return
    raise TrainingError(
        f"step {step}: loss {values['loss']:g}, norm of the gradients {values['gradient_norm']:g}, at a "
        f"learning rate of {values['learning_rate']:g}; training stops. Lower learning_rate, or lengthen "
        f"warmup. {kept}"
    )
