"""What all benchmarks share: loads are put to a target under a bar of progress, foretold, judged and
logged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench import report
from jaxinfer.bench.lengths import Lengths
from jaxinfer.bench.load import Load, Prompts, at_once
from jaxinfer.bench.records import Log, Objective, RequestRecord, Summary, joined
from jaxinfer.bench.target import Advance, Run, Target
from jaxinfer.bench.target import warm_up as run_warm_up
from jaxinfer.core import ConfigError
from jaxinfer.progress import phase

Predictor = Callable[[Load], list[RequestRecord]]
"""What a load is foretold to give."""

WARM_UP_OUTPUT = 16
"""Tokens of each answer of a warm-up: past its first token, a request runs the same programs for ever."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, and what was predicted of it (None: nothing was)."""

    run: Run
    predicted: list[RequestRecord] | None
    objective: Objective

    @property
    def summary(self) -> Summary:
        return Summary.of(self.run.records, self.objective)

    def result(self, **more: Any) -> dict[str, Any]:
        """As JSON, after what else is to be said of it."""
        return {**more, **report.result(self.run, self.objective, self.predicted)}


@dataclass(slots=True)
class Workbench:
    """A target with all that accompanies a measurement. `say` is told of each run in a line (stderr); `basis`
    says what predictions rest on."""

    target: Target
    objective: Objective = field(default_factory=Objective)
    predict: Predictor | None = None
    log: Log | None = None
    say: Callable[[str], None] = field(default=lambda line: None)
    basis: str | None = None

    def warm_up(self, load: Load, requests: int) -> None:
        """Run `requests` requests like the first of `load`, together and unmeasured; their prompts are
        others.

        Raises ConfigError when none is answered.
        """
        if requests < 1:
            return
        taken = load.arrivals[:requests]
        most = max(2, min(WARM_UP_OUTPUT, max(arrival.output_tokens for arrival in taken)))
        arrivals = tuple(
            dataclasses.replace(
                arrival,
                at_s=0.0,
                prompt_tokens=arrival.num_prompt,
                output_tokens=min(arrival.output_tokens, most),
                group=arrival.group + 1_000_003,  # no prefix of the run itself is in the cache when it begins
            )
            for arrival in taken
        )
        warm = Load(arrivals, load.seed + 1_000_003, None, {"kind": "warm-up"})
        with phase("warming up", total=len(arrivals)) as advance:
            run_warm_up(self.target, warm, advance)

    def measure(self, load: Load, title: str) -> Measured:
        """Run a load and log it; `title` heads its bar."""
        with phase(title, total=len(load.arrivals)) as advance:
            return self._measure([load], advance)

    def measure_repeated(self, loads: Sequence[Load], title: str) -> Measured:
        """Run loads one after the other and take them as one run."""
        with phase(title, total=sum(len(load.arrivals) for load in loads)) as advance:
            return self._measure(loads, advance)

    def _measure(self, loads: Sequence[Load], advance: Advance) -> Measured:
        runs = [self.target.run(load, advance) for load in loads]
        predicted = None if self.predict is None else joined([self.predict(load) for load in loads])
        load = loads[0]
        if len(loads) > 1:
            arrivals = tuple(arrival for each in loads for arrival in each.arrivals)
            load = dataclasses.replace(load, arrivals=arrivals, about={**load.about, "repeats": len(loads)})
        run = Run(load, joined([run.records for run in runs]), _mean([run.engine for run in runs]))
        if self.log is not None:
            self.log.add(run.records)
        return Measured(run, predicted, self.objective)


TOTALS = ("prefix_hit_tokens", "steps", "failed_steps", "preemptions", "compiles_after_warmup")
"""Counts, which are added over repeats; the others are shares, of which the mean is taken."""


def _mean(counts: Sequence[Any]) -> dict[str, float | None]:
    """Counts of several runs as those of one."""
    merged: dict[str, float | None] = {}
    for name in counts[0]:
        values = [count[name] for count in counts if count.get(name) is not None]
        total = sum(values)
        merged[name] = None if not values else total if name in TOTALS else total / len(values)
    return merged


def same_batch(prompt: int, output: int, batch: int, repeats: int, seed: int) -> list[Load]:
    """`repeats` batches of `batch` requests of one length, each with prompts of its own. Raises ConfigError
    for what is no load."""
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    prompts, outputs = Prompts(Lengths.fixed(prompt)), Lengths.fixed(output)
    return [at_once(batch, prompts, outputs, seed=seed + 7919 * repeat) for repeat in range(repeats)]
