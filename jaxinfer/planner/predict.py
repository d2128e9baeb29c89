"""What requests will see: time to the first token, time per token, from the time of each step that they take.

The steps are those that the scheduler would make of requests that arrive together: decodes first, then chunks
in the order of arrival within the token budget, padded to the engine's buckets. (Loads in which requests come
and go are `jaxinfer.simulator`'s, with the scheduler itself.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxinfer.config import StepShape, cheapest_shape, sampled_rows, shape_ladder
from jaxinfer.core import ConfigError
from jaxinfer.planner.costs import Span, StepWork
from jaxinfer.planner.step_time import StepTime

MOST_STEPS = 30_000
"""Steps of prompts that are worked out one by one: some seconds."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Works of steps with the padding of the buckets of an engine of these limits.

    `padded` False: steps of exactly their tokens, as a floor wants them.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    platform: str = "gpu"
    padded: bool = True

    def ladder(self) -> tuple[StepShape, ...]:
        return _ladder(self.max_num_seqs, self.max_num_batched_tokens, self.platform)

    def work(self, time: StepTime, spans: Sequence[Span], rows: int) -> StepWork:
        """The step of these slices, of which `rows` sample."""
        if not self.padded:
            return time.costs.work(spans, rows)
        ones = sum(count == 1 for _, count in spans)
        chunk_tokens = sum(count for _, count in spans if count > 1)
        ladder = self.ladder()
        shape = cheapest_shape(ladder, ones, len(spans) - ones, chunk_tokens)
        return time.costs.work(spans, rows, places=shape.tokens, head_places=sampled_rows(ladder, rows))


@functools.lru_cache
def _ladder(max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> tuple[StepShape, ...]:
    return shape_ladder(max_num_seqs, max_num_batched_tokens, platform=platform)


def prefill_steps(lengths: Sequence[int], budget: int) -> Iterator[tuple[list[Span], list[int]]]:
    """The steps until each of `lengths` prompts, arrived together, has its first token: slices, and the
    prompts whose first token the step samples. Raises ConfigError for more than MOST_STEPS."""
    assert len(lengths) <= budget, f"{len(lengths)} sequences cannot all decode within {budget} tokens a step"
    if (least := sum(lengths) // budget) > MOST_STEPS:
        raise ConfigError(
            f"{len(lengths)} prompts of {max(lengths)} tokens take {least} steps of {budget} tokens, and at "
            f"most {MOST_STEPS} are worked out: shorter or fewer prompts, or a larger max_num_batched_tokens"
        )
    done = 0
    contexts: list[int] = []
    progress = 0
    while done < len(lengths):
        spans: list[Span] = [(context, 1) for context in contexts]
        room = budget - len(spans)
        contexts = [context + 1 for context in contexts]
        firsts: list[int] = []
        while room > 0 and done < len(lengths):
            count = min(room, lengths[done] - progress)
            spans.append((progress, count))
            room -= count
            progress += count
            if progress == lengths[done]:
                firsts.append(done)
                contexts.append(progress)
                done, progress = done + 1, 0
        yield spans, firsts


def ttft_s(time: StepTime, lengths: Sequence[int], steps: Steps | None = None) -> list[float]:
    """Seconds to the first token of each of these prompts, arrived together at an idle engine. Raises
    ConfigError for prompts that take more than MOST_STEPS."""
    steps = steps or Steps()
    now, first = 0.0, [0.0] * len(lengths)
    for spans, firsts in prefill_steps(lengths, steps.max_num_batched_tokens):
        sampling = len(firsts) + sum(count == 1 for _, count in spans)
        now += time.seconds(steps.work(time, spans, min(sampling, len(spans))))
        for index in firsts:
            first[index] = now
    return first


def tpot_s(time: StepTime, batch: int, context: int, output: int = 1, steps: Steps | None = None) -> float:
    """Seconds a token while `batch` sequences decode together, `context` tokens before the first of `output`.

    The mean over the output: contexts grow, time is linear in them, so that the middle stands for all.
    """
    steps = steps or Steps()
    middle = context + (output - 1) // 2
    return time.seconds(steps.work(time, [(middle, 1)] * batch, batch))


def tokens_per_s(time: StepTime, batch: int, context: int, output: int, steps: Steps | None = None) -> float:
    """New tokens a second of `batch` requests that arrive together and run to their end."""
    whole = ttft_s(time, [context] * batch, steps)[-1]
    whole += (output - 1) * tpot_s(time, batch, context, output, steps)
    return batch * output / whole
