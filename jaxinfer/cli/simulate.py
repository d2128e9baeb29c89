"""`jaxinfer simulate`: what a load would see of a model on a device that need not be here.

A table for people goes to stdout, and one JSON object is its last line (--json: that line alone).
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxinfer.cli.bench_flags import LoadFlags, given, refuse_given
from jaxinfer.cli.planning import DeviceFlags, foretold
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.bench import Load, RequestRecord
    from jaxinfer.bench.predicted import Predictor

Shape = Annotated[
    Positional[str],
    arg(metavar="MODEL", help="llama3-70b or another built-in shape, a config.json, or a MODEL to be run."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFlags:
    """How the engine would be started there: as the flags of `serve`."""

    max_model_len: int | None = None
    """Longest prompt + output; the model's own limit, if left out."""
    max_num_seqs: int | None = None
    """Most sequences that run together."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int | None = None
    """Pages in the pool; as many as the device has memory for, if left out."""
    memory_utilization: float = 0.9
    """Share of the memory that the weights leave, for the pool."""
    enable_prefix_caching: bool = True
    """Keep the K/V of finished sequences as long as nobody needs their pages."""
    attention_span: str | None = None
    """What queries see."""
    async_scheduling: bool = True
    """Plan the next step while the device runs this one."""

    def predictor(self, model: str, flags: DeviceFlags, calibration: str | None) -> Predictor:
        """The engine that would run a model there. Raises ConfigError, CheckpointError."""
        from jaxinfer.config import EngineConfig

        stated = EngineConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        return foretold(model, stated, flags, calibration)


@dataclass(frozen=True)
class Simulate:
    """What a load would see of a model on a device: the engine's own scheduler, in virtual time."""

    model: Shape
    seed: int = 0
    """Of the load: lengths, arrivals and prompts."""
    against: Annotated[str | None, arg(metavar="LOG")] = None
    """How far off it is: a log of a measured run (`bench serve --log`), whose arrivals and lengths are
    simulated; or, where a load is stated, that load, which must be the log's."""
    against_run: int = 0
    """Which run of the log, from 0."""
    calibration: Annotated[str | None, arg(metavar="FILE")] = None
    """Step times by this calibration (`doctor --calibrate`), in place of what is known of --device."""
    slo: str = ""
    """What is promised, such as ttft_p95=500ms,tpot_p95=50ms."""
    log: Annotated[str | None, arg(metavar="FILE")] = None
    """Keep the simulated times of every request: JSONL, as bench does."""
    json: bool = False
    """The JSON alone."""
    load: LoadFlags = field(default_factory=LoadFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    limits: LimitFlags = field(default_factory=LimitFlags)

    def run(self) -> int:
        from jaxinfer.bench import Log, Objective, simulated
        from jaxinfer.bench.against import errors
        from jaxinfer.bench.predicted import records_of
        from jaxinfer.bench.report import as_line
        from jaxinfer.progress import phase

        objective = Objective.parse(self.slo)
        measured = self._measured()
        load = self._load(measured)
        predictor = self.limits.predictor(self.model, self.device, self.calibration)
        log = None if self.log is None else Log(self.log)
        began = time.perf_counter()
        with phase(f"simulating {self.model}", total=len(load.arrivals)) as advance:
            outcome = predictor.simulate(load, advance)
        wall_s = time.perf_counter() - began
        records = records_of(load, outcome)
        if log is not None:
            with log:
                log.add(records)
        report = simulated.report(self.model, predictor, load, outcome, records, objective, wall_s)
        report["tensor_parallel"] = self.device.tp
        if measured is not None:
            report["against"] = {"log": Path(self.against or "").name, **errors(measured, records)}
        if not self.json:
            print(simulated.page(report))
        print(as_line(report))
        return 0 if report["simulated"]["ok"] else 1

    def _measured(self) -> list[RequestRecord] | None:
        """The run of --against. Raises OSError, ConfigError, UsageError."""
        from jaxinfer.bench import read_log

        if self.against is None:
            refuse_given(self, "is of a log: it needs --against", ("against_run",))
            return None
        runs = read_log(self.against)
        if not 0 <= self.against_run < len(runs):
            raise UsageError(f"--against-run {self.against_run}: the log holds {len(runs)} runs, from 0 on")
        return runs[self.against_run]

    def _load(self, measured: list[RequestRecord] | None) -> Load:
        """Raises UsageError for flags that do not go together, ConfigError and OSError."""
        from jaxinfer.bench.against import check_same, load_of

        if measured is not None and not given(self.load, ("rate", "concurrency", "trace")):
            reason = "is of a load that is stated; --against alone takes that of the log"
            refuse_given(self.load, reason, ("arrivals", "burstiness", "speed", "requests", "duration"))
            refuse_given(self.load.lengths, reason)
            return load_of(measured, seed=self.seed, name=Path(self.against or "").name)
        load = self.load.read(self.seed)
        if measured is not None:
            check_same(load, measured)
        return load
