"""GET /metrics: what the engine counts, as Prometheus text.

    metrics = Metrics(llm.engine, worker, "smollm2-135m")
    app.add_api_route("/metrics", metrics.handle)
    app.add_middleware(RequestCounts, metrics=metrics)

Nothing is counted twice: a collector reads the engine's own counts (engine/metrics.py) when it is asked. Any
thread may do that at any time, so that a scrape never waits for a step and the engine never for a scrape.
Each application has a registry of its own. Names and meanings are vLLM's, with `jaxinfer_` for `vllm:`, where
there is one; examples/monitoring/README.md lists what there is, and how it differs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.engine.metrics import Histogram, Histograms

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHARE_S = 10.0
"""The shares of the roofline are of the time since the latest scrape that is at least this long ago."""
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Others, which a client may invent, are counted as "other"."""


class EngineCounts(Protocol):
    """What is read of an engine."""

    @property
    def histograms(self) -> Histograms: ...

    def stats(self) -> dict[str, Any]: ...


class WorkerHealth(Protocol):
    """What is read of its thread."""

    def health(self) -> dict[str, Any]: ...


# Of Engine.stats: key, name, help. A key that a runner does not have gives no metric.
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Tokens of the prompts taken, each once."),
    ("generated_tokens", "generation_tokens", "Tokens generated."),
    ("preemptions", "num_preemptions", "Times that a running sequence gave its pages back to be recomputed."),
    ("steps", "steps", "Steps run, failed ones included."),
    ("failed_steps", "failed_steps", "Steps that raised."),
    ("invariant_failures", "invariant_failures", "Times that the engine, when idle, found its books wrong."),
    ("programs", "compiles", "Programs compiled for the model."),
    ("compile_s", "compile_seconds", "Time spent on that."),
    ("compiles_after_warmup", "compiles_after_warmup", "Compiles that a full warm-up should have made."),
    ("computed_tokens", "computed_tokens", "Tokens that recorded steps ran, recomputation included."),
    ("tokens_run", "step_tokens", "Tokens that steps were started with."),
    ("tokens_padded", "step_slots", "Those, and the padding beside them."),
    ("moved_bytes", "moved_bytes", "Bytes that steps had to read: weights once a step, K/V of real tokens."),
    ("operations", "operations", "Floating-point operations that steps had to do for real tokens."),
)
GAUGES = (
    ("running", "num_requests_running", "Sequences that hold pages and take part in steps."),
    ("waiting", "num_requests_waiting", "Sequences in the engine's queue, preempted ones included."),
    ("max_num_seqs", "max_num_seqs", "Sequences that may run together."),
    ("max_num_batched_tokens", "max_num_batched_tokens", "Tokens that a step may run."),
    ("failed_in_a_row", "failed_steps_in_a_row", "Failed steps since the last good one."),
    ("padding_waste", "padding_waste_ratio", "Share of padding in all tokens run since the start."),
    ("kv_bytes", "kv_cache_bytes", "Memory of the pool of pages."),
    ("param_bytes", "parameter_bytes", "Memory of the weights."),
    ("bandwidth", "machine_bandwidth_bytes_per_second", "Memory bandwidth, as measured at the start."),
    ("matmul_rate", "machine_operations_per_second", "Rate of a large product, as measured at the start."),
)
HISTOGRAMS = {
    "time_to_first_token": "From the arrival at the engine to the first token.",
    "inter_token_latency": "From one token of a sequence to its next, for every token but the first.",
    "request_queue_time": "From the arrival at the engine to the first step.",
    "request_prefill_time": "From the first step to the first token.",
    "request_decode_time": "From the first to the last token.",
    "request_time_per_output_token": "Mean time from a token to the next, of a sequence.",
    "e2e_request_latency": "From the arrival at the engine to the end.",
    "request_prompt_tokens": "Tokens of the prompt.",
    "request_generation_tokens": "Tokens generated.",
}
HOST_PARTS = {"engine_s": "engine", "dispatch_s": "dispatch", "wait_s": "wait"}


