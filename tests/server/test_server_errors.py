"""Errors that nobody expected: they are answered, labelled and logged as everything else is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM

from jaxinfer.server.app import create_app


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_has_an_id_a_line_and_may_be_read_by_allowed_pages(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(ScriptedLLM):
        def prepare(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("/srv/secret/path")

    origin = "https://good.example"
    app = create_app(Faulty(), cors_origins=[origin])  # pyright: ignore[reportArgumentType]
    with TestClient(app) as client, caplog.at_level(logging.INFO, "jaxinfer"):
        headers = {"X-Request-Id": "mine", "Origin": origin}
        answer = client.post("/v1/completions", json={"prompt": "a", "stream": stream}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["access-control-allow-origin"] == origin
        assert "secret" not in answer.text
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxinfer.server.access"]
    assert lines[0].startswith("POST /v1/completions 500 in ")
    (failure,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert failure.exc_info


def test_every_answer_has_an_id(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(ScriptedLLM(), api_key="k", cors_origins=["*"], max_body_bytes=100)  # pyright: ignore[reportArgumentType]
    with TestClient(app) as client, caplog.at_level(logging.DEBUG, "jaxinfer"):
        key = {"Authorization": "Bearer k"}
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        answers = [
            client.get("/health"),
            client.get("/"),
            client.get("/v1/models"),
            client.get("/nothing"),
            client.put("/health"),
            client.options("/v1/completions", headers=asked),
            client.post("/v1/completions", content=b"x" * 101, headers=key),
            client.post("/v1/completions", content=b"{", headers=key),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 404, 405, 200, 413, 400]
    assert all(answer.headers["x-request-id"] for answer in answers)
    lines = [record for record in caplog.records if record.name == "jaxinfer.server.access"]
    assert [record.request["status"] for record in lines] == [answer.status_code for answer in answers]  # pyright: ignore[reportAttributeAccessIssue]
