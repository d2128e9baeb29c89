"""Thousands of requests over real sockets, a tenth of them broken and a tenth abandoned: nothing is lost,
nothing grows, and SIGTERM amid it all ends with status 0."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import eventually
from served_script import Served, served

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

REQUESTS, CLIENTS = 3000, 22
MODEL = Path(__file__).parent.parent / "golden" / "stories260k"
WORDS = ["Once", "upon", "a", "time", "there", "was", "a", "little", "cat", "who", "liked", "milk", "é☃"]
BROKEN = [
    b"{", b"\xff", b"null", b'{"prompt": NaN}', b'{"prompt": [999999]}', b'{"prompt": []}', b"[" * 2000,
    b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "n": 1000}', b'{"prompt": "a", "foo": 1}',
    b'{"prompt": "' + b"x " * 9000 + b'"}', b'{"prompt": "a", "structured_outputs": {"regex": "("}}',
]  # fmt: skip


def strictly(text: bytes) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


class Client:
    """Sends requests one after the other, each on a connection of its own, and judges what comes back."""

    def __init__(self, port: int, seed: int, ends: Counter[str]):
        self.port, self.draw, self.ends = port, random.Random(seed), ends

    def body(self) -> dict[str, Any]:
        draw = self.draw
        body: dict[str, Any] = {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0, 1]),
            "stream": draw.random() < 0.5,
            "n": draw.choice([1, 1, 1, 2]),
            "logprobs": draw.choice([None, None, 2]),
            "stop": draw.choice([None, None, "the"]),
        }
        if draw.random() < 0.05:
            body["structured_outputs"] = {"regex": draw.choice(["[ab]{1,3}", "(yes|no)"])}
        return body

    async def once(self) -> None:
        kind = self.draw.random()
        body = self.body()
        data = self.draw.choice(BROKEN) if kind < 0.1 else json.dumps(body).encode()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            self.ends["refused"] += 1
            return
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}"
        try:
            if 0.1 <= kind < 0.2:
                await self.leave(reader, writer, head.encode() + b"\r\n\r\n" + data)
                return
            writer.write(head.encode() + b"\r\n\r\n" + data)
            async with asyncio.timeout(150):  # the first ones wait for programs to be compiled
                answer = await reader.read()
            self.judge(answer, broken=kind < 0.1, stream=body["stream"])
            if b" 429 " in answer[:20]:
                await asyncio.sleep(0.2)
        except ConnectionResetError:
            self.ends["reset"] += 1
        finally:
            writer.close()

    async def leave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        """Go away amid the request, before the answer, or after its first bytes."""
        how = self.draw.random()
        writer.write(request[: self.draw.randrange(len(request))] if how < 0.3 else request)
        if how < 0.6:
            await asyncio.sleep(self.draw.random() * 0.05)
        else:
            await reader.read(100)
        writer.transport.abort()
        self.ends["left"] += 1

    def judge(self, answer: bytes, *, broken: bool, stream: bool) -> None:
        head, _, said = answer.partition(b"\r\n\r\n")
        if not head:
            self.ends["nothing"] += 1
            return
        status = int(head.split(b" ")[1])
        if status != 200:
            error = strictly(said)["error"]
            assert error["message"], answer
            self.ends["overloaded" if status == 429 else "stopping" if status == 503 else f"{status}"] += 1
            assert status in (429, 503) or (broken and status == 400), answer[:2000]
            return
        assert not broken, answer[:2000]
        if not stream:
            assert all(choice["finish_reason"] in ("stop", "length") for choice in strictly(said)["choices"])
            self.ends["answer"] += 1
            return
        # Chunked transfer: sizes stand on lines of their own, and every event is in one chunk.
        events = [line[6:] for line in said.split(b"\n") if line.startswith(b"data: ")]
        assert said.endswith(b"0\r\n\r\n"), "the stream was cut"
        if events[-1] != b"[DONE]":
            assert strictly(events[-1])["error"]["code"] == "engine_stopped", events[-1]
            self.ends["stream stopped"] += 1
            return
        for event in events[:-1]:
            strictly(event)
        self.ends["stream"] += 1


async def run(port: int, count: int, seed: int, ends: Counter[str]) -> None:
    left = iter(range(count))

    async def one(client: Client) -> None:
        for _ in left:
            await client.once()

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(one(Client(port, seed * 1000 + number, ends)))


def when_idle(server: Served) -> dict[str, Any]:
    assert eventually(lambda: httpx.get(f"{server.url}/health", timeout=20).json()["sequences"] == 0, 30)
    return httpx.get(f"{server.url}/soak", timeout=20).json()


async def test_thousands_of_requests_and_a_sigterm() -> None:
    ends: Counter[str] = Counter()
    script = str(Path(__file__).parent / "soak_script.py")
    with served([script, str(MODEL)], ready_s=200) as server:
        log: list[str] = []
        assert server.process.stderr is not None
        reading = threading.Thread(target=lambda: log.extend(server.process.stderr or ()))
        reading.start()
        await run(server.port, REQUESTS // 3, 1, ends)
        before = await asyncio.to_thread(when_idle, server)
        await run(server.port, REQUESTS - REQUESTS // 3, 2, ends)
        after = await asyncio.to_thread(when_idle, server)
        assert sum(ends.values()) == REQUESTS
        assert not {"reset", "nothing", "refused", "stopping", "stream stopped"} & set(ends), ends
        for held in (before, after):
            assert (held["pages_live"], held["running"], held["waiting"]) == (0, 0, 0)
            assert (held["compiles_after_warmup"], held["invariant_failures"]) == (0, 0)
            assert held["problems"] == []
        assert after["preemptions"] > before["preemptions"] > 20, "the pool is tight enough for some"
        assert after["tasks"] <= before["tasks"], (before, after)
        assert after["resident"] - before["resident"] < 30e6, (before, after)
        print(ends, before, after)

        last: Counter[str] = Counter()
        going = asyncio.create_task(run(server.port, REQUESTS, 3, last))
        while last.total() < 100:
            await asyncio.sleep(0.01)
        server.process.terminate()
        await going
        assert await asyncio.to_thread(server.process.wait, 40) == 0, log[-50:]
        await asyncio.to_thread(reading.join, 10)
    # A connection that the server had not taken up when it closed its door was not accepted: it may be reset.
    assert last["nothing"] + last["reset"] <= CLIENTS, last
    assert last["refused"] > 0
    assert json.loads(log[-1]) == {"pages_live": 0, "problems": []}
    assert not [line for line in log if "Traceback" in line]
