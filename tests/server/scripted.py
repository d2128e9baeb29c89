"""A stand-in for LLM whose engine says what a test tells it to, when the test lets it.

It answers every prompt with its prompt's own bytes, turned to upper case and repeated, one byte a token. No
scheduler, no pages: the real ones have their own tests; here the bridge and the wire are looked at.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jaxinfer.core import Limits, Logprob, Request, RequestError, RequestMetrics, SamplingParams, TokenEvent
from jaxinfer.engine import validate
from jaxinfer.engine.output import LOGPROB_FLOOR

VOCAB = 256


def eventually(check, seconds: float = 30) -> bool:
    """Whether `check()` becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.005)
    return bool(check())


@dataclass
class ScriptedEngine:
    """Each step gives every sequence one token. `gate` lets a test hold the steps back."""

    length: int = 8
    die_at: int | None = None
    """The step at which the engine breaks."""
    fail_at: int | None = None
    """The token of each sequence in whose place it fails."""
    step_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    running: dict[str, dict[int, int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    searches: list[tuple[int, list[tuple[int, str]]]] = field(default_factory=list)
    steps: int = 0
    failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests, "request ids must be unique"
        if len(request.prompt_token_ids) > 100:
            raise RequestError("the pool is too small for this prompt", "prompt")
        self.requests[request.request_id] = request
        self.running[request.request_id] = dict.fromkeys(range(request.sampling.n), 0)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.running.pop(request_id, None)

    def count_search(self, prompt_tokens: int, outputs: Sequence[tuple[int, str]], seconds: float) -> None:
        self.searches.append((prompt_tokens, list(outputs)))

    def step(self) -> list[TokenEvent]:
        self.gate.wait()
        time.sleep(self.step_s)
        self.steps += 1
        if self.steps == self.die_at:
            raise RuntimeError("/srv/secret/path: the device fell off the bus\n" * 1000)
        events = [
            self._advance(request_id, index) for request_id, rows in self.running.items() for index in [*rows]
        ]
        self.running = {request_id: rows for request_id, rows in self.running.items() if rows}
        return events

    def _advance(self, request_id: str, index: int) -> TokenEvent:
        request, rows = self.requests[request_id], self.running[request_id]
        said = rows[index]
        if said == self.fail_at:
            del rows[index]
            return TokenEvent(
                request_id=request_id, index=index, finish_reason="error", error="row of NaN logits"
            )
        prompt = bytes(request.prompt_token_ids).upper()
        token = prompt[said % len(prompt)]
        top = request.sampling.logprobs
        last = said + 1 == min(self.length, request.sampling.max_tokens or self.length)
        rows[index] = said + 1
        if last:
            del rows[index]
        return TokenEvent(
            request_id=request_id,
            index=index,
            text=chr(token),
            token_ids=(token,),
            logprobs=None if top is None else (_known(token, top),),
            finish_reason="length" if last else None,
            metrics=RequestMetrics(cached_tokens=1) if last else None,
            prompt_logprobs=_of_prompt(request) if (said, index) == (0, 0) else None,
        )


def _of_prompt(request: Request) -> tuple[dict[int, Logprob] | None, ...] | None:
    top, ids = request.sampling.prompt_logprobs, request.prompt_token_ids
    return None if top is None else (None, *(_known(token, top) for token in ids[1:]))


def _known(token: int, top: int) -> dict[int, Logprob]:
    """The chosen token is the second most likely; the likeliest ones are 1, 2, 3, ... below it."""
    entries = [(token - 1, -0.5), (token, -1.0), (token - 2, LOGPROB_FLOOR)] + [(i, -9.0) for i in range(30)]
    known = {i: Logprob(value, rank, chr(i)) for rank, (i, value) in enumerate(entries[: max(top, 0)], 1)}
    known.setdefault(token, Logprob(-1.0, 2, chr(token)))
    return known


class ScriptedTokenizer:
    """One byte, one token."""

    bos_token = eos_token = ""
    adds_bos = False
    special_texts = SimpleNamespace(ids={})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [f"<{token_id:02X}>" for token_id in token_ids]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class ScriptedLLM:
    """What the server uses of an LLM."""

    def __init__(self, engine: ScriptedEngine | None = None, max_num_seqs: int = 4):
        self.engine = engine or ScriptedEngine()
        self.tokenizer = ScriptedTokenizer()
        self.model_name = "scripted"
        self.chat_template = SimpleNamespace(takes_tools=True, tags_calls=True, source="the template")
        self.limits = Limits(
            num_pages=64,
            page_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=128,
            vocab_size=VOCAB,
        )
        self._ids = itertools.count()

    def measure_machine(self) -> None:
        """There is no machine: nothing to measure."""

    def prepare(
        self,
        prompt: str | list[int],
        sampling: SamplingParams | dict[str, Any] | None = None,
        **options: Any,
    ) -> Request:
        if not isinstance(sampling, SamplingParams):
            sampling = SamplingParams(**(sampling or {}))
        ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
        if not ids:
            raise RequestError("prompt is empty", "prompt")
        if any(not 0 <= i < VOCAB for i in ids):
            raise RequestError(f"prompt holds a token id outside 0..{VOCAB - 1}", "prompt")
        if len(ids) >= self.limits.max_model_len:
            raise RequestError(f"prompt has {len(ids)} tokens; max_model_len is 128", "prompt")
        text = prompt if isinstance(prompt, str) else None
        request_id = f"r{next(self._ids)}"
        request = Request(
            request_id=request_id, prompt_token_ids=ids, sampling=sampling, prompt=text, **options
        )
        validate(request, self.limits)
        structure = sampling.structure
        if structure is not None and structure.kind == "json_schema" and "bad" in structure.value:
            raise RequestError(f"{structure.param} cannot be compiled", structure.param)
        return request

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([0] if add_special_tokens and "BOS" in text else []) + self.tokenizer.encode(text)

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)
        text += "a:" if options.get("add_generation_prompt", True) else ""
        return list(text.encode())

    def prepare_chat(
        self, messages: list[dict[str, Any]], sampling: SamplingParams | dict[str, Any], **options: Any
    ) -> Request:
        own = {name: options.pop(name) for name in ("priority", "cache_salt") if name in options}
        return self.prepare(self.encode_chat(messages, **options), sampling, **own)
