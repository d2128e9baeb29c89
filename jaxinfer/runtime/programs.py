"""The compiled programs of one model: which there can be, which there are, and why each was made."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import ModelConfig, SampleShape, StepShape, most_emitting, sample_ladder
from jaxinfer.model.kv import KVState
from jaxinfer.runtime import draws, inputs, steps
from jaxinfer.runtime.trace import ProgramRecord, compiles, release_freed_memory

logger = logging.getLogger(__name__)


class Program:
    """A compiled program and its line in the manifest, which counts the calls."""

    __slots__ = ("_compiled", "record")

    def __init__(self, compiled: jax.stages.Compiled, record: ProgramRecord):
        self._compiled, self.record = compiled, record

    def __call__(self, *args: Any) -> Any:
        self.record.calls += 1
        return self._compiled(*args)


class Source(NamedTuple):
    """What a program is compiled from."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


Bucket = StepShape | SampleShape | str
"""What names a program: a shape of the two ladders, COPY or SCORE."""
COPY, SCORE = "copy", "score"


class Programs:
    """Every program that a runner calls, compiled when asked for and kept.

    graph, state: the model as `nnx.split` gives it; kv: its KVState, as shapes. With `strict`, a program that
    is missing once `warm` is set is an error. `most_changes`: changed logits that one row can have.
    """

    def __init__(
        self,
        config: ModelConfig,
        graph: nnx.GraphDef,
        state: nnx.State,
        kv: KVState,
        ladder: tuple[StepShape, ...],
        *,
        table_width: int,
        platform: str,
        most_changes: int,
        sampled_vocab: int | None = None,
        strict: bool = False,
    ):
        self.ladder = ladder
        self.most_emitting = most_emitting(ladder)
        self.most_tokens = max(shape.tokens for shape in ladder)
        self.samples = sample_ladder(ladder, config.vocab_size, most_changes)
        self.planned: tuple[Bucket, ...] = (*ladder, *self.samples, SCORE, COPY)
        self.manifest: list[ProgramRecord] = []
        self.records: dict[Bucket, ProgramRecord] = {}  # the manifest by bucket
        self.compiled: dict[Bucket, Program] = {}
        self.warm = False
        self._graph, self._state, self._kv = graph, state, kv
        self._output_graph, self._output_state = nnx.split(nnx.merge(graph, state).output())
        self.leaves = jax.tree.leaves(state)  # what a program takes: see steps.compile_program
        self.output_leaves = jax.tree.leaves(self._output_state)
        self._table_width, self._platform = table_width, platform
        self._sampled_vocab, self._strict = sampled_vocab, strict
        self._mask_words = draws.mask_words(config.vocab_size)
        self._hidden_size = config.hidden_size
        self._expected = compiles.count
        self._own: tuple[int, int] | None = None  # both counts as they were before what is compiled now

    def __getitem__(self, bucket: Bucket) -> Program:
        return self.compiled[bucket]

    def make(self, bucket: Bucket, reason: str) -> Program:
        """Compile a program, unless it is there. `reason` goes into the manifest.

        Raises RuntimeError when `strict` forbids it.
        """
        if bucket in self.compiled:
            return self.compiled[bucket]
        kind = _kind(bucket)
        if self.warm and self._strict:
            raise RuntimeError(
                f"the {kind} program {bucket} is wanted ({reason}) and was not compiled at warm-up; "
                "strict_compiles forbids to compile it now"
            )
        start = time.perf_counter()
        with nullcontext() if self.warm else self.others_compile():  # once warm, any is one too many
            source = self.source(bucket)
            program = steps.compile_program(
                kind, source.function, source.arguments, self._platform, donate=source.donate
            )
        seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        assert memory is not None, f"XLA gives no memory analysis on {self._platform}"
        record = ProgramRecord(
            kind, str(bucket), reason, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes
        )
        self.compiled[bucket] = Program(program, record)
        self.manifest.append(record)
        self.records[bucket] = record
        release_freed_memory()
        logger.debug("compiled %s %s in %.2f s (%s)", kind, bucket, seconds, reason)
        return self.compiled[bucket]

    @property
    def compiles_after_warmup(self) -> int:
        """Compiles of the process since a full warm-up; without one, those that were not a bucket's own."""
        count, expected = self._own or (compiles.count, self._expected)
        return count - expected

    @contextmanager
    def others_compile(self) -> Generator[None]:
        """What is compiled meanwhile is not one too many; nor does it look so from another thread."""
        before = compiles.count
        self._own = (before, self._expected)
        try:
            yield
        finally:
            self._expected += compiles.count - before
            self._own = None

    def source(self, bucket: Bucket) -> Source:
        """What `make` compiles for a bucket."""

        def integers(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        def hidden(rows: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, self._hidden_size), self.leaves[0].dtype)

        if isinstance(bucket, StepShape):
            function = functools.partial(
                steps.forward, self._graph, bucket, self._table_width, self.most_emitting, self.most_tokens
            )
            has_states = bool(self._kv.states)
            size = inputs.layout(bucket, self._table_width, self.most_emitting, has_states).size
            arguments = (self._state, self._kv, integers(size), integers(self.most_emitting))
            return Source(function, arguments, donate=(1,))
        if isinstance(bucket, SampleShape):
            function = functools.partial(steps.choose, self._output_graph, bucket, self._sampled_vocab)
            mask = integers(bucket.rows, self._mask_words)
            size = draws.layout(bucket).size
            return Source(function, (self._output_state, hidden(self.most_emitting), integers(size), mask))
        if bucket == SCORE:
            function = functools.partial(steps.score, self._output_graph, self.most_tokens)
            size = steps.score_layout(self.most_tokens).size
            return Source(function, (self._output_state, hidden(self.most_tokens), integers(size)))
        assert bucket == COPY, f"no program is called {bucket!r}"
        return Source(steps.copy, (self._kv, integers(self.most_emitting, 2)), donate=(0,))


def _kind(bucket: Bucket) -> str:
    if isinstance(bucket, str):
        return bucket
    return "forward" if isinstance(bucket, StepShape) else "sample"


def _padding(record: ProgramRecord) -> str:
    """The share of a forward program's tokens that was padding."""
    if record.kind != "forward" or not record.calls:
        return "-"
    size = int(record.bucket.removeprefix("T").split("/")[0])
    return f"{1 - record.tokens / (size * record.calls):.0%}"


def manifest_table(manifest: list[ProgramRecord]) -> list[tuple[str, ...]]:
    """The manifest as rows of text under a heading, for a log or a terminal."""
    heading = ("kind", "bucket", "reason", "compile s", "temp MB", "aliased MB", "calls", "padding")
    return [
        heading,
        *(
            (
                r.kind, r.bucket, r.reason, f"{r.compile_s:.2f}", f"{r.temp_bytes / 1e6:.1f}",
                f"{r.aliased_bytes / 1e6:.1f}", str(r.calls), _padding(r),
            )
            for r in manifest
        ),
    ]  # fmt: skip
