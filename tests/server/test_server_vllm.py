"""What people know from vLLM's server: several names, a root path, the times of a request, /load."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_runner import FakeRunner
from fastapi.testclient import TestClient
from scripted import ScriptedEngine, ScriptedLLM, eventually

from jaxinfer.cli.flags import ServerFlags
from jaxinfer.core import ConfigError, Limits, RequestMetrics
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.server.launch import ServerConfig
from jaxinfer.server.timings import timings
from jaxinfer.text import ByteTokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LIMITS = Limits(
    num_pages=64, page_size=8, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, vocab_size=259
)


def served(**options: Any) -> TestClient:
    return TestClient(create_app(ScriptedLLM(), **options))  # pyright: ignore[reportArgumentType]


def test_a_model_has_several_names() -> None:
    with served(served_model_name=("one", "two/too")) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["one", "two/too"]
        assert client.get("/v1/models/two/too").json()["id"] == "two/too"
        for name in ("one", "two/too"):
            answer = client.post(COMPLETIONS, json={"model": name, "prompt": "a"})
            assert answer.json()["model"] == "one"  # vLLM's rule
        missing = client.post(COMPLETIONS, json={"model": "scripted", "prompt": "a"})
        assert missing.status_code == 404
        assert "'one', 'two/too'" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [{"served_model_name": ("a", "a")}, {"served_model_name": ("",)}]
    + [{"root_path": path} for path in ("llm", "/", "/llm/", "/a b", "//a")],
)
def test_names_and_paths_that_cannot_be_served(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerFlags(**wrong).checked()
    assert ServerFlags(served_model_name=("a", "b"), root_path="/a/b").checked() == ServerConfig(
        served_model_name=("a", "b"), root_path="/a/b"
    )


def test_paths_may_begin_with_the_root_path() -> None:
    with served(root_path="/llm", api_key="secret") as client:
        key = {"Authorization": "Bearer secret"}
        for path in (COMPLETIONS, "/llm" + COMPLETIONS):
            assert client.post(path, json={"prompt": "a"}).status_code == 401
            assert client.post(path, json={"prompt": "a"}, headers=key).status_code == 200
        assert client.get("/llm/health").status_code == 200
        assert client.get("/other/health").status_code == 404


def test_tokens_are_named_by_id_where_the_server_says_so() -> None:
    with served(names_as_ids=True) as client:
        body = {"prompt": "a", "logprobs": 0, "max_tokens": 1}
        tokens = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]["tokens"]
        assert tokens == ["token_id:65"]
        body["return_tokens_as_token_ids"] = False
        assert client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]["tokens"] == ["A"]


def chunks_of(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = client.post(path, json={"stream": True, **body}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


def test_usage_in_every_chunk_where_the_server_says_so() -> None:
    with served(force_usage=True) as client:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
            chunks = chunks_of(client, path, **body)
            assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.anyio
async def test_load_counts_the_bodies_that_are_answered() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    app = create_app(ScriptedLLM(engine))  # pyright: ignore[reportArgumentType]
    with TestClient(app) as client:

        def load() -> int:
            return client.get("/load").json()["server_load"]

        assert load() == 0
        body = {"prompt": ["a", "b"], "n": 2}
        answer = asyncio.create_task(asyncio.to_thread(client.post, COMPLETIONS, json=body))
        assert await asyncio.to_thread(eventually, lambda: load() == 1)
        engine.gate.set()
        assert (await answer).status_code == 200
        assert await asyncio.to_thread(eventually, lambda: load() == 0)


# -------------------------------------------------------------------------------------------- times


def test_times_of_a_request() -> None:
    metrics = RequestMetrics(
        num_generation_tokens=5, queued_ts=10.0, scheduled_ts=10.5, first_token_ts=11.0, last_token_ts=12.0
    )
    assert timings(metrics) == {
        "queue_time_ms": 500.0, "time_to_first_token_ms": 500.0, "generation_time_ms": 1000.0,
        "mean_itl_ms": 250.0, "tokens_per_second": 5 / 1.5,
    }  # fmt: skip
    assert timings(RequestMetrics(queued_ts=1.0)) == {}
    assert timings(RequestMetrics(queued_ts=1.0, scheduled_ts=2.0)) == {"queue_time_ms": 1000.0}


def test_times_come_with_an_answer_of_one_sequence() -> None:
    llm = LLM.from_parts(FakeRunner(LIMITS), LIMITS, tokenizer=ByteTokenizer(), model_name="fake")
    with TestClient(create_app(llm)) as client:
        body = {"prompt": "a", "max_tokens": 3, "min_tokens": 3}
        times = client.post(COMPLETIONS, json=body).json()["metrics"]
        assert set(times) == {
            "queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms",
            "tokens_per_second",
        }  # fmt: skip
        assert all(value >= 0 for value in times.values())
        assert (
            "mean_itl_ms"
            not in client.post(COMPLETIONS, json={**body, "max_tokens": 1, "min_tokens": 1}).json()["metrics"]
        )
        assert client.post(COMPLETIONS, json={**body, "n": 2}).json()["metrics"] is None
        chunks = chunks_of(client, COMPLETIONS, **body, stream_options={"include_usage": True})
        assert set(chunks[-1]["metrics"]) == set(times)
        assert all("metrics" not in chunk for chunk in chunks[:-1])
    output = llm.generate("a", {"max_tokens": 3, "min_tokens": 3})[0]
    metrics = output.metrics
    assert metrics.num_generation_tokens == 3
    assert metrics.arrival_time is not None
    stamps = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
    assert stamps == sorted(stamps, key=lambda stamp: stamp or 0.0)
    assert metrics.first_token_latency == metrics.ttft_s
    both = llm.generate("a", {"max_tokens": 3, "min_tokens": 3, "n": 2})[0].metrics
    assert both.num_generation_tokens == 6
