"""What HTTP costs: `python -m benchmarks.http [MODEL]`.

The same work twice on one loaded model, interleaved: `LLM.generate` on a batch of prompts, and as many
streaming clients of the server on loopback, one prompt each. The clients are one process of their own that
does no more than read and count. Prompts are random and new in every round, so that no prefix is found.

One JSON line at the end has the medians in tokens/s, and the ratio of each round. On a machine where others
compute, `cpu_ratio` says more: the processor time of this process (model, engine and server, all threads) for
`generate`, over that for the server; and `http_cpu_us_per_token` is the difference.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from jaxinfer import LLM, SamplingParams


class Reader(asyncio.Protocol):
    """One client: sends one request, counts what comes, remembers the end of it."""

    def __init__(self, request: bytes):
        self.request, self.chunks, self.tail = request, 0, b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")
        self.tail = (self.tail + data)[-1000:]
        if b"data: [DONE]" in self.tail and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError(f"closed early: {self.tail!r}"))


async def read_all(port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask for all at once: seconds from the first byte to the last, tokens and chunks."""
    requests = []
    for body in bodies:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        requests.append(head.encode() + data)
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    made = [await loop.create_connection(lambda r=r: Reader(r), "127.0.0.1", port) for r in requests]
    await asyncio.gather(*[reader.done for _, reader in made])
    seconds = time.perf_counter() - began
    tokens = 0
    for transport, reader in made:
        usage = next(line for line in reader.tail.split(b"\n") if b'"choices":[]' in line)
        tokens += json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        transport.close()
    return {"seconds": seconds, "tokens": tokens, "chunks": sum(reader.chunks for _, reader in made)}


def clients() -> None:
    """The process of the clients: a line of JSON in, a line of JSON out, until the end of input."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(read_all(**json.loads(line)))), flush=True)


class Served:
    """A server on a thread of this process, beside the LLM that it serves, and its clients."""

    def __init__(self, llm: LLM):
        import uvicorn

        from jaxinfer.server.app import create_app
        from jaxinfer.server.launch import ServerConfig, uvicorn_config

        config = uvicorn_config(create_app(llm), ServerConfig())
        config.host, config.port = "127.0.0.1", 0
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        logging.getLogger("jaxinfer.server.access").setLevel(logging.WARNING)  # lines of 32 clients at once
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.http", "--be-the-clients"]
        self.clients = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, bodies: list[dict[str, Any]]) -> dict[str, Any]:
        """What `read_all` says of these bodies."""
        assert self.clients.stdin is not None
        assert self.clients.stdout is not None
        self.clients.stdin.write(json.dumps({"port": self.port, "bodies": bodies}) + "\n")
        self.clients.stdin.flush()
        return json.loads(self.clients.stdout.readline())

    def close(self) -> None:
        self.clients.communicate(timeout=10)
        self.server.should_exit = True
        self.thread.join(20)


def measure(options: Namespace) -> dict[str, Any]:
    """All rounds; the first is not counted."""
    # All programs: clients do not arrive in one step, and meet shapes that a batch does not.
    llm = LLM(options.model, max_num_seqs=options.clients, warmup="full", progress=False)
    served = Served(llm)
    draw = random.Random(0)
    sampling = {"max_tokens": options.max_tokens, "ignore_eos": True, "temperature": 0.0}
    tokens = options.clients * options.max_tokens

    def prompts() -> list[list[int]]:
        top = llm.limits.vocab_size
        return [[draw.randrange(top) for _ in range(options.prompt)] for _ in range(options.clients)]

    def generated() -> tuple[float, float]:
        work = prompts()
        began, cpu = time.perf_counter(), time.process_time()
        answers = llm.generate(work, SamplingParams(**sampling), progress=False)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        assert sum(len(a.outputs[0].token_ids) for a in answers) == tokens
        return tokens / seconds, time.process_time() - cpu

    def streamed() -> tuple[float, float]:
        nonlocal chunks
        cpu = time.process_time()
        extra = {"stream": True, "stream_options": {"include_usage": True}}
        answer = served.ask([{"prompt": prompt, **sampling, **extra} for prompt in prompts()])
        assert answer["tokens"] == tokens, answer
        chunks = answer["chunks"]
        return tokens / answer["seconds"], time.process_time() - cpu

    rounds: list[tuple[float, float]] = []
    processor: list[tuple[float, float]] = []
    chunks = 0
    try:
        for number in range(options.rounds + 1):
            if number % 2:
                alone, over_http = generated(), streamed()
            else:
                over_http, alone = streamed(), generated()
            print(
                f"round {number}: generate {alone[0]:.1f} tok/s, {alone[1]:.2f} s of CPU; "
                f"server {over_http[0]:.1f} tok/s, {over_http[1]:.2f} s of CPU",
                file=sys.stderr,
            )
            rounds.append((alone[0], over_http[0]))
            processor.append((alone[1], over_http[1]))
    finally:
        served.close()
        llm.close()
    counted, seconds = rounds[1:], processor[1:]
    return {
        "model": options.model,
        "clients": options.clients,
        "prompt_tokens": options.prompt,
        "output_tokens": options.max_tokens,
        "generate_tokens_per_s": round(statistics.median(a for a, _ in counted), 1),
        "server_tokens_per_s": round(statistics.median(h for _, h in counted), 1),
        "ratio": round(statistics.median(h / a for a, h in counted), 3),
        "ratios": [round(h / a, 3) for a, h in counted],
        "generate_all": [round(a, 1) for a, _ in counted],
        "server_all": [round(h, 1) for _, h in counted],
        "cpu_ratio": round(statistics.median(a / h for a, h in seconds), 3),
        "http_cpu_us_per_token": round(statistics.median(h - a for a, h in seconds) / tokens * 1e6, 1),
        "compiles_between": llm.stats()["compiles_after_warmup"],
        "chunks_per_token": round(chunks / tokens, 3),
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements, after one to warm up")
    parser.add_argument("--be-the-clients", action="store_true", help="used by the benchmark itself")
    options = parser.parse_args()
    if options.be_the_clients:
        clients()
    else:
        print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