class Metrics:
    """The collector of one application, and its route.

    `clock` returns seconds and never goes back.
    """

    def __init__(
        self,
        engine: EngineCounts,
        worker: WorkerHealth,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine, self._worker = engine, worker
        self._model_name = model_name
        self.http_requests: Counter[tuple[str, str, str]] = Counter()  # method, route, status
        self._shares = Shares(clock)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)  # pyright: ignore[reportArgumentType]  # it has `collect`
        ProcessCollector(registry=self._registry)

    def handle(self) -> Response:
        """The route. On a thread of the pool: two milliseconds that the event loop keeps for its streams."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)

    def collect(self) -> Iterator[Metric]:
        stats, health = self._engine.stats(), self._worker.health()
        for key, name, text in COUNTERS:
            if (value := stats.get(key)) is not None:
                yield self._counter(name, text, {(): value})
        for key, name, text in GAUGES:
            if (value := stats.get(key)) is not None:
                yield self._gauge(name, text, {(): value})
        yield from self._pages(stats)
        yield from self._caching(stats["prefix_cache"])
        ended = {(reason,): count for reason, count in stats["finished"].items()}
        yield self._counter("request_success", "Sequences ended, by reason.", ended, "finished_reason")
        parts = {(part,): stats[key] for key, part in HOST_PARTS.items()}
        yield self._counter(
            "host_seconds",
            "Time of the engine's thread: Python of the engine, starting steps, waiting for the device.",
            parts,
            "part",
        )
        for name, histogram in self._engine.histograms.items():
            yield self._histogram(name, histogram)
        yield from self._roofline(stats)
        yield from self._server(health)

    # ----------------------------------------------------------------------------------- the parts

    def _pages(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        # The counts may be of two moments within a step: here they make up the pool all the same.
        total = stats["pages_total"]
        free = min(stats["pages_free"], total)
        cached = min(stats["pages_cached"], total - free)
        live = total - free - cached
        text = "Pages of K/V by state: held by sequences, only known to the prefix cache, holding nothing."
        states = {("live",): live, ("cached",): cached, ("free",): free}
        yield self._gauge("kv_cache_pages", text, states, "state")
        text = "Share of the pages that sequences hold, from 0 to 1; cached ones can be had."
        yield self._gauge("kv_cache_usage_perc", text, {(): live / total})

    def _caching(self, cache: Mapping[str, int]) -> Iterator[Metric]:
        """All zero where prefix caching is off."""
        for key, name, text in (
            ("queries", "prefix_cache_queries", "Tokens looked for in the prefix cache."),
            ("hits", "prefix_cache_hits", "Tokens found there."),
            ("evictions", "prefix_cache_evictions", "Pages whose content was given up for others."),
        ):
            yield self._counter(name, text, {(): cache.get(key, 0)})

    def _roofline(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        bandwidth, rate = stats.get("bandwidth"), stats.get("matmul_rate")
        if not bandwidth or not rate:
            return
        moved, computed = self._shares.rates(stats["moved_bytes"], stats["operations"])
        since = f"since the scrape before, or over {SHARE_S:g} s"
        yield self._gauge("mbu", f"Bytes read a second over the bandwidth, {since}.", {(): moved / bandwidth})
        yield self._gauge("mfu", f"Operations a second over the matmul rate, {since}.", {(): computed / rate})

    def _server(self, health: Mapping[str, Any]) -> Iterator[Metric]:
        up = health["status"] == "ok"
        yield self._gauge("engine_healthy", "1 while /health answers 200, else 0.", {(): int(up)})
        text = "Sequences that have a place: from their request to the end of all of it."
        yield self._gauge("open_sequences", text, {(): health["sequences"]})
        text = "Sequences that have a place at most; beyond, 429."
        yield self._gauge("max_open_sequences", text, {(): health["capacity"]})
        text = "How long the step in progress has taken; 0 when none is."
        yield self._gauge("step_in_progress_seconds", text, {(): health["step_s"] or 0.0})
        family = CounterMetricFamily(
            "jaxinfer_http_requests",
            "Requests answered, or left by their client (499), by route and status.",
            labels=("model_name", "method", "route", "status"),
        )
        for (method, route, status), count in dict(self.http_requests).items():  # a copy: others count on
            family.add_metric((self._model_name, method, route, status), count)
        yield family

    # ---------------------------------------------------------------------------------- families

    def _counter(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"jaxinfer_{name}", text, labels=("model_name", *labels))
        for own, value in values.items():
            family.add_metric((self._model_name, *own), value)
        return family

    def _gauge(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"jaxinfer_{name}", text, labels=("model_name", *labels))
        for own, value in values.items():
            family.add_metric((self._model_name, *own), value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> HistogramMetricFamily:
        unit = "" if name.endswith("_tokens") else "_seconds"
        family = HistogramMetricFamily(f"jaxinfer_{name}{unit}", HISTOGRAMS[name], labels=("model_name",))
        counts, total = histogram.snapshot()
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        family.add_metric((self._model_name,), list(zip(bounds, counts, strict=True)), total)
        return family


class Shares:
    """Rates of two counts since the latest reading that is SHARE_S old, or else since the first one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # The first is what rates are taken from; readings less than a second apart are not all kept.
        self._readings = deque([(clock(), 0.0, 0.0)])
        self._lock = threading.Lock()  # two scrapes may read at once

    def rates(self, first: float, second: float) -> tuple[float, float]:
        """Per second, of both counts, as they are now."""
        with self._lock:
            now = self._clock()
            while len(self._readings) > 1 and self._readings[1][0] <= now - SHARE_S:
                self._readings.popleft()
            then, first_then, second_then = self._readings[0]
            if now - self._readings[-1][0] >= 1.0:
                self._readings.append((now, first, second))
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return max(0.0, first - first_then) / seconds, max(0.0, second - second_then) / seconds


class RequestCounts:
    """Counts HTTP requests by method, route and status. Whatever clients ask for, labels stay few: a path
    that is no route is "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, complete = 500, False  # what the server answers where we raise

        async def noting(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        returned = False
        try:
            await self.app(scope, receive, noting)
            returned = True
        finally:
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", "other")
            final = 499 if returned and not complete else status
            self.metrics.http_requests[method, route, str(final)] += 1
