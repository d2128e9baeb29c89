"""The clients that people have, against a real server process with the real SmolLM2 on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "smollm2-135m"
MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]
SHORT: dict[str, Any] = {"model": NAME, "max_tokens": 6, "temperature": 0}


class City(BaseModel):
    """A city and how large it is."""

    name: str = Field(max_length=8)
    size: Literal["big", "small"]


@pytest.fixture(scope="module")
def url(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "jaxinfer", "serve", NAME, "--port", "0", "--warmup", "lazy"]
    command += ["--max-num-seqs", "4", "--max-model-len", "512"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, cwd=Path(__file__).parent.parent.parent)
    try:
        for _ in range(1200):
            found = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", log.read_text())
            if found is not None:
                break
            assert process.poll() is None, log.read_text()
            wait_a_little(process)
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def wait_a_little(process: subprocess.Popen) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.1)


@pytest.fixture(scope="module")
def client(url: str) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client


def test_the_sdk_whole_streamed_and_at_once(client: openai.OpenAI, url: str):
    whole = client.chat.completions.create(messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **SHORT)
    first, second = whole.choices
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert second.logprobs is not None
    entries = first.logprobs.content or []
    assert "".join(entry.token for entry in entries) == first.message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries), (
        "greedy: the very same float"
    )
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SHORT
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == first.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6

    async def together() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", timeout=120) as other:
            asked = [other.chat.completions.create(messages=MESSAGES, **SHORT) for _ in range(3)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert asyncio.run(together()) == [text] * 3
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=MESSAGES, **{**SHORT, "max_tokens": 100_000})
    assert caught.value.param == "max_tokens"


def test_the_sdk_parses_into_a_model_and_its_messages_go_back(client: openai.OpenAI):
    asked: dict[str, Any] = {**SHORT, "max_tokens": 120}
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=City, **asked)
    assert isinstance(answer.choices[0].message.parsed, City)
    tool = openai.pydantic_function_tool(City)
    called = client.chat.completions.parse(
        messages=MESSAGES, tools=[tool], tool_choice="required", **asked
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)
    history: list[Any] = [
        *MESSAGES, answer.choices[0].message, *MESSAGES, called.message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]  # fmt: skip
    assert client.chat.completions.create(messages=history, **SHORT).choices[0].message.content


@pytest.mark.filterwarnings("ignore")  # of its own models, dozens
def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the internet when imported
    litellm = pytest.importorskip("litellm")
    at = {**SHORT, "api_base": url + "/v1", "api_key": "-"}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(messages=MESSAGES, **{**at, "model": f"{provider}/{NAME}"})
        message = answer.choices[0].message
        again = [*MESSAGES, message.model_dump(), *MESSAGES]
        assert litellm.completion(messages=again, **{**at, "model": f"{provider}/{NAME}"}).choices
        chunks = litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True},
            **{**at, "model": f"{provider}/{NAME}"},
        )  # fmt: skip
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == message.content


def test_langchain(url: str):
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    chat = chat_openai(model=NAME, base_url=url + "/v1", api_key="-", temperature=0, max_tokens=120)
    short = chat.bind(max_tokens=6)
    whole = short.invoke("Say hello.")
    assert "".join(part.content for part in short.stream("Say hello.")) == whole.content
    assert whole.usage_metadata["output_tokens"] == 6
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("Paris"), City), method


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # guidellm
        ("/v1/completions", {"prompt": "Gravity is", "max_tokens": 5, "stop": None, "ignore_eos": True,
          "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
             "max_completion_tokens": 5, "stop": None, "ignore_eos": True},
        ),
        # vLLM's bench client
        (
            "/v1/completions",
            {"prompt": "Gravity is", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 5,
             "logprobs": None, "ignore_eos": True},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.0,
             "max_completion_tokens": 5, "ignore_eos": True, "min_tokens": 5},
        ),
        # aiperf, locust
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "min_tokens": 5}),
    ],
)  # fmt: skip
def test_load_tools_get_the_tokens_that_they_count(url: str, path: str, body: dict):
    assert httpx.get(url + "/health").status_code == 200
    sent = {"model": NAME, "stream": True, "stream_options": {"include_usage": True}, **body}
    answer = httpx.post(url + path, json=sent, timeout=120)
    *events, end = answer.content.split(b"\n\n")
    assert (answer.status_code, events[-1], end) == (200, b"data: [DONE]", b"")
    assert all(event.startswith(b"data: ") and event.count(b"\n") == 0 for event in events)
    chunks = [json.loads(event[6:], parse_constant=pytest.fail) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_perplexity_over_http_is_the_engines_own(url: str, smollm2_path: Path, compile_cache: None):
    """What lm_eval's local-completions asks for a rolling log-likelihood, and what it makes of the answer."""
    from jaxinfer import LLM

    text = (
        "The mitochondrion is the powerhouse of the cell, and it makes most of the energy that a cell uses."
    )
    with LLM(str(smollm2_path), max_num_seqs=4, max_model_len=512, warmup="lazy") as llm:
        ids = [1, *llm.encode(text)]  # lm_eval puts its own prefix token first; no BOS is added to ids
        score = llm.score([ids])[0]
    recorded = {"model": NAME, "prompt": [ids], "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for most in (1, 0):
        answer = httpx.post(
            url + "/v1/completions", json={**recorded, "max_tokens": most}, timeout=120
        ).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        known = answer["choices"][0]["logprobs"]
        logprobs = known["token_logprobs"][1 : len(ids)]
        assert f"{sum(logprobs):.4f}" == f"{-score.nll:.4f}"
        greedy = 0
        for chosen, top in zip(logprobs, known["top_logprobs"][1 : len(ids)], strict=True):
            assert chosen <= max(top.values())
            greedy += chosen == max(top.values())
        likeliest = sum(len(top) == 1 for top in known["top_logprobs"][1 : len(ids)])
        assert greedy == likeliest > 5, "a token that is the most likely one has the very same float"
