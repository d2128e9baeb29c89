"""The engine's device: holds parameters and KV state, turns plans into results."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxinfer.config import ModelConfig, StepShape, choose_step_shape, is_invariant, most_emitting
from jaxinfer.core import Draw, Sampled, StepPlan, StepResult
from jaxinfer.core.sampling import MAX_BIASES, MAX_STOP_TOKEN_IDS
from jaxinfer.model.kv import KVState, create_kv
from jaxinfer.planner import ModelCosts
from jaxinfer.progress import phase
from jaxinfer.runtime import draws as step_draws
from jaxinfer.runtime import inputs, steps
from jaxinfer.runtime.programs import COPY, SCORE, Bucket, Program, Programs, manifest_table
from jaxinfer.runtime.roofline import Machine, StepCost, costs_of, measure_machine

logger = logging.getLogger(__name__)


MAX_OTHER_CHANGES = MAX_BIASES + MAX_STOP_TOKEN_IDS + 64
"""Changed logits of a row besides the tokens of its text: biases, stop ids that are held back, end ids."""


class Pending:
    """A step in flight: its plan and bucket, the device arrays that it fills, and what to read from them.

    emitted [R, D]; output int32 [B, COLUMNS] once `sample` has queued it; scores as steps.score gives them.
    `rows` and `wanted` belong to `output`: the emitting slices with a Draw, and the alternatives each wants.
    """

    __slots__ = ("emitted", "generation", "output", "plan", "rows", "scores", "shape", "wanted")

    def __init__(
        self,
        plan: StepPlan,
        shape: StepShape,
        emitted: jax.Array,
        scores: jax.Array | None,
        generation: int,
    ):
        self.plan, self.shape, self.generation = plan, shape, generation
        self.emitted, self.scores = emitted, scores
        self.output: jax.Array | None = None
        self.rows: list[int] = []
        self.wanted: list[steps.Wanted] = []


class JaxRunner:
    """Implements `core.Runner` with compiled programs: a forward pass for each bucket of `ladder`, samplers
    for a few numbers of rows, one to score prompts, one to copy pages.

    graph, state: the model as `nnx.split` gives it, split once. A program is compiled at `warm_up`, or when
    first needed; nothing else is ever compiled. With `strict`, what `warm_up` has not compiled is an error.
    `num_states` sequences may have a state in layers of linear attention (None: as many as a step runs).
    Only ids below `sampled_vocab` (None: the whole vocabulary) are ever chosen. An `invariant_ladder` makes
    ids and logprobs independent of the batch, the chunks and the cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        graph: nnx.GraphDef,
        state: nnx.State,
        ladder: tuple[StepShape, ...],
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        kv_dtype: Any,
        platform: str,
        progress: bool = False,
        sampled_vocab: int | None = None,
        strict: bool = False,
        num_states: int | None = None,
    ):
        self.config = config
        self.ladder = ladder
        self.page_size, self.num_pages = page_size, num_pages
        self.table_width = -(-max_model_len // page_size)
        span = config.page_span
        if span is not None:
            assert span.page_size == page_size, f"{span} over pages of {page_size} tokens"
            self.table_width = min(self.table_width, span.most_pages)
        assert all(shape.cut == (span and page_size) for shape in ladder), f"{span} and the ladder {ladder}"
        self.num_states = 0
        if config.linear_layers:
            assert not is_invariant(ladder), f"{config.linear_layers} add up chunk by chunk"
            self.num_states = most_emitting(ladder) if num_states is None else num_states
        self.kv_dtype, self.platform = kv_dtype, platform
        self._progress = progress
        self._graph, self._state = graph, state
        self.kv: KVState | None = self._new_kv()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.kv)
        self._kv_bytes = sum(x.nbytes for x in jax.tree.leaves(self.kv))
        self.programs = Programs(
            config, graph, state, shapes, ladder, table_width=self.table_width, platform=platform,
            most_changes=max_model_len + MAX_OTHER_CHANGES, sampled_vocab=sampled_vocab, strict=strict,
        )  # fmt: skip
        self._most_emitting = self.programs.most_emitting
        self._tokens_run = self._tokens_padded = 0
        assert self.kv is not None
        self._cost = StepCost(costs_of(config, graph, state, self.kv))
        self.machine: Machine | None = None
        # The step dispatched last, and once it is sampled: the row of each sequence, and the tokens by row.
        self._last: Pending | None = None
        self._last_rows: dict[int, int] = {}
        self._last_tokens: jax.Array | None = None
        self._generation = 0  # moves on when sample or fetch fails: the step, and any after it, is void
        self._no_tokens = jax.device_put(np.zeros(self._most_emitting, np.int32))
        words = step_draws.mask_words(config.vocab_size)
        # In place of the masks of a step that has none: nothing is sent.
        self._no_mask = {
            rows: jax.device_put(np.full((rows, words), -1, np.int32))
            for rows in {shape.rows for shape in self.programs.samples}
        }

    @property
    def model(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The model as `nnx.split` gives it: the very arrays that the programs run with."""
        return self._graph, self._state

    def _new_kv(self) -> KVState:
        sizes = self.num_pages, self.page_size, self.kv_dtype, self.num_states
        return jax.block_until_ready(create_kv(self.config, *sizes))

    # --------------------------------------------------------------------------------- programs

    def warm_up(self) -> None:
        """Compile every program now."""
        planned = self.programs.planned
        with phase("compiling", total=len(planned), wanted=self._progress) as advance:
            for bucket in planned:
                self.programs.make(bucket, "warm-up")
                advance(1)
        self.programs.warm = True
        for row in self.manifest_table():
            logger.info("%s", "  ".join(row))

    def _program(self, bucket: Bucket, step: int) -> Program:
        """A program for use in a step."""
        if bucket in self.programs.compiled:
            return self.programs[bucket]
        with phase(f"compiling {bucket}", wanted=self._progress):
            return self.programs.make(bucket, f"first used at step {step}")

    # ------------------------------------------------------------------------------------ steps

    def dispatch(self, plan: StepPlan) -> Pending:
        """Pack the plan, start its copies, its forward pass and its scores; return without waiting.

        When it raises and pages are lost, the step dispatched before can still be fetched: it had run.
        """
        if self.kv is not None and self.kv.is_deleted:
            self.kv = None  # Ctrl-C came between the call that took it and the name of its result
        try:
            shape = choose_step_shape(plan, self.ladder)
            program = self._program(shape, plan.step)
            chained = any(piece.chained for piece in plan.slices)
            buffer, places = inputs.pack(
                plan, shape, table_width=self.table_width, page_size=self.page_size,
                num_pages=self.num_pages, vocab_size=self.config.vocab_size,
                most_emitting=self._most_emitting, num_states=self.num_states,
                window=self.config.window, sinks=self.config.sinks, span=self.config.page_span,
                sampled_rows=None if self._last_tokens is None else self._last_rows,
            )  # fmt: skip
            previous = self._last_tokens if chained and self._last_tokens is not None else self._no_tokens
            sent = jax.device_put(buffer)
            copies = [jax.device_put(pairs) for pairs in self._copy_pairs(plan)]
            copier = self._program(COPY, plan.step) if copies else None
            asked = self._score_buffer(plan, places)
            scorer = self._program(SCORE, plan.step) if asked is not None else None
            asked = None if asked is None else jax.device_put(asked)
            if self.kv is None:
                self.kv = self._new_kv()
        except Exception as error:
            error.kv_lost = self.kv is None  # type: ignore[attr-defined]  # see core.Runner
            raise
        self._tokens_run += plan.num_tokens
        self._tokens_padded += shape.tokens
        try:
            for pairs in copies:
                assert copier is not None
                self.kv = copier(self.kv, pairs)
            emitted, hidden, self.kv = program(self.programs.leaves, self.kv, sent, previous)
            scores = scorer(self.programs.output_leaves, hidden, asked) if scorer is not None else None
        except Exception:
            self._recover()
            raise
        self.programs.records[shape].tokens += plan.num_tokens
        self._cost.add(plan)  # while the device works
        self._last_rows, self._last_tokens = {}, None
        self._last = Pending(plan, shape, emitted, scores, self._generation)
        return self._last

    def sample(self, pending: Pending, draws: Seq[Draw | None]) -> None:
        """Queue the choice of the step's next tokens; return without waiting. The chained tokens of the step
        dispatched next are what the one dispatched last has sampled by then."""
        try:
            self._assert_valid(pending)
            emitting = pending.plan.emitting
            assert len(draws) == len(emitting), f"{len(draws)} Draws for {len(emitting)} emitting slices"
            assert pending.output is None, f"{pending.plan} is sampled twice"
            rows = [row for row, draw in enumerate(draws) if draw is not None]
            if not rows:
                return
            shape = step_draws.choose_shape(draws, self.programs.samples)
            program = self._program(shape, pending.plan.step)
            buffer, mask = step_draws.pack(draws, shape, self.config.vocab_size)
            sent = jax.device_put(buffer)
            masks = self._no_mask[shape.rows] if mask is None else jax.device_put(mask)
        except Exception as error:
            error.kv_lost = False  # type: ignore[attr-defined]
            raise
        try:
            output, tokens = program(self.programs.output_leaves, pending.emitted, sent, masks)
        except Exception:
            self._generation += 1
            self._recover()
            raise
        if pending is self._last:
            self._last_rows = {pending.plan.slices[emitting[row]].uid: row for row in rows}
            self._last_tokens = tokens
        pending.output, pending.rows = output, rows
        asked = [draw.sampling for draw in draws if draw is not None]
        pending.wanted = [tuple(s.logprob_token_ids or ()) or s.logprobs or 0 for s in asked]

    def fetch(self, pending: Pending) -> StepResult:
        """Wait for a step and bring back what it sampled and scored."""
        try:
            self._assert_valid(pending)
        except Exception as error:
            error.kv_lost = False  # type: ignore[attr-defined]
            raise
        packed = scored = None
        try:
            if pending.output is None:
                jax.block_until_ready(pending.emitted)
            else:
                packed = np.asarray(pending.output)
            if pending.scores is not None:
                scored = np.asarray(pending.scores)
        except Exception:
            self._generation += 1
            self._recover()
            raise
        slices = pending.plan.slices
        sampled: list[Sampled | None] = [None] * len(slices)
        if packed is not None:
            emitting = pending.plan.emitting
            read = steps.read_outputs(packed, pending.rows, pending.wanted)
            for row, one in zip(pending.rows, read, strict=True):
                sampled[emitting[row]] = one
        scores: tuple[tuple[Sampled, ...], ...] = ()
        if scored is not None:
            wanted = [piece.scored or 0 for piece in slices for _ in piece.targets]
            every = iter(steps.read_outputs(scored, list(range(len(wanted))), wanted))
            scores = tuple(tuple(next(every) for _ in piece.targets) for piece in slices)
        return StepResult(tuple(sampled), scores)

    def _copy_pairs(self, plan: StepPlan) -> list[np.ndarray]:
        """The plan's copies in groups [R, 2], padded with (0, 0)."""
        if not plan.copies:
            return []
        pairs = np.asarray(plan.copies, np.int32).reshape(-1, 2)
        assert 0 < pairs.min() <= pairs.max() < self.num_pages, (
            f"copied pages {plan.copies} leave 1..{self.num_pages - 1}"
        )
        assert len(set(pairs[:, 1].tolist())) == len(pairs), f"a page is copied to twice: {plan.copies}"
        groups: list[np.ndarray] = []
        written: set[int] = set()
        for start in range(0, len(pairs), self._most_emitting):
            part = pairs[start : start + self._most_emitting]
            # A later group would read what an earlier one has written.
            late = written.intersection(part[:, 0].tolist())
            assert not late, f"pages {late} are copied from after they were copied to: {plan.copies}"
            written.update(part[:, 1].tolist())
            groups.append(np.zeros((self._most_emitting, 2), np.int32))
            groups[-1][: len(part)] = part
        return groups

    def _score_buffer(self, plan: StepPlan, places: list[int]) -> np.ndarray | None:
        """What the score program reads; None when nothing is to be scored."""
        if not any(piece.targets for piece in plan.slices):
            return None
        layout = steps.score_layout(self.programs.most_tokens)
        buffer = np.zeros(layout.size, np.int32)
        view = layout.views(buffer)
        done = 0
        for piece, place in zip(plan.slices, places, strict=True):
            count = len(piece.targets)
            if not count:
                continue
            assert 1 < piece.count >= count, f"{count} targets for a slice of {piece.count} tokens"
            view["place"][done : done + count] = range(place, place + count)
            view["target"][done : done + count] = piece.targets
            view["with_top"][0] |= bool(piece.scored)
            done += count
        view["count"][0] = done
        targets = view["target"]
        assert 0 <= targets.min() <= targets.max() < self.config.vocab_size, "targets leave the vocabulary"
        return buffer

    def _assert_valid(self, pending: Pending) -> None:
        assert pending.generation == self._generation, (
            f"{pending.plan} is void: it has failed, or a step before it has"
        )

    def _recover(self) -> None:
        """The donated pages of a failed step are gone: start from an empty pool. The old one goes first,
        since two do not fit, and if there is no room even so the next step tries again."""
        logger.warning("a step failed on the device; the KV pool is made anew")
        self._last, self._last_rows, self._last_tokens = None, {}, None
        self.kv = None
        try:
            self.kv = self._new_kv()
        except Exception:
            logger.exception("there is no room for a new KV pool yet")

    # ------------------------------------------------------------------------------------ state

    def measure_machine(self) -> None:
        """Find the limits of the device, for `stats`; not amid steps, which would be measured with it. Where
        the device has no room for it they stay unknown, and the log says so."""
        with self.programs.others_compile():
            try:
                self.machine = measure_machine(self.platform, self.programs.leaves[0].dtype)
            except Exception as error:
                logger.warning("the machine could not be measured (%s): no MBU, no MFU", type(error).__name__)

    @property
    def costs(self) -> ModelCosts:
        """What the model's steps move and compute, as it lies in memory."""
        return self._cost.costs

    def manifest_table(self) -> list[tuple[str, ...]]:
        """Every program compiled, as rows of text under a heading."""
        return manifest_table(self.programs.manifest)

    def stats(self) -> dict[str, Any]:
        """programs (compiled), programs_in_manifest (what a full warm-up compiles), compile_s,
        compiles_after_warmup, padding_waste (share of run tokens that were padding), bucket_calls (calls of
        each program, by kind and bucket), kv_bytes, param_bytes; moved_bytes and operations (what the steps
        dispatched had to move and to compute: StepCost), bandwidth and matmul_rate (what the machine can in
        a second; None before `measure_machine`).

        `compiles_after_warmup` counts the process's compiles since a full warm-up; with warmup "lazy" those
        that were not a program's first use.
        """
        waste = 1.0 - self._tokens_run / self._tokens_padded if self._tokens_padded else 0.0
        manifest = self.programs.manifest
        return {
            "programs": len(manifest),
            "programs_in_manifest": len(self.programs.planned),
            "compile_s": sum(record.compile_s for record in manifest),
            "compiles_after_warmup": self.programs.compiles_after_warmup,
            "padding_waste": waste,
            "tokens_run": self._tokens_run,
            "tokens_padded": self._tokens_padded,
            "bucket_calls": {f"{record.kind} {record.bucket}": record.calls for record in manifest},
            "kv_bytes": self._kv_bytes,
            "param_bytes": sum(x.nbytes for x in self.programs.leaves),
            "moved_bytes": self._cost.moved_bytes,
            "operations": self._cost.operations,
            "bandwidth": None if self.machine is None else self.machine.bandwidth,
            "matmul_rate": None if self.machine is None else self.machine.matmul_rate,
        }
