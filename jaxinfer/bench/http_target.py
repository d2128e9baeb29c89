"""A load put to a server of OpenAI's shape: `POST /v1/completions` with token ids, streamed.

Each request has a connection of its own, and its latency counts from its intended arrival, connecting
included. What is not OpenAI's (`ignore_eos`, `return_token_ids`, `cache_salt`: jaxinfer and vLLM know them)
is asked for and, where a server refuses it, left out; `describe` says so. Without `return_token_ids` a chunk
with text is one token, and what the usage counts beyond those is put at the time of the last one.

Where /metrics is jaxinfer's own, it is read before and after, and the report has MBU, padding and the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

from jaxinfer.bench import scrape
from jaxinfer.bench.load import Load
from jaxinfer.bench.records import RequestRecord, Status
from jaxinfer.bench.sse import Answer, Url, ask, send
from jaxinfer.bench.target import Advance, Run, counted, seconds_of
from jaxinfer.core import ConfigError

REFUSALS = (400, 401, 403, 404, 413, 422, 429, 503)
"""Statuses of a request that was turned away before any work went into it."""
SCRAPE_S = 10.0
"""The server's MBU and MFU are of the time since the scrape before, where that is at least this long ago."""
TIMEOUT_S = 600.0
"""A request that has not ended by then has failed."""
VOCABULARY = 10_000
"""Ids below this are in every vocabulary in use; a server does not say how many it has."""
EXTRAS: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
"""Asked for where the server knows them, beside a `cache_salt` of this process."""


class HttpTarget:
    """A running server. Raises ConfigError when it cannot be reached or serves no completions.

    `vocab_size`: prompts are drawn from the ids below. `model`: its name there; None: the first that it
    lists. `timeout_s`: a request that has not ended by then has failed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        vocab_size: int = VOCABULARY,
        ignore_eos: bool = True,
        temperature: float = 0.0,
        timeout_s: float = TIMEOUT_S,
    ):
        if vocab_size < 1:
            raise ConfigError(f"vocab_size must be at least 1, got {vocab_size}")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be a number of seconds above 0, got {timeout_s:g}")
        try:
            self.url = Url(url)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.key, self.vocab_size, self.timeout_s = api_key, vocab_size, timeout_s
        self.body: dict[str, Any] = {
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # The same command again sends the same prompts, and is not to find them in the server's cache.
        self.extras = {**EXTRAS, "cache_salt": secrets.token_hex(8)}
        if not ignore_eos:
            del self.extras["ignore_eos"]
        self.left_out: list[str] = []
        _allow_many_sockets()
        asyncio.run(self._meet(model))

    async def _meet(self, model: str | None) -> None:
        """Find the model's name, and out what the server understands."""
        try:
            listed = await self._ask("GET", "/v1/models")
        except OSError as error:
            raise ConfigError(f"no server answers at {self.url.text}: {_named(error)}") from None
        if listed.status != 200:
            raise ConfigError(f"{self.url.text}/v1/models answers {_said(listed)}")
        try:
            cards = json.loads(listed.body)["data"]
            self.card: dict[str, Any] = next((c for c in cards if model in (None, c["id"])), {})
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self.url.text}/v1/models is no list of models") from None
        if not self.card:
            raise ConfigError(f"{self.url.text} does not serve {model!r}; it has {[c['id'] for c in cards]}")
        self.body["model"] = self.card["id"]
        while True:
            body = {**self.body, **self.extras, "prompt": [1, 2, 3], "max_tokens": 2}
            try:
                answer = await self._ask("POST", "/v1/completions", body)
            except OSError as error:
                raise ConfigError(f"{self.url.text}/v1/completions: {_named(error)}") from None
            if answer.status == 200:
                break
            named = next((name for name in self.extras if name.encode() in answer.body), None)
            if answer.status not in (400, 422) or not self.extras:
                raise ConfigError(f"{self.url.text}/v1/completions answers {_said(answer)}")
            self.left_out.append(named or next(iter(self.extras)))
            del self.extras[self.left_out[-1]]

    async def _ask(self, method: str, path: str, body: object = None) -> Answer:
        """Raises OSError, TimeoutError among them."""
        async with asyncio.timeout(self.timeout_s):
            return await ask(self.url, method, path, body, self.key)

    @property
    def most_tokens(self) -> int | None:
        return self.card.get("max_model_len")

    @property
    def most_sequences(self) -> int | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.card["id"],
            "target": self.url.text,
            "device": None,  # the server's; it does not say
            "engine": {name: self.card[name] for name in ("max_model_len",) if name in self.card},
            "not_understood": self.left_out,
        }

    def stats(self) -> Mapping[str, Any] | None:
        """What its /metrics says now, by the names of `Engine.stats`; None where it is no jaxinfer server."""
        return asyncio.run(self._metrics())

    def run(self, load: Load, advance: Advance) -> Run:
        return asyncio.run(self._run(load, advance))

    async def _run(self, load: Load, advance: Advance) -> Run:
        before = await self._metrics()
        records = await self._drive(load, advance)
        after = await self._metrics()
        seconds = seconds_of(records)
        if before is None or after is None:
            return Run(load, records)
        engine = counted(before, after, seconds)
        for name in ("mbu", "mfu"):  # the server knows its machine's limits, and tells the shares alone
            engine[name] = after.get(name) if seconds >= SCRAPE_S else None
        return Run(load, records, engine)

    async def _metrics(self) -> Mapping[str, Any] | None:
        with contextlib.suppress(OSError):
            answer = await self._ask("GET", "/metrics")
            if answer.status == 200:
                return scrape.stats(answer.body.decode("utf-8", "replace"))
        return None

    # ------------------------------------------------------------------------------------ the load

    async def _drive(self, load: Load, advance: Advance) -> list[RequestRecord]:
        """As `drive.drive`, over HTTP."""
        loop = asyncio.get_running_loop()
        requests = [self._request(load, index) for index in range(len(load.arrivals))]
        records: list[RequestRecord | None] = [None] * len(requests)
        start = loop.time()

        async def one(index: int, arrived: float) -> float:
            record = await self._one(load, index, requests[index], arrived, start)
            records[index] = record
            advance(1)
            return record.ended_s

        if load.concurrency is None:
            tasks = []
            for index, arrival in enumerate(load.arrivals):
                if (left := start + arrival.at_s - loop.time()) > 0:
                    await asyncio.sleep(left)
                tasks.append(asyncio.create_task(one(index, arrival.at_s)))
            await asyncio.gather(*tasks)
        else:
            waiting = deque(range(len(requests)))

            async def place() -> None:
                arrived = 0.0
                while waiting:
                    arrived = await one(waiting.popleft(), arrived)

            await asyncio.gather(*(place() for _ in range(min(load.concurrency, len(requests)))))
        return [record for record in records if record is not None]

    def _request(self, load: Load, index: int) -> bytes:
        """Made before time starts: a prompt of thousands of ids takes milliseconds."""
        body = {
            **self.body,
            **self.extras,
            "prompt": load.prompt_ids(index, self.vocab_size),
            "max_tokens": load.arrivals[index].output_tokens,
        }
        return self.url.request("POST", "/v1/completions", json.dumps(body).encode(), self.key)

    async def _one(
        self, load: Load, index: int, request: bytes, arrived: float, start: float
    ) -> RequestRecord:
        loop = asyncio.get_running_loop()
        sent = loop.time() - start
        heard = _Heard()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await send(self.url, request)
            heard.read(answer)
        except TimeoutError:
            heard.fail("failed", f"no end within {self.timeout_s:g} s")
        except OSError as error:
            heard.fail("failed", _named(error))
        ended = heard.ended or loop.time()
        arrival = load.arrivals[index]
        return RequestRecord(
            index=index,
            arrived_s=arrived,
            sent_s=sent,
            token_s=tuple(at - start for at in heard.times),
            ended_s=ended - start,
            prompt_tokens=arrival.num_prompt,
            asked_tokens=arrival.output_tokens,
            cached_tokens=heard.cached,
            status=heard.status,
            finish_reason=heard.finish_reason,
            error=heard.error,
        )


