"""Beam search over HTTP, and several conversations in a body: through a real model, tiny and random."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedEngine, ScriptedLLM, eventually
from tiny import tiny_runner

from jaxinfer.core import Limits
from jaxinfer.llm import LLM
from jaxinfer.llm.beams import BeamSearch, BeamSearchParams
from jaxinfer.server.app import create_app
from jaxinfer.server.beams import beam_events
from jaxinfer.server.worker import EngineWorker, OverloadedError
from jaxinfer.text import ByteTokenizer, ChatTemplate

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TALKS = [[{"role": "user", "content": text}] for text in ("abc", "de")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    runner, tokenizer = tiny_runner(), ByteTokenizer()
    limits = Limits(
        num_pages=runner.num_pages, page_size=runner.page_size, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=32, vocab_size=runner.config.vocab_size, eos_token_ids=frozenset({257}),
    )  # fmt: skip
    chat = ChatTemplate(TEMPLATE, tokenizer.bos_token, tokenizer.eos_token)
    return LLM.from_parts(runner, limits, tokenizer=tokenizer, chat_template=chat, model_name="tiny")


@pytest.fixture(scope="module")
def client(llm: LLM) -> Generator[TestClient]:
    with TestClient(create_app(llm)) as client:
        yield client


def scripted(path: str, **body: Any) -> Any:
    llm = ScriptedLLM(ScriptedEngine())
    start: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": TALKS[0]}
    with TestClient(create_app(llm)) as client:  # pyright: ignore[reportArgumentType]
        return client.post(path, json={**start, **body})


# -------------------------------------------------------------------------------------------- beams


def test_a_body_gets_the_best_outputs(llm: LLM, client: TestClient) -> None:
    body = {"n": 2, "max_tokens": 3, "use_beam_search": True, "return_token_ids": True, "logprobs": 1}
    answer = client.post(COMPLETIONS, json={"prompt": ["abc", "de"], **body})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    chat = client.post(CHAT, json={"messages": TALKS[1], **body, "logprobs": True, "top_logprobs": 1})
    assert chat.status_code == 200, chat.text
    found = llm.beam_search(["abc", "de"], BeamSearchParams(beam_width=2, max_tokens=3))
    beams = [beam for output in found for beam in output.sequences]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [tuple(choice["token_ids"]) for choice in choices] == [beam.output_token_ids for beam in beams]
    assert [choice["finish_reason"] for choice in choices] == [beam.finish_reason for beam in beams]
    for choice, beam in zip(choices, beams, strict=True):
        assert choice["text"] == ByteTokenizer().decode(beam.output_token_ids, skip_special_tokens=True)
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(beam.cum_logprob, abs=1e-4)
        assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == sum(len(beam.output_token_ids) for beam in beams)
    told = [tuple(choice["token_ids"]) for choice in chat.json()["choices"]]
    assert told == [beam.output_token_ids for beam in found[1].sequences]
    assert all(len(entry["top_logprobs"]) == 1 for entry in chat.json()["choices"][0]["logprobs"]["content"])


def test_a_search_without_max_tokens_ends_at_the_limit(client: TestClient) -> None:
    body = {"prompt": "x" * 29, "use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
    assert len(choice["token_ids"]) == 3
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"stream": True}, "stream"),
        (COMPLETIONS, {"n": 11}, "n"),
        (COMPLETIONS, {"temperature": 0.5}, "temperature"),
        (COMPLETIONS, {"top_p": 0.5}, "top_p"),
        (COMPLETIONS, {"seed": 3}, "seed"),
        (COMPLETIONS, {"stop": "a"}, "stop"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "logprobs"),
        (COMPLETIONS, {"echo": True, "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"length_penalty": 11}, "length_penalty"),
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        (CHAT, {"stream": True}, "stream"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_has_no_place_in_a_search_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    answer = scripted(path, **{"use_beam_search": True, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_values_that_ask_for_nothing_pass(client: TestClient) -> None:
    for body in ({"use_beam_search": False, "length_penalty": 1}, {"use_beam_search": None}):
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **body}).status_code == 200
    body = {"use_beam_search": True, "top_p": 1.0, "temperature": 0, "stop": [], "max_tokens": 1}
    assert client.post(COMPLETIONS, json={"prompt": "a", **body}).status_code == 200


def test_a_step_that_fails_fails_the_search(
    llm: LLM, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the device fell off the bus")

    body = {"prompt": "a", "use_beam_search": True, "max_tokens": 2}
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "fetch", broken)
        assert client.post(COMPLETIONS, json=body).status_code == 500
    assert client.post(COMPLETIONS, json=body).status_code == 200
    assert client.get("/load").json() == {"server_load": 0}


def test_a_search_keeps_its_places_and_leaves_the_event_loop_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps nothing of it runs: others would take its places, and its next step would get 429."""
    app, take = create_app(llm, max_queue=0), BeamSearch.take
    seen: list[tuple[int, int, bool]] = []

    def looking(self: BeamSearch, *args: Any) -> None:
        try:
            asyncio.get_running_loop()
            on_loop = True
        except RuntimeError:
            on_loop = False
        worker = app.state.worker
        seen.append((worker.health()["sequences"], worker.open_tickets, on_loop))
        with pytest.raises(OverloadedError):
            worker.check_room(1)
        take(self, *args)

    monkeypatch.setattr(BeamSearch, "take", looking)
    with TestClient(app) as client:
        body = {"prompt": "abc", "n": 4, "max_tokens": 3, "use_beam_search": True}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        assert eventually(lambda: client.get("/health").json()["sequences"] == 0)
        assert client.post(COMPLETIONS, json={**body, "n": 5}).status_code == 400
    assert seen == [(4, 1, False)] * 3


