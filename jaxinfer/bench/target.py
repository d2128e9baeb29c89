"""What is put under load: a model in this process here, a server in `http_target`, either behind one
interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxinfer.bench.drive import GREEDY, RealClock, drive
from jaxinfer.bench.load import Load
from jaxinfer.bench.records import RequestRecord
from jaxinfer.core import ConfigError, SamplingParams
from jaxinfer.llm import LLM

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One load and what came of it. `engine`: what the engine counted meanwhile (`counted`)."""

    load: Load
    records: list[RequestRecord]
    engine: Mapping[str, float | None] = field(default_factory=dict)


class Target(Protocol):
    """Something that serves requests."""

    def describe(self) -> dict[str, Any]:
        """For reports: `model`, `target`, `device`, `engine` (its configuration), each as far as it is
        known."""
        ...

    def run(self, load: Load, advance: Advance) -> Run:
        """Put a load to it and wait for its end; `advance(1)` at the end of each request."""
        ...

    @property
    def most_tokens(self) -> int | None:
        """Prompt and output of a request together, at most; None: not known."""
        ...

    @property
    def most_sequences(self) -> int | None:
        """How many requests run together at most; None: not known."""
        ...


class InProcess:
    """A model in this process, stepped by the driver itself: no HTTP, no other thread."""

    def __init__(self, llm: LLM, sampling: SamplingParams = GREEDY):
        self.llm, self.sampling = llm, sampling

    @property
    def most_tokens(self) -> int | None:
        return self.llm.limits.max_model_len

    @property
    def most_sequences(self) -> int | None:
        return self.llm.limits.max_num_seqs

    def describe(self) -> dict[str, Any]:
        llm, limits = self.llm, self.llm.limits
        config = {
            **dataclasses.asdict(llm.engine_config),
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "num_pages": limits.num_pages,
        }
        stats = llm.stats()
        return {
            "model": llm.model_name,
            "target": "in process",
            "device": _device(),
            "engine": config,
            "machine": {name: stats.get(name) for name in ("bandwidth", "matmul_rate")},
            "param_bytes": stats.get("param_bytes"),
            "kv_bytes": stats.get("kv_bytes"),
        }

    def run(self, load: Load, advance: Advance) -> Run:
        engine = self.llm.engine
        before = engine.stats()
        records = drive(engine, load, RealClock(), sampling=self.sampling, advance=advance)
        return Run(load, records, counted(before, engine.stats(), seconds_of(records)))


def seconds_of(records: list[RequestRecord]) -> float:
    """From the first intended arrival to the last end."""
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.arrived_s for record in records)


def warm_up(target: Target, load: Load, advance: Advance) -> Run:
    """Run a load that is not measured. Raises ConfigError when not one of its requests is answered: a
    benchmark of refusals is no benchmark."""
    run = target.run(load, advance)
    if not any(record.status == "ok" for record in run.records):
        reason = next((record.error for record in run.records if record.error), "no reason was given")
        raise ConfigError(f"no request of the warm-up was answered: {reason}")
    return run


def counted(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, float | None]:
    """What an engine counted between two of its `stats`, over `seconds`; None where it has no such count.

    `mbu` and `mfu`: bytes and operations that the steps had to move and compute, over what the machine can in
    that time (waiting for requests included: a server with little to do uses little of the machine).
    `padding_waste`: share of run tokens that were padding. `prefix_hit_rate`: share of the prompt tokens
    looked for that the prefix cache had. `compiles`: programs compiled meanwhile, of which there should be
    none.
    """

    def delta(key: str) -> float | None:
        old, new = before.get(key), after.get(key)
        return None if old is None or new is None else new - old

    def share(part: float | None, whole: float | None) -> float | None:
        return None if part is None or whole is None or whole <= 0 else part / whole

    def used(key: str, limit: str) -> float | None:
        limit_s = after.get(limit)
        return share(delta(key), None if limit_s is None else limit_s * seconds)

    cache_before, cache_after = before.get("prefix_cache") or {}, after.get("prefix_cache") or {}
    queries = cache_after.get("queries", 0) - cache_before.get("queries", 0)
    hits = cache_after.get("hits", 0) - cache_before.get("hits", 0)
    run_share = share(delta("tokens_run"), delta("tokens_padded"))
    parts = [delta(key) for key in ("engine_s", "dispatch_s", "wait_s")]
    host = None
    if all(part is not None for part in parts):
        host = share(parts[0] + parts[1], sum(parts))  # type: ignore[operator, arg-type]
    compiles = [d for d in (delta("programs"), delta("compiles_after_warmup")) if d is not None]
    return {
        "mbu": used("moved_bytes", "bandwidth"),
        "mfu": used("operations", "matmul_rate"),
        "padding_waste": None if run_share is None else 1.0 - run_share,
        "prefix_hit_tokens": hits,
        "prefix_hit_rate": share(hits, queries),
        "steps": delta("steps"),
        "failed_steps": delta("failed_steps"),
        "preemptions": delta("preemptions"),
        "host_share": host,
        "compiles_after_warmup": max(compiles) if compiles else None,
    }


def _device() -> dict[str, Any]:
    """The default device of this process."""
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
