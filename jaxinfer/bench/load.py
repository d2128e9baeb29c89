"""What a run asks for: requests, when each should arrive, how long prompt and answer are.

A load is data: made from a seed, the same on every machine, put to a real engine, a simulated one or a
server. In an open loop requests arrive when they do, however the server fares, as from many users who do not
know of each other; in a closed loop (`concurrency`) the next one comes when one has ended, which hides an
overload.

A file of a trace has one JSON object a line: `{"at_s": 0.25, "prompt_tokens": 512, "output_tokens": 64}`,
with the offset from the start in seconds; `prompt_tokens` is a count or a list of token ids.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.bench.lengths import MOST_TOKENS, Lengths
from jaxinfer.core import ConfigError, Limits, Request, SamplingParams
from jaxinfer.engine import check_length

_ARRIVALS, _PROMPT_LENGTHS, _OUTPUT_LENGTHS, _IDS, _SHARED_IDS, _FIRST_IDS = range(6)
"""Streams of a seed: what is drawn of one does not move when more is drawn of another."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s`: when it should arrive, in seconds from the start of the run (0 in a closed loop,
    where it arrives when a place is free). `prompt_tokens`: the token ids, or how many are drawn for it; the
    first `shared_tokens` of drawn ones are those of all requests of the same `group`.
    """

    at_s: float
    prompt_tokens: int | tuple[int, ...]
    output_tokens: int
    shared_tokens: int = 0
    group: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.prompt_tokens if isinstance(self.prompt_tokens, int) else len(self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival. `concurrency`: a closed loop of so many; None: an open loop.

    `about` says how it was made, for reports.
    """

    arrivals: tuple[Arrival, ...]
    seed: int = 0
    concurrency: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def prompt_ids(self, index: int, vocab_size: int) -> tuple[int, ...]:
        """The token ids of one prompt; the same for the same load and vocabulary.

        No two drawn prompts begin with the same id (unless there are more of them than ids), so that the
        prefix cache finds what was meant to be shared and nothing else.
        """
        arrival = self.arrivals[index]
        if not isinstance(arrival.prompt_tokens, int):
            return arrival.prompt_tokens
        count, shared = arrival.prompt_tokens, min(arrival.shared_tokens, arrival.prompt_tokens)
        ids: list[int] = []
        if shared:
            ids = self._drawn(_SHARED_IDS, arrival.group, shared, vocab_size)
        if count > shared:
            ids += self._drawn(_IDS, index, count - shared, vocab_size)
        return tuple(ids)

    def _drawn(self, stream: int, index: int, count: int, vocab_size: int) -> list[int]:
        ids = _generator(self.seed, stream, index).integers(0, vocab_size, count)
        ids[0] = (index + _first_id(self.seed, stream, vocab_size)) % vocab_size
        return ids.tolist()

    def request(self, index: int, request_id: str, sampling: SamplingParams, limits: Limits) -> Request:
        """One request for an engine of these limits.

        Raises RequestError, as the engine would, for a prompt that is longer than the engine takes and not
        drawn yet: it may be far longer, and is not worth drawing.
        """
        arrival = self.arrivals[index]
        if sampling.max_tokens != arrival.output_tokens:
            least = min(sampling.min_tokens, arrival.output_tokens)
            sampling = dataclasses.replace(sampling, max_tokens=arrival.output_tokens, min_tokens=least)
        if isinstance(arrival.prompt_tokens, int) and arrival.num_prompt >= limits.max_model_len:
            check_length(arrival.num_prompt, sampling, limits)
        ids = self.prompt_ids(index, limits.vocab_size)
        return Request(request_id=request_id, prompt_token_ids=ids, sampling=sampling)

    @property
    def offered_rate(self) -> float | None:
        """Requests a second that arrive; None in a closed loop and where all come at once."""
        last = self.arrivals[-1].at_s if self.arrivals else 0.0
        if self.concurrency is not None or last <= 0:
            return None
        return len(self.arrivals) / last

    @property
    def prompt_total(self) -> int:
        return sum(arrival.num_prompt for arrival in self.arrivals)

    @property
    def output_total(self) -> int:
        return sum(arrival.output_tokens for arrival in self.arrivals)

    def described(self) -> dict[str, Any]:
        """As reports tell it: how it was made, with its seed, and what came of it in numbers."""
        return {
            **self.about,
            "seed": self.seed,
            "requests": len(self.arrivals),
            "concurrency": self.concurrency,
            "offered_requests_per_s": self.offered_rate,
            "prompt_tokens": self.prompt_total,
            "output_tokens": self.output_total,
        }


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of drawn lengths. Their first `shared` tokens are one of `groups` prefixes, on top of their own
    length: a system prompt that many requests have in common."""

    lengths: Lengths
    shared: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if self.shared < 0 or self.groups < 1:
            raise ConfigError(
                "a shared prefix has at least 0 tokens and 1 group; "
                f"got {self.shared} tokens, {self.groups} groups"
            )


# ------------------------------------------------------------------------------------------ made loads


def poisson(
    rate: float, count: int, prompts: Prompts, outputs: Lengths, *, seed: int = 0, burstiness: float = 1.0
) -> Load:
    """An open loop of `rate` requests a second. The gaps between arrivals are gamma-distributed with the
    shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier. Raises ConfigError."""
    _check_rate(rate)
    if not 1e-3 <= burstiness < math.inf:
        raise ConfigError(f"burstiness must be a number of at least 0.001, got {burstiness!r}")
    gaps = _generator(seed, _ARRIVALS).gamma(burstiness, 1.0 / (rate * burstiness), _checked_count(count))
    about = {"kind": "poisson" if burstiness == 1.0 else "gamma", "rate": rate, "burstiness": burstiness}
    return _made(np.cumsum(gaps).tolist(), prompts, outputs, seed, about)


def constant(rate: float, count: int, prompts: Prompts, outputs: Lengths, *, seed: int = 0) -> Load:
    """An open loop of one request each 1 / `rate` seconds. Raises ConfigError."""
    _check_rate(rate)
    times = [index / rate for index in range(_checked_count(count))]
    return _made(times, prompts, outputs, seed, {"kind": "constant", "rate": rate})


def closed(concurrency: int, count: int, prompts: Prompts, outputs: Lengths, *, seed: int = 0) -> Load:
    """A closed loop: `concurrency` requests are open, until `count` have been. Raises ConfigError."""
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
    return _made([0.0] * _checked_count(count), prompts, outputs, seed, {"kind": "closed"}, concurrency)


def at_once(count: int, prompts: Prompts, outputs: Lengths, *, seed: int = 0) -> Load:
    """All `count` requests at the start: a batch. Raises ConfigError."""
    return _made([0.0] * _checked_count(count), prompts, outputs, seed, {"kind": "at once"})


def read_trace(path: str | Path, *, seed: int = 0, speed: float = 1.0) -> Load:
    """The load of a trace file, `speed` times as fast. Raises OSError, and ConfigError naming the line."""
    if not 1e-6 <= speed <= 1e6:
        raise ConfigError(f"the speed of a trace must lie from 1e-6 to 1e6, got {speed!r}")
    arrivals: list[Arrival] = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                arrivals.append(_arrival(line, f"{path}:{number}", speed))
    if not arrivals:
        raise ConfigError(f"{path} holds no request; a line looks like {_LOOKS}")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    about = {"kind": "trace", "file": Path(path).name, "speed": speed}
    return Load(tuple(arrivals), seed, None, about)


_LOOKS = '{"at_s": 0.25, "prompt_tokens": 512, "output_tokens": 64}'


def _arrival(line: bytes, where: str, speed: float) -> Arrival:
    try:
        given = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(given, dict) or set(given) != {"at_s", "prompt_tokens", "output_tokens"}:
        raise ConfigError(f"{where}: a line looks like {_LOOKS}; got {line.decode().strip()[:120]}")
    at_s, prompt, output = given["at_s"], given["prompt_tokens"], given["output_tokens"]
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s < 1e9:
        raise ConfigError(f"{where}: at_s must be a number of seconds of at least 0, got {at_s!r}")
    if isinstance(prompt, list):
        if not prompt or any(type(i) is not int or i < 0 for i in prompt):
            raise ConfigError(f"{where}: prompt_tokens must be a count, or a list of token ids")
        prompt = tuple(prompt)
    elif type(prompt) is not int or not 1 <= prompt <= MOST_TOKENS:
        raise ConfigError(f"{where}: prompt_tokens must be at least 1, got {prompt!r}")
    if type(output) is not int or not 1 <= output <= MOST_TOKENS:
        raise ConfigError(f"{where}: output_tokens must be at least 1, got {output!r}")
    return Arrival(at_s / speed, prompt, output)


def _made(
    times: list[float],
    prompts: Prompts,
    outputs: Lengths,
    seed: int,
    about: dict[str, Any],
    concurrency: int | None = None,
) -> Load:
    count = len(times)
    own = prompts.lengths.draw(_generator(seed, _PROMPT_LENGTHS), count)
    out = outputs.draw(_generator(seed, _OUTPUT_LENGTHS), count)
    arrivals = tuple(
        Arrival(at_s, prompts.shared + own[i], out[i], prompts.shared, i % prompts.groups)
        for i, at_s in enumerate(times)
    )
    about = {**about, "prompt": str(prompts.lengths), "output": str(outputs)}
    if prompts.shared:
        about |= {"shared_prefix": prompts.shared, "shared_groups": prompts.groups}
    return Load(arrivals, seed, concurrency, about)


@functools.lru_cache(maxsize=64)
def _first_id(seed: int, stream: int, vocab_size: int) -> int:
    """Where the first ids of prompts count from: far from where those of another seed do, mostly."""
    return int(_generator(seed, _FIRST_IDS, stream).integers(vocab_size))


def _generator(seed: int, *stream: int) -> np.random.Generator:
    """That of `default_rng([seed, *stream])`, which spends most of its time on splitting ints into words."""
    words = []
    for number in (seed % 2**64, *stream):
        if number < 0:
            raise ValueError(f"streams of a seed are counted from 0, got {number}")
        words.append(number & 0xFFFFFFFF)
        while number := number >> 32:
            words.append(number & 0xFFFFFFFF)
    return np.random.default_rng(np.array(words, np.uint32))


def _check_rate(rate: float) -> None:
    if not 1e-6 <= rate < 1e6:
        raise ConfigError(f"rate must be at least 1e-6 and below 1e6 requests a second, got {rate!r}")


def _checked_count(count: int) -> int:
    if not 1 <= count <= 10_000_000:
        raise ConfigError(f"a load has from 1 to 10000000 requests, got {count}")
    return count
