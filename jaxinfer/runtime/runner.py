"""The engine's device: holds parameters and KV state, turns plans into results."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxinfer.config import ModelConfig, StepShape
from jaxinfer.core import StepPlan, StepResult
from jaxinfer.model.kv import KVState, create_kv
from jaxinfer.progress import phase
from jaxinfer.runtime import inputs, steps
from jaxinfer.runtime.trace import ProgramRecord, compiles, release_freed_memory

logger = logging.getLogger(__name__)


class Pending(NamedTuple):
    """A step in flight: its plan, the device array it will fill, the row of each slice."""

    plan: StepPlan
    output: jax.Array
    rows: list[int]


class JaxRunner:
    """Implements `core.Runner` with one compiled program per bucket of `ladder`.

    graph, state: the model as `nnx.split` gives it, split once. A program is compiled at `warm_up`, or on
    the first plan that needs its bucket; nothing else is ever compiled. Only ids below `sampled_vocab` (None:
    the whole vocabulary) are ever chosen.
    """

    def __init__(
        self,
        config: ModelConfig,
        graph: nnx.GraphDef,
        state: Any,
        ladder: tuple[StepShape, ...],
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        kv_dtype: Any,
        platform: str,
        progress: bool = False,
        sampled_vocab: int | None = None,
    ):
        self.config = config
        self.ladder = ladder
        self.page_size, self.num_pages = page_size, num_pages
        self.table_width = -(-max_model_len // page_size)
        self.kv_dtype, self.platform = kv_dtype, platform
        self._progress = progress
        self._sampled_vocab = sampled_vocab
        self._graph, self._state = graph, state
        self._leaves = jax.tree.leaves(state)  # what a program takes: see compile_step
        self._programs: dict[StepShape, jax.stages.Compiled] = {}
        self.manifest: list[ProgramRecord] = []
        self._tokens_run = self._tokens_padded = 0
        self.kv: KVState | None = self._new_kv()
        self._kv_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.kv)
        self._kv_bytes = sum(x.nbytes for x in jax.tree.leaves(self.kv))
        self._warm = False
        self._compiles_expected = compiles.count

    def _new_kv(self) -> KVState:
        return jax.block_until_ready(create_kv(self.config, self.num_pages, self.page_size, self.kv_dtype))

    # --------------------------------------------------------------------------------- programs

    def warm_up(self) -> None:
        """Compile every bucket now."""
        with phase("compiling", total=len(self.ladder), wanted=self._progress) as advance:
            for shape in self.ladder:
                self._program(shape, "warm-up")
                advance(1)
        self._warm = True

    def _program(self, shape: StepShape, reason: str) -> None:
        if shape in self._programs:
            return
        before, start = compiles.count, time.perf_counter()
        program = steps.compile_step(
            self._graph, shape, self.table_width, self._state, self._kv_shapes, self.platform,
            self._sampled_vocab,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        assert memory is not None, f"XLA gives no memory analysis on {self.platform}"
        record = ProgramRecord(
            str(shape), reason, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes
        )
        self._programs[shape] = program
        self.manifest.append(record)
        if not self._warm:  # after a full warm-up even a bucket's own compile is one too many
            self._compiles_expected += compiles.count - before
        release_freed_memory()
        logger.debug("compiled %s in %.2f s (%s)", shape, seconds, reason)

    # ------------------------------------------------------------------------------------ steps

    def dispatch(self, plan: StepPlan) -> Pending:
        """Pack the plan, start the step, and return without waiting for it."""
        try:
            shape = inputs.choose_shape(plan, self.ladder)
            if shape not in self._programs:
                with phase(f"compiling {shape}", wanted=self._progress):
                    self._program(shape, f"first used at step {plan.step}")
            program = self._programs[shape]
            buffer, rows = inputs.pack(
                plan, shape, table_width=self.table_width, page_size=self.page_size,
                num_pages=self.num_pages, vocab_size=self.config.vocab_size, window=self.config.window,
            )  # fmt: skip
            sent = jax.device_put(buffer)
            if self.kv is None:
                self.kv = self._new_kv()
        except Exception as error:
            error.kv_lost = self.kv is None  # type: ignore[attr-defined]  # see core.Runner
            raise
        self._tokens_run += plan.num_tokens
        self._tokens_padded += shape.tokens
        try:
            output, self.kv = program(self._leaves, self.kv, sent)
        except Exception:
            self._recover()
            raise
        return Pending(plan, output, rows)

    def fetch(self, pending: Pending) -> StepResult:
        """Wait for a step and bring back what it sampled."""
        try:
            packed = np.asarray(pending.output)
        except Exception:
            self._recover()
            raise
        slices = pending.plan.slices
        emitting = [i for i, piece in enumerate(slices) if piece.emit]
        read = steps.read_outputs(
            packed,
            [pending.rows[i] for i in emitting],
            [slices[i].sampling.logprobs or 0 for i in emitting],
        )
        by_slice = dict(zip(emitting, read, strict=True))
        return StepResult(tuple(by_slice.get(i) for i in range(len(slices))))

    def _recover(self) -> None:
        """The donated pages of a failed step are gone: start from an empty pool. The old one goes first,
        since two do not fit, and if there is no room even so the next step tries again."""
        logger.warning("a step failed on the device; the KV pool is made anew")
        self.kv = None
        try:
            self.kv = self._new_kv()
        except Exception:
            logger.exception("there is no room for a new KV pool yet")

    # ------------------------------------------------------------------------------------ state

    def stats(self) -> dict[str, Any]:
        """programs, compiles_after_warmup, padding_waste (share of run tokens that were padding), ...

        `compiles_after_warmup` counts the process's compiles since a full warm-up; with warmup "lazy" those
        that were not a bucket's first use.
        """
        waste = 1.0 - self._tokens_run / self._tokens_padded if self._tokens_padded else 0.0
        return {
            "programs": len(self._programs),
            "programs_in_ladder": len(self.ladder),
            "compile_s": sum(record.compile_s for record in self.manifest),
            "compiles_after_warmup": compiles.count - self._compiles_expected,
            "padding_waste": waste,
            "kv_bytes": self._kv_bytes,
            "param_bytes": sum(x.nbytes for x in self._leaves),
        }
