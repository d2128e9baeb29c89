"""More connections than are kept, and what is no HTTP: refused with an answer, an id, a line in the log."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import resource
import socket

import httpx
import pytest
import uvicorn
from scripted import ScriptedLLM, eventually
from served_script import Served, scripted, served

from jaxinfer.server import launch
from jaxinfer.server.launch import ServerConfig


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=15)


def test_a_connection_too_many_is_told_so_and_health_is_not_refused() -> None:
    with served(scripted(max_connections=2, log_format="json")) as server:
        with contextlib.ExitStack() as stack:
            kept = [stack.enter_context(httpx.Client(base_url=server.url)) for _ in range(2)]
            for client in kept:
                assert client.get("/v1/models").status_code == 200
            for _ in range(3):
                with httpx.Client(base_url=server.url) as late:
                    assert late.get("/health").status_code == 200
                    # Half a megabyte is read before it is refused: the answer is not lost in a reset.
                    body = {"prompt": "a" * 500_000}
                    refused = late.post("/v1/completions", json=body, headers={"X-Request-Id": "late"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "too_many_connections"
                assert refused.headers["x-request-id"] == "late"
            for client in kept:
                assert client.get("/v1/models").status_code == 200, "those that were there before go on"
            crowd = [stack.enter_context(connect(server)) for _ in range(20)]
            with contextlib.suppress(ConnectionResetError):
                assert crowd[-1].recv(1) == b"", "a flood is cut"
        assert eventually(lambda: httpx.get(f"{server.url}/v1/models").status_code == 200)
        status, err = server.end()
    assert status == 0, err
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["status"] for line in lines if line.get("request_id") == "late"] == [503] * 3


def test_what_is_no_http_gets_an_answer_with_an_id() -> None:
    with served(scripted(log_format="json")) as server:
        with connect(server) as client:
            client.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            head, _, said = client.recv(65536).partition(b"\r\n\r\n")
        with connect(server) as client:  # a body that is no chunk: its handler waits for it
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            client.sendall(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 400")
        status, err = server.end()
    assert status == 0, err
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(said)["error"]["code"] == "invalid_http"
    label = head.decode().partition("X-Request-Id: ")[2].partition("\r\n")[0]
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["status"] for line in lines if line.get("request_id") == label] == [400]


def test_a_client_that_sends_all_before_it_reads_sees_that_it_was_too_much() -> None:
    with served(scripted(max_body_bytes=1 << 20)) as server:
        for chunked in (False, True):
            for size in (2 << 20, 9 << 20):
                client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
                body = iter([b" " * (1 << 16)] * (size >> 16)) if chunked else b" " * size
                client.request("POST", "/v1/completions", body, encode_chunked=chunked)
                answer = client.getresponse()
                assert answer.status == 413, (chunked, size)
                assert answer.headers["x-request-id"]
                assert json.loads(answer.read())["error"]["code"] == "request_too_large"
                client.close()
        # Where all of it could not be read, or the client waits to be asked for it, nothing of it is.
        for declared, headers in ((1 << 40, b""), (2 << 20, b"Expect: 100-continue\r\n")):
            with connect(server) as waiting:
                waiting.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + headers)
                waiting.sendall(b"Content-Length: %d\r\n\r\n" % declared)
                assert waiting.recv(65536).startswith(b"HTTP/1.1 413")
        status, err = server.end()
    assert status == 0, err


def test_a_handshake_of_websockets_is_a_request_like_any_other() -> None:
    with served(scripted(log_format="json")) as server:
        asked = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        asked |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "X-Request-Id": "shake"}
        with httpx.Client(base_url=server.url, headers=asked) as client:
            refused = client.get("/v1/models", headers={"Host": "evil.example"})
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "host_not_allowed"
            assert client.get("/v1/models").json()["object"] == "list"
            assert client.get("/no/such/route").json()["error"]["type"]
        assert refused.headers["x-request-id"] == "shake"
        status, err = server.end()
    assert status == 0, err
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line.get("status") for line in lines] == [403, 200, 404], "and no warning besides"


def test_open_files_bound_the_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [1024, 1048]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(slice(2), wanted))
    assert launch._connections(ServerConfig(max_connections=400)) == 400
    assert limits == [1024, 1048], "they suffice"
    assert launch._connections(ServerConfig(max_connections=1000)) == 460
    assert limits == [1048, 1048]
    assert "460 connections" in caplog.text


def test_collections_of_garbage_pass_over_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    before = len(gc.get_objects())
    try:
        launch.serve(
            lambda: contextlib.nullcontext(ScriptedLLM()),  # pyright: ignore[reportArgumentType]
            ServerConfig(port=0, measure_machine=False),
        )
    finally:
        gc.unfreeze()
    assert frozen[0] > before / 2
