"""The times of one answer, in the words of vLLM's per-request metrics."""

from __future__ import annotations

from jaxinfer.core import RequestMetrics


def timings(metrics: RequestMetrics) -> dict[str, float]:
    """Milliseconds, and tokens a second; without what needs a token that never came.

    `queue_time_ms` is from the arrival to the first step, `time_to_first_token_ms` from there to the first
    token, `generation_time_ms` from the first token to the last, `mean_itl_ms` the mean gap between two, and
    `tokens_per_second` all tokens over the time from the first step to the last token.
    """
    known: dict[str, float] = {}
    queued, started = metrics.queued_ts, metrics.scheduled_ts
    first, last, tokens = metrics.first_token_ts, metrics.last_token_ts, metrics.num_generation_tokens
    if queued is not None and started is not None:
        known["queue_time_ms"] = 1e3 * (started - queued)
    if started is None or first is None or last is None:
        return known
    known["time_to_first_token_ms"] = 1e3 * (first - started)
    known["generation_time_ms"] = 1e3 * (last - first)
    if tokens > 1:
        known["mean_itl_ms"] = 1e3 * (last - first) / (tokens - 1)
    if last > started:
        known["tokens_per_second"] = tokens / (last - started)
    return known
