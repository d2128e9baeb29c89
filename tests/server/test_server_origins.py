"""Pages of other sites in somebody's browser: a server that listens on this machine alone is not theirs."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM

from jaxinfer.server.app import create_app

BODY = b'{"prompt": "a", "max_tokens": 1}'
AS_TEXT = {"Content-Type": "text/plain"}  # of which a browser asks nobody


def app(**options):
    return create_app(ScriptedLLM(), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://testserver:81", "http://testserver.evil"]
)
def test_a_foreign_page_is_refused(origin: str) -> None:
    with TestClient(app()) as client:
        answer = client.post("/v1/completions", content=BODY, headers={**AS_TEXT, "Origin": origin})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        for path in ("/live", "/metrics", "/v1/models"):
            assert client.get(path, headers={"Origin": origin}).status_code == 403


def test_the_servers_own_page_and_programs_are_served() -> None:
    with TestClient(app()) as client:
        for headers in ({}, {"Origin": "http://testserver"}):
            answer = client.post("/v1/completions", content=BODY, headers={**AS_TEXT, **headers})
            assert answer.status_code == 200


@pytest.mark.parametrize("allowed", ["https://mine.example", "*"])
def test_an_allowed_page_is_served(allowed: str) -> None:
    with TestClient(app(cors_origins=[allowed])) as client:
        headers = {**AS_TEXT, "Origin": "https://mine.example"}
        assert client.post("/v1/completions", content=BODY, headers=headers).status_code == 200
