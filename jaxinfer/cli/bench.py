"""`jaxinfer bench`: throughput, latency, load, and how much of it an SLO bears.

Progress goes to stderr, a table for people to stdout, and one JSON object is its last line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from jaxinfer.cli.bench_flags import (
    LengthFlags,
    LoadFlags,
    OptionalModel,
    ServerTargetFlags,
    TargetFlags,
)
from jaxinfer.cli.flags import Model
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.bench.workbench import Workbench


def _tell(bench: Workbench, report: dict[str, Any], page: Callable[[dict[str, Any]], str]) -> int:
    """The table, then the JSON. Status 1 when no request was answered."""
    from jaxinfer.bench.report import as_line

    report["predicted_by"] = bench.basis
    print(page(report))
    print(as_line(report))
    measured = [run["measured"] for run in report.get("runs", [report])]
    return 0 if all(run["ok"] for run in measured) else 1


@dataclass(frozen=True)
class Throughput(TargetFlags):
    """Tokens per second of a batch of requests that are all there at the start."""

    model: Model
    requests: int = 64
    """How many."""
    lengths: LengthFlags = field(default_factory=LengthFlags)

    def run(self) -> int:
        from jaxinfer.bench import at_once, plots, serve, throughput

        prompts, outputs = self.lengths.checked()
        at_once(self.requests, prompts, outputs)
        with self.workbench(self.model) as bench:
            measured, report = throughput.throughput(
                bench, self.requests, prompts, outputs, seed=self.report.seed,
                warm_up=self.report.warmup_requests,
            )  # fmt: skip
            if self.report.plot is not None:
                plots.run(self.report.plot, measured, f"{report['model']}: {self.requests} requests at once")
            return _tell(bench, report, serve.page)


@dataclass(frozen=True)
class Latency(TargetFlags):
    """How long requests take by how many run together: batches of one size after the other, alone in the
    engine."""

    model: Model
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """How many requests arrive together."""
    prompt: int = 512
    """Tokens of each prompt."""
    output: int = 128
    """Tokens of each answer."""
    repeats: int = 5
    """Batches of each size."""

    def run(self) -> int:
        from jaxinfer.bench import latency, plots

        latency.check(self.batches, self.prompt, self.output, self.repeats)
        with self.workbench(self.model) as bench:
            report = latency.latency(
                bench, self.batches, self.prompt, self.output, repeats=self.repeats, seed=self.report.seed,
                warm_up=self.report.warmup_requests,
            )  # fmt: skip
            if self.report.plot is not None:
                plots.by(self.report.plot, report, "batch", "batch size")
            return _tell(bench, report, latency.page)


@dataclass(frozen=True)
class Serve(TargetFlags):
    """A load of requests that come and go, put to a model here or to a server: give one of --rate,
    --concurrency and --trace."""

    model: OptionalModel = None
    load: LoadFlags = field(default_factory=LoadFlags)
    server: ServerTargetFlags = field(default_factory=ServerTargetFlags)

    def run(self) -> int:
        from jaxinfer.bench import plots, serve

        load = self.load.read(self.report.seed)
        with self.workbench(self.model, self.server) as bench:
            measured, report = serve.serve(bench, load, self.report.warmup_requests)
            if self.report.plot is not None:
                plots.run(self.report.plot, measured, f"{report['model']}: {load.about['kind']} load")
            return _tell(bench, report, serve.page)


@dataclass(frozen=True)
class Sweep(TargetFlags):
    """The highest load under which --slo holds, confirmed by a run below and one above it."""

    model: OptionalModel = None
    duration: float = 30.0
    """Seconds of arrivals of a run; those that confirm take twice as long."""
    least_requests: int = 100
    """A run has so many requests, however long they take to arrive: a P95 of 20 is one request."""
    low: float | None = None
    """Lowest load in requests/s; a sixteenth of the capacity, if left out, which a closed loop measures
    first."""
    start: float | None = None
    """First load tried; half the capacity, if left out."""
    high: float | None = None
    """Highest load; twice the capacity, if left out."""
    concurrency: int | None = None
    """Of that closed loop; as many as the engine runs together, if left out (32 with --url)."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps between arrivals: 1 is Poisson."""
    tolerance: float = 0.1
    """How near, as a share, the loads that hold and break must come."""
    near: float = 0.15
    """A run whose worst term is this near to its limit, as a share, is repeated, and the majority decides."""
    repeats: int = 3
    """Runs at one load at most."""
    most_runs: int = 30
    """Runs in all."""
    lengths: LengthFlags = field(default_factory=LengthFlags)
    server: ServerTargetFlags = field(default_factory=ServerTargetFlags)

    def run(self) -> int:
        from jaxinfer.bench import Objective, plots, sweep
        from jaxinfer.bench.knee import Patience

        if not Objective.parse(self.report.slo).terms:
            raise UsageError("a sweep needs --slo, such as ttft_p95=500ms,tpot_p95=50ms")
        if self.concurrency is not None and None not in (self.low, self.start, self.high):
            raise UsageError(
                "--concurrency is of the closed loop that finds the range, and the range is stated"
            )
        prompts, outputs = self.lengths.checked()
        plan = sweep.Plan(
            prompts, outputs, self.report.seed, self.burstiness, self.duration, self.least_requests, self.low,
            self.start, self.high, self.concurrency,
            Patience(self.tolerance, self.near, self.repeats, self.most_runs),
        )  # fmt: skip
        plan.load(1.0, 0, False)
        with self.workbench(self.model, self.server) as bench:
            report = sweep.sweep(bench, plan, self.report.warmup_requests)
            if self.report.plot is not None:
                plots.sweep(self.report.plot, report, bench.objective)
            return _tell(bench, report, sweep.page)


@dataclass(frozen=True)
class Context(TargetFlags):
    """What a longer context costs one request: time to the first token, time per token, memory."""

    model: Model
    contexts: tuple[int, ...] = ()
    """Tokens of the prompts; 1024, 2048, ... up to the limit of the model, if left out."""
    output: int = 64
    """Tokens of each answer."""
    repeats: int = 3
    """Requests of each length, one after the other."""

    def run(self) -> int:
        from jaxinfer.bench import context, plots

        context.check(self.contexts, self.output, self.repeats)
        with self.workbench(self.model) as bench:
            limit = bench.target.most_tokens
            assert limit is not None
            contexts = self.contexts or context.lengths_up_to(limit, self.output)
            report = context.context(
                bench, contexts, self.output, repeats=self.repeats, seed=self.report.seed,
                warm_up=self.report.warmup_requests,
            )  # fmt: skip
            if self.report.plot is not None:
                plots.by(self.report.plot, report, "context", "tokens of context")
            return _tell(bench, report, context.page)


Which = (
    Annotated[Throughput, subcommand("throughput")]
    | Annotated[Latency, subcommand("latency")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Sweep, subcommand("sweep")]
    | Annotated[Context, subcommand("context")]
)


@dataclass(frozen=True)
class Bench:
    """Measure throughput, latency, and how much load an SLO bears."""

    which: OmitSubcommandPrefixes[OmitArgPrefixes[Which]]

    def run(self) -> int:
        return self.which.run()