class _Heard:
    """What one answer says, with times by the loop's clock."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ended: float | None = None
        self.cached = 0
        self.status: Status = "ok"
        self.finish_reason: str | None = None
        self.error: str | None = None

    def fail(self, status: Status, error: str) -> None:
        self.status, self.error = status, error

    def read(self, answer: Answer) -> None:
        if answer.status != 200:
            self.fail("refused" if answer.status in REFUSALS else "failed", _said(answer))
            return
        usage: dict[str, Any] = {}
        for at, data in answer.events:
            if data == b"[DONE]":
                continue
            try:
                chunk = json.loads(data)
                if "error" in chunk:
                    self.fail("failed", str(chunk["error"].get("message", chunk["error"]))[:200])
                    return
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    self._choice(choice, at)
            except (ValueError, KeyError, TypeError, AttributeError):
                self.fail("failed", f"an event that is no chunk of a completion: {data[:80]!r}")
                return
        if self.finish_reason is None:
            self.fail("failed", "the stream ended without a finish_reason")
            return
        # Tokens that came without text of their own, from a server that tells no ids.
        untold = int(usage.get("completion_tokens") or 0) - len(self.times)
        if untold > 0 and self.ended is not None:
            self.times += [self.times[-1] if self.times else self.ended] * untold
        self.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        ids = choice.get("token_ids")
        count = len(ids) if ids is not None else int(bool(choice.get("text")))
        self.times += [at] * count
        if choice.get("finish_reason"):
            self.finish_reason, self.ended = choice["finish_reason"], at


def _said(answer: Answer) -> str:
    """Status and message of an answer that is an error."""
    try:
        message = json.loads(answer.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.body.decode("utf-8", "replace")
    return f"{answer.status} {' '.join(str(message).split())[:200]}".strip()


def _named(error: OSError) -> str:
    """What went wrong with a connection; some of these errors have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _allow_many_sockets() -> None:
    """An open loop against a slow server has thousands of requests open; 1024 files is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
