"""A real server process on loopback: how it ends, what it logs, and clients that are slow or silent."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from scripted import eventually
from served_script import Served, scripted, served

LONG = {"length": 10**9, "step_s": 0.002}
BODY = {"prompt": "abc", "max_tokens": 100, "stream": True}


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=15)


def post(body: bytes, *headers: str, declared: int | None = None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", *headers]
    lines.append(f"Content-Length: {len(body) if declared is None else declared}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def until_closed(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    said = b""
    try:
        while part := client.recv(65536):
            said += part
    except ConnectionResetError:
        pass
    return said


# -------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("broken", [False, True], ids=["in a step", "outside of a step"])
def test_a_dead_engine_is_told_to_all_and_ends_the_process(broken: bool):
    engine = {"length": 10**9, "step_s": 0.02} | ({} if broken else {"die_at": 25})
    with served(scripted(engine=engine, broken=broken)) as server, ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json={**BODY, "stream": s}, timeout=20)
            for s in (True, False, True, False)
        ]
        answers = [one.result() for one in asked]
        health = httpx.get(f"{server.url}/health")
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
        status, err = server.end(None)
    for answer in answers:
        # A stream has begun with 200: its error is its last event.
        if answer.headers["content-type"].startswith("text/event-stream"):
            last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        else:
            assert answer.status_code == 503
            last = answer.json()
        assert last["error"]["code"] == "engine_stopped"
        assert "secret/path" not in answer.text
    assert (health.status_code, health.json()["status"]) == (503, "dead")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
    assert status not in (0, None)
    assert ("MemoryError" if broken else "RuntimeError") in err


def test_sigterm_lets_streams_finish_and_refuses_the_rest():
    with served(scripted(engine={"length": 60, "step_s": 0.02})) as server, ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=20) for _ in range(4)
        ]
        assert eventually(lambda: httpx.get(f"{server.url}/health").json()["sequences"] == 4)
        status, err = server.end()
        for one in asked:
            assert one.result().text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    assert status == 0, err
    assert "Traceback" not in err


def test_silent_and_slow_clients_do_not_hold_up_the_end():
    """An idle connection, half a head, half a body and a stream that nobody reads, at SIGTERM."""
    server_options = {"drain_seconds": 1, "stall_seconds": 1, "receive_seconds": 60}
    with served(scripted(engine=LONG, **server_options)) as server:
        clients = [connect(server) for _ in range(4)]
        clients[1].sendall(b"POST /v1/comp")
        clients[2].sendall(post(b'{"prompt"', declared=100))
        clients[3].sendall(post(json.dumps({**BODY, "logprobs": 20}).encode()))
        assert eventually(lambda: httpx.get(f"{server.url}/health").json()["sequences"] == 1)
        began = time.monotonic()
        status, err = server.end()
        took = time.monotonic() - began
        for client in clients:
            client.close()
    assert status == 0, err
    assert took < 60
    assert "Traceback" not in err


# ------------------------------------------------------------------------------- clients that are slow


def test_bodies_and_heads_that_trickle_in_are_ended():
    with served(scripted(receive_seconds=1, keep_alive_seconds=1)) as server:
        head, body, unread, silent = (connect(server) for _ in range(4))
        body.sendall(post(b"", declared=1000))
        unread.sendall(post(b"", declared=1000).replace(b"/v1/completions", b"/no/such/route"))
        stop = threading.Event()

        def trickle() -> None:
            data = iter(b"GET /health HTTP/1.1\r\nHost: " + b"x" * 1000)
            while not stop.wait(0.1):
                for client in (head, body, unread):
                    with contextlib.suppress(OSError):
                        client.sendall(bytes([next(data)]) if client is head else b" ")

        dripping = threading.Thread(target=trickle)
        dripping.start()
        began = time.monotonic()
        try:
            assert until_closed(head) == b""
            assert time.monotonic() - began < 30
            answer = until_closed(body)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'"code":"request_timeout"' in answer
            assert until_closed(unread).startswith(b"HTTP/1.1 404")
            assert until_closed(silent) == b""
            assert time.monotonic() - began < 60
        finally:
            stop.set()
            dripping.join()
        status, err = server.end()
    assert status == 0, err


def test_idle_connections_are_closed():
    with served(scripted(keep_alive_seconds=1)) as server, connect(server) as client:
        client.sendall(post(b'{"prompt":"a"}') * 2)  # the second is sent ahead of its turn
        began = time.monotonic()
        assert until_closed(client).count(b"HTTP/1.1 200") == 2
        assert 0.5 < time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("stall_seconds", "step_s", "reason"),
    [(1, 0.005, "a client did not read within 1 s"), (60, 0.0, "the answer was not read while it was made")],
    ids=["by the clock", "by what is unread"],
)
def test_a_stream_that_nobody_reads_is_ended_and_its_place_is_free(
    stall_seconds: int, step_s: float, reason: str
):
    engine = {"length": 10**9, "step_s": step_s}
    with served(scripted(engine=engine, stall_seconds=stall_seconds)) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = {"prompt": "abc", "max_tokens": None, "stream": True, "logprobs": 20, "n": 4}
        client.sendall(post(json.dumps(body).encode(), "X-Request-Id: slow"))
        assert eventually(lambda: httpx.get(f"{server.url}/health").json()["sequences"] == 4)
        assert eventually(lambda: httpx.get(f"{server.url}/health").json()["sequences"] == 0, 20)
        assert httpx.post(f"{server.url}/v1/completions", json={**BODY, "max_tokens": 2}).status_code == 200
        began = time.monotonic()
        if stall_seconds == 1:
            until_closed(client)
            assert time.monotonic() - began < 30
        client.close()
        status, err = server.end()
    assert status == 0, err
    assert reason in err
    assert re.search(r"POST /v1/completions .*\[slow\]", err), err


# --------------------------------------------------------------------------------------------- the log


def test_the_log_is_json_and_knows_no_secrets():
    secrets = ["sk-3cr3t", "a prompt of mine", "quer1ed", "wr0ng"]
    with served(scripted(api_key=secrets[0], log_format="json", engine={"fail_at": 3})) as server:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {secrets[0]}"}) as client:
            good = client.post("/v1/completions?key=quer1ed", json={"prompt": secrets[1], "max_tokens": 2})
            mine = {"X-Request-Id": "mine"}
            cut = client.post("/v1/completions", json={"prompt": secrets[1], "stream": True}, headers=mine)
            client.post(
                "/v1/completions", json={"prompt": secrets[1], "temprature": secrets[1]}, headers=mine
            )
            client.get("/health")
            client.get("/no%0Asuch%0Aroute")
            client.get("/v1/models", headers={"Authorization": "Bearer wr0ng"})
        status, err = server.end()
    assert status == 0, err
    lines = [json.loads(line) for line in err.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= set(line)
    requests = [line for line in lines if "status" in line]
    requests.sort(key=lambda r: (r["path"], r["status"], r["request_id"] == "mine"))
    assert [(r["method"], r["path"], r["status"]) for r in requests] == [
        ("GET", "/no%0Asuch%0Aroute", 404),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 400),
        ("GET", "/v1/models", 401),
    ]
    requests.pop(0)
    assert (requests[0]["prompt_tokens"], requests[0]["output_tokens"]) == (16, 2)
    assert requests[0]["request_id"] == good.headers["x-request-id"]
    assert requests[1]["request_id"] == cut.headers["x-request-id"] == "mine"
    assert 0 <= requests[0]["seconds"] < 10
    failed = next(line for line in lines if line["message"].startswith("a stream ended early"))
    assert failed["request_id"] == "mine"
    assert "ApiError" in failed["exception"]
    assert not [secret for secret in secrets if secret in err]


def test_plain_lines_hold_the_same_and_health_is_quiet():
    with served(scripted()) as server:
        headers = {"X-Request-Id": "mine"}
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers=headers)
        httpx.get(f"{server.url}/health")
        status, err = server.end()
    assert status == 0, err
    (line,) = err.splitlines()
    assert re.search(r" INFO .*: POST /v1/completions 200 in \d+\.\d{3} s, 3 \+ 2 tokens \[mine\]$", line), (
        line
    )
