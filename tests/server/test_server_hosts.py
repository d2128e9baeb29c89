"""By what name the server is called: a page that lets its own name lead to this machine is refused."""

from __future__ import annotations

import socket

import httpx
import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM
from served_script import scripted, served

from jaxinfer.core import ConfigError
from jaxinfer.server.app import create_app
from jaxinfer.server.guards import host_name, is_loopback
from jaxinfer.server.launch import ServerConfig, _allowed_hosts

PATHS = ("/", "/health", "/v1/models", "/live", "/metrics", "/no/such/route")


def test_on_loopback_the_server_answers_to_its_own_names_alone() -> None:
    with served(scripted(allowed_host=["proxy.example"])) as server:
        with httpx.Client(base_url=server.url) as client:
            for host in (
                "localhost",
                "LocalHost.:80",
                f"127.0.0.1:{server.port}",
                "[::1]:1",
                "proxy.example:443",
            ):
                assert client.get("/health", headers={"Host": host}).status_code == 200, host
            for path in PATHS:
                # What a browser sends from a page of rebound.example, which leads to 127.0.0.1.
                for host in ("rebound.example", f"rebound.example:{server.port}", "localhost.evil.example"):
                    headers = {"Host": host, "Origin": f"http://{host}"}
                    answer = client.get(path, headers=headers)
                    assert answer.status_code == 403, (path, host)
                    assert answer.json()["error"]["code"] == "host_not_allowed"
                    assert answer.headers["x-request-id"]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as old:
            old.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert old.recv(100).startswith(b"HTTP/1.1 200")


def test_an_application_by_itself_is_told_its_names() -> None:
    llm = ScriptedLLM()
    with TestClient(create_app(llm)) as client:  # pyright: ignore[reportArgumentType]
        assert client.get("/health", headers={"Host": "any.example"}).status_code == 200
    with TestClient(create_app(ScriptedLLM(), allowed_hosts=[])) as client:  # pyright: ignore[reportArgumentType]
        assert client.get("/health").status_code == 403, "testserver"
        assert client.get("/health", headers={"Host": "localhost:8000"}).status_code == 200


@pytest.mark.parametrize(
    ("bound", "config", "allowed"),
    [
        ("127.0.0.1", {"host": "localhost"}, ("localhost", "127.0.0.1")),
        ("127.0.0.1", {"allowed_host": ("a.example",)}, ("127.0.0.1", "127.0.0.1", "a.example")),
        ("0.0.0.0", {"host": "0.0.0.0"}, None),
        ("0.0.0.0", {"host": "0.0.0.0", "allowed_host": ("a.example",)}, ("0.0.0.0", "0.0.0.0", "a.example")),
    ],
)
def test_names_are_those_of_the_address(bound: str, config: dict, allowed: tuple | None) -> None:
    with socket.socket() as listener:
        listener.bind((bound, 0))
        assert _allowed_hosts(ServerConfig(**config), listener) == allowed


def test_names_are_read_as_browsers_write_them() -> None:
    assert host_name("A.Example.:80") == "a.example"
    assert host_name("[::1]:80") == "::1"
    assert [is_loopback(n) for n in ("127.8.0.1", "::1", "a.localhost", "localhost")] == [True] * 4
    assert not any(
        is_loopback(n) for n in ("", "10.0.0.1", "notlocalhost", "127.0.0.1.example", "localhost.x")
    )
    for wrong in ("a.example:80", "http://a.example", "a b"):
        with pytest.raises(ConfigError, match="allowed_host"):
            ServerConfig(allowed_host=(wrong,))
    ServerConfig(allowed_host=("a.example", "*", "::1", "10.0.0.7"))
