"""A step that hangs: /health, the metrics' gauge and the log say so for as long as it does."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedEngine, ScriptedLLM, eventually

from jaxinfer.core import ConfigError
from jaxinfer.server import watchdog
from jaxinfer.server.app import create_app
from jaxinfer.server.launch import ServerConfig

BODY = {"prompt": "a", "max_tokens": 2}


def test_a_step_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watchdog.watch_steps, "__defaults__", (0.02,))
    engine = ScriptedEngine()
    app = create_app(ScriptedLLM(engine), step_timeout=0.3)  # pyright: ignore[reportArgumentType]

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == watchdog.__name__]

    with TestClient(app) as client, ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        assert client.get("/health").status_code == 200
        engine.gate.clear()
        asked = pool.submit(client.post, "/v1/completions", json=BODY)
        assert eventually(lambda: client.get("/health").status_code == 503)
        health = client.get("/health").json()
        assert health["status"] == "stuck"
        assert health["step_s"] > 0.3
        assert eventually(lambda: len(lines()) == 1)
        engine.gate.set()
        assert asked.result().status_code == 200
        assert eventually(lambda: client.get("/health").status_code == 200)
        assert eventually(lambda: len(lines()) == 2)
        assert client.post("/v1/completions", json=BODY).status_code == 200
    assert "1 sequences wait" in lines()[0]
    assert lines()[1].endswith("the engine is ok")
    assert len(lines()) == 2


def test_it_is_off_where_nobody_set_it() -> None:
    engine = ScriptedEngine()
    app = create_app(ScriptedLLM(engine))  # pyright: ignore[reportArgumentType]
    with TestClient(app) as client, ThreadPoolExecutor(1) as pool:
        engine.gate.clear()
        asked = pool.submit(client.post, "/v1/completions", json=BODY)
        assert eventually(lambda: (client.get("/health").json()["step_s"] or 0) > 0.3)
        assert client.get("/health").status_code == 200
        engine.gate.set()
        assert asked.result().status_code == 200
    assert ServerConfig().step_timeout == 600
    with pytest.raises(ConfigError, match="step_timeout"):
        ServerConfig(step_timeout=-1)