def test_a_search_counts_as_one_request(llm: LLM, client: TestClient) -> None:
    before = llm.engine.stats()
    first = llm.engine.histograms.time_to_first_token.snapshot()[0][-1]
    body = {"prompt": "abc", "n": 3, "max_tokens": 4, "use_beam_search": True, "ignore_eos": True}
    usage = client.post(COMPLETIONS, json=body).json()["usage"]
    assert eventually(lambda: llm.engine.stats()["requests"] > before["requests"])
    after = llm.engine.stats()
    assert after["requests"] - before["requests"] == 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"] == 3
    assert after["generated_tokens"] - before["generated_tokens"] == usage["completion_tokens"] == 12
    assert after["finished"]["length"] - before["finished"]["length"] == 3
    assert llm.engine.histograms.time_to_first_token.snapshot()[0][-1] == first
    assert after["computed_tokens"] - before["computed_tokens"] >= 1 + 3 * 3


@pytest.mark.anyio
async def test_a_search_that_nobody_waits_for_any_more_gives_its_places_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = EngineWorker(llm.engine, llm.limits, max_queue=0)
    worker.start()
    taken, take, aborted = threading.Event(), BeamSearch.take, llm.engine.stats()["finished"]["abort"]
    monkeypatch.setattr(BeamSearch, "take", lambda *a: (take(*a), taken.set()))
    try:
        request = llm.prepare("abc", {"max_tokens": 20, "ignore_eos": True})
        params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
        found = beam_events(worker, [request], params, llm.limits, lambda _: "")
        searching = asyncio.ensure_future(anext(found))
        assert await asyncio.to_thread(taken.wait, 30)
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        await found.aclose()
        assert await asyncio.to_thread(eventually, lambda: worker.health()["sequences"] == 0)
        worker.check_room(4)
        assert await asyncio.to_thread(
            eventually, lambda: llm.engine.stats()["finished"]["abort"] == aborted + 4
        )
        assert await asyncio.to_thread(eventually, lambda: llm.engine.stats()["running"] == 0)
    finally:
        await asyncio.to_thread(worker.stop)


# ---------------------------------------------------------------------------- several conversations


def test_each_conversation_has_its_answer(client: TestClient) -> None:
    asked = {
        "temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "return_token_ids": True,
        "prompt_logprobs": 0,
    }  # fmt: skip
    together = client.post(BATCH, json={"messages": TALKS, **asked}).json()
    assert together["object"] == "chat.completion"
    assert [choice["index"] for choice in together["choices"]] == [0, 1]
    usage = 0
    for choice, messages in zip(together["choices"], TALKS, strict=True):
        alone = client.post(CHAT, json={"messages": messages, **asked}).json()
        (other,) = alone["choices"]
        assert choice["message"] == other["message"]
        assert choice["token_ids"] == other["token_ids"]
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
        assert len(choice["prompt_logprobs"]) == len(alone["prompt_logprobs"])
        assert len(choice["logprobs"]["content"]) == 3
        usage += alone["usage"]["total_tokens"]
    assert together["usage"]["total_tokens"] == usage
    plain = client.post(BATCH, json={"messages": TALKS, "max_tokens": 1}).json()["choices"][0]
    assert plain["prompt_token_ids"] is plain["prompt_logprobs"] is plain["token_ids"] is None


def test_each_conversation_is_echoed(client: TestClient) -> None:
    talks = [[*TALKS[0], {"role": "assistant", "content": "so"}], TALKS[1]]
    body = {
        "messages": talks,
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "add_generation_prompt": False,
    }
    told = [c["message"]["content"] for c in client.post(BATCH, json=body).json()["choices"]]
    plain = client.post(BATCH, json={**body, "echo": False}).json()["choices"]
    assert told == ["so" + plain[0]["message"]["content"], plain[1]["message"]["content"]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [TALKS[0], []]}, "messages"),
        ({"messages": TALKS[0]}, "messages[0]"),
        ({"messages": TALKS, "stream": True}, "stream"),
        ({"messages": TALKS, "n": 2}, "n"),
        ({"messages": TALKS, "use_beam_search": True}, "use_beam_search"),
        ({"messages": TALKS, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": TALKS, "tool_choice": "required"}, "tool_choice"),
        ({"messages": TALKS, "length_penalty": 2}, "length_penalty"),
        ({"messages": TALKS, "top_k": -2}, "top_k"),
    ],
)
def test_a_batch_that_is_not_served(client: TestClient, body: dict[str, Any], param: str) -> None:
    answer = client.post(BATCH, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
