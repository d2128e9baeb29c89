"""Flags of `jaxinfer bench`: the model, the load, what is reported; and which of them go together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from jaxinfer.cli.flags import MODEL_HELP, EngineFlags
from jaxinfer.cli.terminal import UsageError
from jaxinfer.core import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.bench import Lengths, Load, Objective, Prompts
    from jaxinfer.bench.http_target import HttpTarget
    from jaxinfer.bench.predicted import Predictor
    from jaxinfer.bench.target import Target
    from jaxinfer.bench.workbench import Workbench
    from jaxinfer.llm import LLM
    from jaxinfer.planner.calibration import Calibration

OptionalModel = Annotated[Positional[str | None], arg(metavar="MODEL", help=f"{MODEL_HELP} Or --url.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchEngineFlags(EngineFlags):
    """How the model is run."""

    warmup: Literal["full", "lazy"] = "full"
    """full compiles every program before anything is measured; lazy compiles amid the run."""
    # --seed is the load's, and --trace a file of one.
    seed: Annotated[int | None, arg(name="engine-seed")] = None
    trace: Annotated[str | None, arg(name="engine-trace")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFlags:
    """How long prompts and answers are: 128, uniform:64-256 or lognormal:128,0.6 (median, sigma[, most])."""

    prompt: str = "512"
    """Tokens of a prompt."""
    output: str = "128"
    """Tokens of an answer."""
    shared_prefix: int = 0
    """Tokens that many prompts begin with, before those of --prompt: a system prompt."""
    shared_groups: int = 1
    """How many such prefixes there are."""

    def checked(self) -> tuple[Prompts, Lengths]:
        """Raises ConfigError."""
        from jaxinfer.bench import Lengths, Prompts

        prompts = Prompts(Lengths.parse(self.prompt), self.shared_prefix, self.shared_groups)
        return prompts, Lengths.parse(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """Which requests come, and when: give one of --rate, --concurrency and --trace."""

    rate: float | None = None
    """Open loop: requests that arrive in a second, whether others have ended or not."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """How they arrive, with --rate."""
    burstiness: float = 1.0
    """Of Poisson arrivals: the shape of gamma-distributed gaps; below 1 they come in bursts."""
    concurrency: int | None = None
    """Closed loop: so many requests are open, and the next one comes when one has ended."""
    trace: Annotated[str | None, arg(metavar="FILE")] = None
    """Arrivals from a file, an object a line: {"at_s": 0.25, "prompt_tokens": 512, "output_tokens": 64}."""
    speed: float = 1.0
    """How many times as fast the trace is put."""
    requests: int | None = None
    """How many requests; 200 if neither this nor --duration is given."""
    duration: float | None = None
    """Seconds of arrivals, with --rate, in place of --requests."""
    lengths: LengthFlags = field(default_factory=LengthFlags)

    def read(self, seed: int) -> Load:
        """The load, drawn by a seed. Raises UsageError for flags that do not go together, ConfigError and
        OSError."""
        from jaxinfer.bench import closed, constant, poisson, read_trace

        if sum(way is not None for way in (self.rate, self.concurrency, self.trace)) != 1:
            raise UsageError("give one of --rate, --concurrency and --trace")
        if self.rate is None:
            refuse_given(self, "is of an open loop: it needs --rate", ("arrivals", "burstiness", "duration"))
        if self.trace is None:
            refuse_given(self, "is of a trace: it needs --trace", ("speed",))
        else:
            refuse_given(self, "contradicts --trace, which says how many", ("requests",))
            refuse_given(self.lengths, "contradicts --trace, which says how long prompts and answers are")
            return read_trace(self.trace, seed=seed, speed=self.speed)
        if self.requests is not None and self.duration is not None:
            raise UsageError("give --requests or --duration, not both")
        prompts, outputs = self.lengths.checked()
        requests = 200 if self.requests is None else self.requests
        if self.concurrency is not None:
            return closed(self.concurrency, requests, prompts, outputs, seed=seed)
        assert self.rate is not None
        if self.duration is not None:
            if not 0 < self.duration < math.inf:
                raise UsageError(f"--duration must be above 0 seconds, got {self.duration:g}")
            if 0 < self.rate < math.inf:
                requests = round(self.rate * self.duration)
                if requests < 1:
                    raise UsageError(
                        f"no request comes in --duration {self.duration:g} at --rate {self.rate:g}"
                    )
        if self.arrivals == "constant":
            refuse_given(self, "is of Poisson arrivals", ("burstiness",))
            return constant(self.rate, requests, prompts, outputs, seed=seed)
        return poisson(self.rate, requests, prompts, outputs, seed=seed, burstiness=self.burstiness)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFlags:
    """What is measured, and where it goes."""

    slo: str = ""
    """What is promised, such as ttft_p95=500ms,tpot_p95=50ms: ttft, tpot, gap or e2e; pNN, mean or max."""
    seed: int = 0
    """Of the load: lengths, arrivals and prompts."""
    warmup_requests: int = 8
    """Requests that run before anything is measured."""
    log: Annotated[str | None, arg(metavar="FILE")] = None
    """Keep the raw times of every request: JSONL."""
    plot: Annotated[str | None, arg(metavar="FILE")] = None
    """Draw the result: PNG. Needs jaxinfer[plots]."""
    keep_eos: bool = False
    """Let the model end its answers: they are then shorter than stated."""
    temperature: float = 0.0
    """Of the sampling."""
    predict: bool = True
    """Foretell every run by simulation, and report that beside what was measured."""
    calibration: Annotated[str | None, arg(metavar="FILE")] = None
    """Foretell by this calibration of step times; left out, by the one that `jaxinfer doctor --calibrate`
    keeps for this device, and without one by the roofline of what is measured of it."""

    def checked(self) -> Objective:
        """What must be right before a model is loaded. Raises ConfigError, or RequestError for a
        temperature."""
        from jaxinfer.bench import Objective, plots
        from jaxinfer.core import ConfigError

        plots.check(self.plot)
        if self.calibration is not None and not Path(self.calibration).is_file():
            raise ConfigError(f"calibration {self.calibration}: there is no such file")
        if self.warmup_requests < 0:
            raise ConfigError(f"warmup_requests must be at least 0, got {self.warmup_requests}")
        if self.calibration is not None and not self.predict:
            raise UsageError("--calibration is of a prediction, and --no-predict asks for none")
        self.sampling()
        return Objective.parse(self.slo)

    def sampling(self) -> SamplingParams:
        """Of every request. Raises RequestError."""
        return SamplingParams(temperature=self.temperature, ignore_eos=not self.keep_eos)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTargetFlags:
    """A running server, in place of a model; a MODEL beside it, and flags of its engine, say what runs there,
    to foretell it."""

    url: str | None = None
    """Put the load to a server of OpenAI's shape, such as http://127.0.0.1:8000."""
    api_key: str | None = None
    """Sent to it as `Authorization: Bearer KEY`."""
    served_model_name: str | None = None
    """The model's name there; the first that it lists, if left out."""
    vocab_size: int | None = None
    """Draw prompts from the token ids below this; 10000 if left out. The server must know them all."""
    device: str = "detect"
    """What it runs on, to foretell it, as `plan` has it: a device's name, or detect: what is here."""
    timeout_s: float | None = None
    """A request that has not ended by then has failed; 600 if left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags:
    """What most benchmarks share."""

    report: ReportFlags = field(default_factory=ReportFlags)
    engine: BenchEngineFlags = field(default_factory=BenchEngineFlags)

    @contextlib.contextmanager
    def workbench(self, model: str | None, server: ServerTargetFlags | None = None) -> Generator[Workbench]:
        """Everything ready to measure. Raises UsageError for flags that do not go together, ConfigError and
        OSError for what cannot run."""
        from jaxinfer.bench import Log
        from jaxinfer.bench.workbench import Workbench

        objective = self.report.checked()
        with contextlib.ExitStack() as stack:
            log = None if self.report.log is None else stack.enter_context(Log(self.report.log))
            url = None if server is None else server.url
            if model is None and url is None:
                raise UsageError("give a MODEL to be run here, or --url of a server that runs one")
            if url is None:
                if server is not None:
                    refuse_given(server, "is of a server: it needs --url")
                assert model is not None
                target, predict, basis = self._in_process(model, stack)
            else:
                assert server is not None
                if model is None:
                    self._refuse_predictions(server)
                target = self._at(server)
                predict = None if model is None else self._of_server(model, server, target)
                basis = None if predict is None else predict.basis
            yield Workbench(target, objective, predict, log, _say, basis)

    def _refuse_predictions(self, server: ServerTargetFlags) -> None:
        """Flags of what foretells a server whose model is not named."""
        reason = "is of an engine; of the server's at --url it needs the MODEL that runs there"
        refuse_given(self.engine, reason)
        refuse_given(server, reason, ("device",))
        refuse_given(self.report, reason, ("calibration",))

    def _of_server(self, model: str, server: ServerTargetFlags, target: HttpTarget) -> Predictor | None:
        """What foretells a server that runs `model` with these engine flags; pages and longest request are
        what it says itself."""
        from jaxinfer.cli.planning import DeviceFlags, foretold
        from jaxinfer.config import EngineConfig

        if not self.report.predict:
            return None
        stated, stats = self.engine.checked(), target.stats()
        if stated["max_model_len"] is None:
            stated["max_model_len"] = target.most_tokens
        if stated["num_pages"] is None and stats is not None and stats["pages_total"]:
            stated["num_pages"] = stats["pages_total"] + 1  # page 0 is nobody's
        engine = EngineConfig(**stated)
        on = DeviceFlags(
            device=server.device, weight_dtype=engine.quantization or engine.dtype,
            kv_dtype=engine.kv_cache_dtype,
        )  # fmt: skip
        return foretold(model, engine, on, self.report.calibration)

    def _in_process(self, model: str, stack: contextlib.ExitStack) -> tuple[Target, Any, str | None]:
        from jaxinfer.bench.predicted import Predictor
        from jaxinfer.bench.target import InProcess

        llm = stack.enter_context(self.engine.load(model))
        llm.measure_machine()
        predictor = Predictor.of(llm, self._calibration(llm)) if self.report.predict else None
        basis = None if predictor is None else predictor.basis
        return InProcess(llm, self.report.sampling()), predictor, basis

    def _calibration(self, llm: LLM) -> Calibration | None:
        """The one that was given, else the one that is kept for this device and dtypes, if it was made with
        this model: what a step costs at least is no matter of parameters, and misleads about a model of
        another size.
        """
        from jaxinfer.bench.predicted import costs_of
        from jaxinfer.planner.calibration import Calibration

        if self.report.calibration is not None:
            return Calibration.load(Path(self.report.calibration))
        import jax

        from jaxinfer.calibration import find_calibration

        costs = costs_of(llm)
        kept = None if costs is None else find_calibration(jax.local_devices()[0].device_kind, costs)
        return kept if kept is not None and kept.model == llm.model_name else None

    def _at(self, server: ServerTargetFlags) -> HttpTarget:
        from jaxinfer.bench.http_target import TIMEOUT_S, VOCABULARY, HttpTarget

        assert server.url is not None
        return HttpTarget(
            server.url,
            model=server.served_model_name,
            api_key=server.api_key,
            vocab_size=VOCABULARY if server.vocab_size is None else server.vocab_size,
            ignore_eos=not self.report.keep_eos,
            temperature=self.report.temperature,
            timeout_s=TIMEOUT_S if server.timeout_s is None else server.timeout_s,
        )


def _say(line: str) -> None:
    print(f"jaxinfer: {line}", file=sys.stderr, flush=True)


def given(flags: Any, names: Iterable[str] | None = None) -> list[str]:
    """The flags, as they are spelled, whose value is not the default."""
    found = []
    for f in dataclasses.fields(flags):
        if (names is None or f.name in names) and getattr(flags, f.name) != f.default:
            found.append("--" + f.name.replace("_", "-"))
    return found


def refuse_given(flags: Any, reason: str, names: Iterable[str] | None = None) -> None:
    """Raise UsageError for the first of these flags that was given: nothing is accepted and ignored."""
    for name in given(flags, names):
        raise UsageError(f"{name} {reason}")
