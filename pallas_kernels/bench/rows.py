"""One line of the table: refused with a reason, wrong with its error, or right and then timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention, reference
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.bench.timing import Timing, measure
from pallas_kernels.bench.workload import Inputs, Workload, batch_of, dense, draw
from pallas_kernels.device import Backend, Device
from pallas_kernels.pages import Pages

WORST_ERROR, PEERS_ERROR = 8e-3, 3e-2
"""Of one token's head: |out - reference| / |reference|, both as vectors. Rounding queries' products, weights
and outputs to bfloat16 makes 2e-3 to 4e-3; a wrong key makes more. Of others' kernels it is only asked that
they computed the same."""

CACHE_BYTES = 192 << 20
"""Inputs that are smaller take turns with others like them: no cache of a GPU holds this much (H200: 60
MB)."""

DENSE = "cudnn dense"
"""What the column beside ours is called: cuDNN's attention over dense keys, through JAX's public function."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """`interpret` runs GPU kernels in the interpreter; `budget` is seconds of timing a row; `check_bytes` the
    most that the reference may gather of K: the tokens it is asked for are as many as fit."""

    interpret: bool = False
    budget: float = 1.0
    check_bytes: int = 2 << 30


class Bench:
    """Makes rows on one device, and keeps what rows of one workload share."""

    def __init__(self, device: Device, options: Options):
        self.device, self.options = device, options
        self._workload: Workload | None = None
        self._inputs: list[Inputs] = []
        self._expected: tuple[np.ndarray, np.ndarray] | None = None
        self._every: np.ndarray | None = None

    def attention(self, workload: Workload, name: str, *, timed: bool = True) -> Row:
        """The row of one attention backend, or of DENSE."""
        row: Row = {"case": workload.name, "shape": workload.shape, "backend": name}
        row |= {"bytes": workload.bytes_moved, "operations": workload.operations}
        if reason := self.refusal(workload, name):
            return row | {"status": "refused", "reason": reason}
        self._prepare(workload)
        if name == DENSE:
            try:
                return row | self._dense(workload, timed)
            except Exception as error:  # cuDNN says in its own ways what it does not take
                return row | {"status": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
        backend = Backend(name, self.device, self.options.interpret and _interprets(name))
        tiles = attention.query_tiles(backend, workload.geometry)
        sets = [(*inputs[:3], batch_of(workload, inputs, tiles)) for inputs in self._inputs]
        call = _paged(workload, backend)
        row |= self._judge(workload, name, call, sets[0])
        if row["status"] == "ok" and timed:
            row |= timing_fields(self._time(workload, call, sets))
        return row

    def _dense(self, workload: Workload, timed: bool) -> Row:
        # On a machine without cuDNN XLA's own stands in, so that this code is run everywhere.
        implementation = "cudnn" if self.device.platform == "gpu" else "xla"
        call, sets = _dense_call(workload, implementation), _dense_sets(workload, self._inputs)
        row = {"implementation": implementation, **self._judge(workload, DENSE, call, sets[0])}
        if row["status"] == "ok" and timed:
            row |= timing_fields(self._time(workload, call, sets))
        return row

    def refusal(self, workload: Workload, name: str) -> str:
        """Why a backend has no row here, "" when it does."""
        if name == DENSE:
            if workload.operation == "mixed":
                return "a dense attention takes rows of one length"
            if workload.kv_dtype != workload.dtype:
                return f"takes keys and values in {workload.dtype} alone"
            return ""
        interpret = self.options.interpret and _interprets(name)
        return attention.unsupported(Backend(name, self.device, interpret), workload.geometry)

    def _prepare(self, workload: Workload) -> None:
        if workload == self._workload:
            return
        self._workload, self._inputs, self._expected, self._every = None, [], None, None
        large = self.device.platform == "gpu"
        count = max(1, min(-(-CACHE_BYTES // workload.bytes_moved), 16)) if large else 1
        self._inputs = [draw(workload, seed) for seed in range(count)]
        self._workload = workload

    def _judge(self, workload: Workload, name: str, call: Callable[..., jax.Array], arguments: tuple) -> Row:
        """Whether the first set of inputs gives what the specification says."""
        out, again = (np.asarray(call(*arguments), np.float32) for _ in range(2))
        out, again = (x.reshape(workload.tokens, workload.heads, workload.width) for x in (out, again))
        places, expected = self._reference(workload)
        error = worst_error(out[places], expected)
        compared = f"{len(places)} of {workload.tokens} tokens"
        if len(places) < workload.tokens and name not in ("xla", DENSE):
            # The reference has looked at some tokens; xla, which has a row of its own, at all of them.
            error = max(error, worst_error(out, self._by_xla(workload)))
            compared = f"{len(places)} tokens with the reference, all with xla"
        row: Row = {"error": error, "compared": compared}
        most = PEERS_ERROR if name == DENSE else WORST_ERROR
        if not error <= most:  # NaN is no number below it
            return row | {"status": "wrong", "reason": f"error {error:.2g} is above {most:g}"}
        if name != DENSE and not np.array_equal(out, again, equal_nan=True):
            return row | {"status": "wrong", "reason": "two runs of the same inputs differ"}
        return row | {"status": "ok"}

    def _reference(self, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, [those, N, H] float32): the first, the last, and others by chance as far as memory
        goes."""
        if self._expected is None:
            inputs = self._inputs[0]
            per_token = max(workload.keys) * workload.kv_heads * workload.width * 4
            count = max(2, min(workload.tokens, self.options.check_bytes // per_token, 256))
            places = np.random.default_rng(1).permutation(workload.tokens)[:count]
            places[:2] = (0, workload.tokens - 1)[: len(places[:2])]
            places = np.unique(places)
            batch = batch_of(workload, inputs, (1,))
            batch = replace(batch, token_row=batch.token_row[places], positions=batch.positions[places])
            expected = _specified(
                inputs.q[places].astype(jnp.float32),
                inputs.k_pages,
                inputs.v_pages,
                batch,
                rule=workload.rule,
            )
            self._expected = places, np.asarray(expected)
        return self._expected

    def _by_xla(self, workload: Workload) -> np.ndarray:
        if self._every is None:
            backend, inputs = Backend("xla", self.device), self._inputs[0]
            batch = batch_of(workload, inputs, attention.query_tiles(backend, workload.geometry))
            self._every = np.asarray(_paged(workload, backend)(*inputs[:3], batch), np.float32)
        return self._every

    def _time(self, workload: Workload, call: Callable[..., jax.Array], sets: list[tuple]) -> Timing:
        budget = self.options.budget
        single = measure(lambda i: call(*sets[i % len(sets)]), budget=budget)
        if workload.operation != "decode" or len(sets) > 1 or single.seconds > 1e-3:
            return single
        # A short call and Python's way to it take alike. Outputs have the form of queries: several calls in
        # one program, each of what the last one gave, cannot overlap, be merged or be left out.
        repeats = 8

        @jax.jit
        def chain(q: jax.Array, *rest: Any) -> jax.Array:
            for _ in range(repeats):
                q = call(q, *rest)
            return q

        return measure(lambda i: chain(*sets[i % len(sets)]), calls_each=repeats, budget=budget)


def timing_fields(timing: Timing) -> Row:
    return {**timing._asdict(), "launch_bound": timing.launch_bound}


def worst_error(out: np.ndarray, expected: np.ndarray) -> float:
    """The largest of |out - expected| / |expected| over vectors of the last axis; NaN where anything is."""
    difference = np.linalg.norm(out - expected, axis=-1)
    size = np.linalg.norm(expected, axis=-1)
    return float(np.max(difference / np.maximum(size, 1e-30)))


def _interprets(name: str) -> bool:
    return name.startswith("pallas")


def _paged(workload: Workload, backend: Backend) -> Callable[..., jax.Array]:
    """The public operation, jitted: what is static is in the closure, so that a call costs Python little."""
    decode_rows, rule = len(workload.decodes), workload.rule

    @jax.jit
    def call(q: jax.Array, k_pages: Pages, v_pages: Pages, batch: RaggedBatch) -> jax.Array:
        return attention.paged_attention(
            q, k_pages, v_pages, batch, decode_rows=decode_rows, rule=rule, backend=backend
        )

    return call


_specified = jax.jit(reference.paged_attention, static_argnames=("rule",))


def _dense_sets(workload: Workload, inputs: list[Inputs]) -> list[tuple]:
    """(q [B, T / B, N, H], k, v [B, S, K, H], lengths [B]) of each set."""
    sets = []
    for one in inputs:
        rows = len(workload.keys)
        q = one.q.reshape(rows, -1, workload.heads, workload.width)
        # Behind a row's own keys there may be NaN, which a dense attention multiplies by 0.
        k, v = (jnp.nan_to_num(dense(one, pages, workload.width)) for pages in (one.k_pages, one.v_pages))
        sets.append((q, k, v, jnp.asarray(one.kv_len)))
    return sets


def _dense_call(workload: Workload, implementation: str) -> Callable[..., jax.Array]:
    causal = workload.operation == "prefill"
    even = len(set(workload.keys)) == 1 and not workload.keys[0] % workload.page_size

    @jax.jit
    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, scale=workload.rule.scale, is_causal=causal,
            key_value_seq_lengths=None if even else lengths,
            implementation=implementation,  # type: ignore[arg-type]
        )  # fmt: skip

    return call
