"""A loop of a few lines around a runner, without an engine: what the tests of this room drive it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.core import Draw, Sampled, SamplingParams, Slice, StepPlan
from jaxinfer.runtime import JaxRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Text:
    """A sequence under way: its tokens so far, its pages, and what the runner said of each new token."""

    uid: int
    tokens: list[int]
    pages: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    computed: int = 0
    num_prompt: int = 0
    sampled: list[Sampled] = field(default_factory=list)
    scores: list[Sampled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    def slice(self, count: int, page_size: int) -> Slice:
        """The next `count` tokens; a prompt's are scored when the sampling asks for it."""
        end = self.computed + count
        targets: list[int] = []
        if self.sampling.prompt_logprobs is not None and count > 1:
            targets = self.tokens[self.computed + 1 : min(end + 1, self.num_prompt)]
        return Slice(
            self.uid, self.computed, tuple(self.tokens[self.computed : end]),
            self.pages[: -(-end // page_size)], emit=end == len(self.tokens), num_prompt=self.num_prompt,
            scored=self.sampling.prompt_logprobs, targets=tuple(targets),
        )  # fmt: skip

    def draw(self) -> Draw:
        return Draw(self.sampling, seed=1000 + self.uid, position=len(self.tokens))


def texts(
    runner: JaxRunner, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], *, seed: int = 0
) -> list[Text]:
    """One Text a prompt, each with pages of its own in a shuffled order, as many as the pool gives them."""
    free = np.random.default_rng(seed).permutation(np.arange(1, runner.num_pages)).tolist()
    each = min(runner.table_width, len(free) // len(prompts))
    return [
        Text(uid, list(prompt), tuple(free[uid * each : (uid + 1) * each]), params)
        for uid, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]


def step(runner: JaxRunner, number: int, parts: Sequence[tuple[Text, int]]) -> None:
    """Run `count` tokens of each text, ones first, and take down what came of it."""
    parts = sorted(parts, key=lambda part: part[1] > 1)
    plan = StepPlan(number, tuple(text.slice(count, runner.page_size) for text, count in parts))
    pending = runner.dispatch(plan)
    runner.sample(pending, [parts[index][0].draw() for index in plan.emitting])
    result = runner.fetch(pending)
    for index, ((text, count), sampled) in enumerate(zip(parts, result.sampled, strict=True)):
        text.computed += count
        text.scores += result.scores[index] if result.scores else ()
        if sampled is not None:
            text.sampled.append(sampled)
            text.tokens.append(sampled.token_id)


def run(
    runner: JaxRunner,
    running: Sequence[Text],
    new_tokens: int,
    *,
    chunk: Callable[[], int] = lambda: 1 << 30,
    budget: int = 32,
) -> None:
    """Until each text has `new_tokens` sampled: decodes first, then chunks of at most `chunk()` tokens."""
    number = 0
    while left := [text for text in running if len(text.sampled) < new_tokens]:
        parts, room = [], budget
        for text in sorted(left, key=lambda text: len(text.tokens) - text.computed > 1):
            count = min(len(text.tokens) - text.computed, room, max(1, chunk()))
            if count:
                parts.append((text, count))
                room -= count
        step(runner, number, parts)
        number += 1
