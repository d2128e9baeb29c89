"""Which wall binds a server now, and what to change first: from two readings of its /metrics.

All figures are of the time between the two readings; those who wait are the fewer of both looks. The rules
are tried in the order of the page below; the first that holds names the wall, and all that hold bring their
advice.

    broken       steps fail, or /health says no
    compiling    programs were compiled after the warm-up
    idle         no step ran
    capacity     sequences wait, or were preempted, while pages are short
    seats        sequences wait though pages are free: max_num_seqs are running; or requests are refused
    budget       sequences wait though pages and seats are free: steps are full, max_num_batched_tokens
    host         the host's Python takes most of a step
    bandwidth    most of the memory bandwidth is in use
    compute      most of the matmul rate is in use
    padding      much of what runs is padding
    latency      none of them: the steps are short of work
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxinfer.reading import Reading

BUSY = 0.5
"""Share of a limit from which on it is said to bind: kernels reach 60-90 % of one."""
FULL = 0.9
"""Share of the pages that sequences hold, from which on there are few to have."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`wall`: one of the page above; `figures`: what it is drawn from; `advice`: the first thing first."""

    wall: str
    figures: dict[str, float | None]
    advice: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        return {"wall": self.wall, "figures": self.figures, "advice": list(self.advice)}

    def as_text(self) -> str:
        lines = [f"wall: {self.wall}", "figures"]
        for name, value in self.figures.items():
            lines.append(f"  {name.replace('_', ' ')}: {'-' if value is None else f'{value:.4g}'}")
        lines.append("what to change, the first first" if self.advice else "nothing to change")
        return "\n".join([*lines, *(f"  {number}. {text}" for number, text in enumerate(self.advice, 1))])


def diagnose(before: Reading, after: Reading, seconds: float) -> Diagnosis:
    """Of the `seconds` between two readings of one server."""

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - (0.0 if anew else before(name, **labels))

    # A server that started anew in between counts from zero.
    anew = after("steps_total") < before("steps_total")
    steps = grown("steps_total")
    host = {part: grown("host_seconds_total", part=part) for part in ("engine", "dispatch", "wait")}
    host_share = _share(host["engine"] + host["dispatch"], sum(host.values()))
    bandwidth = after("machine_bandwidth_bytes_per_second")
    rate = after("machine_operations_per_second")
    mbu = grown("moved_bytes_total") / seconds / bandwidth if bandwidth else None
    mfu = grown("operations_total") / seconds / rate if rate else None
    slots = grown("step_slots_total")
    figures: dict[str, float | None] = {
        "steps_per_s": steps / seconds,
        "generated_tokens_per_s": grown("generation_tokens_total") / seconds,
        "tokens_per_step": _share(grown("step_tokens_total"), steps),
        "running": after("num_requests_running"),
        "waiting": min(before("num_requests_waiting"), after("num_requests_waiting")),
        "pages_in_use": after("kv_cache_usage_perc"),
        "preemptions": grown("num_preemptions_total"),
        "prefix_hits": _share(grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")),
        "host_share": host_share,
        "mbu": mbu,
        "mfu": mfu,
        "padding": None if not slots else 1.0 - grown("step_tokens_total") / slots,
        "failed_steps": grown("failed_steps_total"),
        "compiles": grown("compiles_total"),
        "refused": sum(
            grown("http_requests_total", **dict(labels))
            for (name, labels) in after.samples
            if name == "jaxinfer_http_requests_total" and dict(labels).get("status") == "429"
        ),
    }
    for name, short in (("time_to_first_token", "ttft"), ("inter_token_latency", "gap")):
        for share in (0.5, 0.95):
            earlier = [] if anew else before.buckets(f"{name}_seconds")
            value = _quantile(earlier, after.buckets(f"{name}_seconds"), share)
            figures[f"{short}_p{round(100 * share)}_s"] = value
    found = _rules(figures, after)
    if anew:
        found.insert(0, ("broken", "the server started anew while it was watched: read its log first"))
    return Diagnosis(found[0][0], figures, tuple(text for _, text in found if text))


def _rules(f: dict[str, float | None], after: Reading) -> list[tuple[str, str]]:
    """(wall, advice) of all rules that hold, in their order."""

    def over(name: str, limit: float) -> bool:
        value = f[name]
        return value is not None and value > limit

    found = []
    if not after("engine_healthy") or over("failed_steps", 0):
        found.append(("broken", "steps fail or the engine is not healthy: read the server's log first"))
    if over("compiles", 0):
        found.append(("compiling", "programs compile amid requests: start with --warmup full"))
    if not f["steps_per_s"]:
        found.append(("idle", ""))
        return found
    short = over("pages_in_use", FULL)
    if over("preemptions", 0) or (short and over("waiting", 0)):
        found.append((
            "capacity",
            "pages are short: --kv-cache-dtype int8 or fp8_e4m3, a model with fewer KV heads, more "
            "--memory-utilization or --num-pages, or fewer --max-num-seqs so that fewer are preempted",
        ))  # fmt: skip
    elif over("waiting", 0):
        seats = after("max_num_seqs")
        if not seats or over("running", seats - 1):
            found.append((
                "seats",
                "requests wait while pages are free: raise --max-num-seqs, or add a server",
            ))  # fmt: skip
        else:
            found.append((
                "budget",
                "requests wait while pages and seats are free: their prompts fill every step; raise "
                "--max-num-batched-tokens (gaps between tokens grow with it), share prefixes, or add a "
                "server",
            ))  # fmt: skip
    if over("refused", 0):
        found.append(
            ("seats", "requests are refused (429): add a server, or raise --max-queue to let them wait")
        )
    if over("host_share", BUSY):
        found.append((
            "host",
            "the host takes most of each step: keep --async-scheduling on, ask for fewer logprobs and "
            "structures, more sequences a step, or a faster core",
        ))  # fmt: skip
    walls = sorted((name for name in ("mbu", "mfu") if over(name, BUSY)), key=lambda name: -(f[name] or 0.0))
    for name in walls:
        found.append({
            "mbu": (
                "bandwidth",
                "memory bandwidth is in use: more sequences a step share the weights (until K/V dominate); "
                "then --quantization, an 8-bit --kv-cache-dtype, or a model with fewer KV heads",
            ),
            "mfu": (
                "compute",
                "the matmul rate is in use: prompts cost it; share prefixes, shorten prompts, a smaller "
                "--max-num-batched-tokens to keep gaps short, or more devices",
            ),
        }[name])  # fmt: skip
    if over("padding", BUSY):
        found.append((
            "padding",
            "most of what runs is padding: --max-num-seqs and --max-num-batched-tokens nearer to the load",
        ))  # fmt: skip
    return found or [
        ("latency", "the device is not loaded: only a faster step (a smaller or quantised model) helps")
    ]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _quantile(
    before: list[tuple[float, float]], after: list[tuple[float, float]], share: float
) -> float | None:
    """Of the values between two readings of a histogram, straight lines within a bucket (Prometheus' rule);
    None when there are none."""
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((wanted - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def read(url: str, api_key: str | None = None, timeout_s: float = 10.0) -> Reading:
    """What a server says now. Raises ConfigError when it cannot be asked, or says something else."""
    import urllib.error
    import urllib.request

    from jaxinfer.core import ConfigError

    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"a server's address begins with http:// or https://, got {url!r}")
    request = urllib.request.Request(address)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return Reading.parse(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{address} answers {error.code} ({error.reason})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{address} cannot be read: {error}") from None
