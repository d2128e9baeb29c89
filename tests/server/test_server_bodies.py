"""Bodies that are wrong, or ask for what is not served: refused by name, never with a 500."""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM

from jaxinfer.server.app import create_app
from jaxinfer.server.schema import NOT_SERVED, ChatBody, CompletionBody, parse_body

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def client() -> Generator[TestClient]:
    with TestClient(create_app(ScriptedLLM())) as client:  # pyright: ignore[reportArgumentType]
        yield client


def refused(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"[]", b'"x"', b"3", b"{", b"\xff\xfe", b'{"prompt": NaN}', b'{"seed": Infinity}',
        b'{"prompt": "\\ud83d"}', b'{"prompt": "\xed\xa0\xbd"}', b'{"\\udc00": 1}',
        b"[" * 100_000, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": [' + b"1" * 5000 + b"]}",
        '{"prompt": "utf-16"}'.encode("utf-16"),
    ],
    ids=range(16),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_what_is_no_json_object_is_a_400(client: TestClient, path: str, raw: bytes):
    refused(client.post(path, content=raw))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": "x" * 200}, "prompt"),
        ({"prompt": "x" * 110}, "prompt"),  # refused by the engine's thread, not by prepare
        ({"prompt": "a", "n": 0, "stream": True}, "n"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": 1e999}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "messages": [USER]}, "messages"),
        ({"prompt": "a", "user": 5}, "user"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": "1"}, "frequency_penalty"),
        ({"prompt": "a", "frequency_penalty": True}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"256": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "priority": 1.5}, "priority"),
        ({"prompt": "a", "priority": 1001}, "priority"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"prompt": "a", "structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"prompt": "a", "structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"prompt": "a", "structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"prompt": "a", "structured_outputs": {"xml": True}}, "structured_outputs.xml"),
        ({"prompt": "a", "response_format": {"type": "text", "triggers": ["a"]}}, "response_format.triggers"),
        ({"prompt": "a", "structured_outputs": {"json": {"bad": 1}}}, "structured_outputs.json"),
    ],
)
def test_completion_bodies_are_refused_with_the_parameter_named(client: TestClient, body: dict, param: str):
    # json.dumps writes 1e999 as Infinity, which has a case of its own above.
    raw = json.dumps(body).replace("Infinity", "1e999")
    assert refused(client.post(COMPLETIONS, content=raw))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "a wizard", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{**USER, "role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [USER], "logprobs": 2}, "logprobs"),
        ({"messages": [USER], "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [{"role": "assistant", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {
                "messages": [USER],
                "response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}},
            },
            "response_format.json_schema",
        ),
        (
            {
                "messages": [USER],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"bad": 1}},
                },
            },
            "response_format",
        ),
        (
            {
                "messages": [USER],
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
        ),
        ({"messages": [USER], "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"messages": [USER], "prompt": "a"}, "prompt"),
    ],
)
def test_chat_bodies_are_refused_with_the_parameter_named(client: TestClient, body: dict, param: str):
    assert refused(client.post(CHAT, json=body))["param"] == param


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_parameters_not_served_pass_only_when_they_ask_for_nothing(name: str):
    kind, body = CompletionBody, {"prompt": "a"}
    if name in CompletionBody.model_fields:
        kind, body = ChatBody, {"messages": [USER]}
    for harmless in (None, *NOT_SERVED[name]):
        parse_body(json.dumps({**body, name: harmless}).encode(), kind)
    for asking in ({"a": 1}, [1], "x", 0.5, False, True, 0, 1):
        if any(asking == h and isinstance(asking, bool) == isinstance(h, bool) for h in NOT_SERVED[name]):
            continue
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            parse_body(json.dumps({**body, name: asking}).encode(), kind)


def test_labels_and_harmless_values_are_accepted(client: TestClient):
    body = {
        "model": "scripted", "messages": [{"role": "assistant", "content": "yo", "refusal": None}, USER],
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tools": None,
        "max_completion_tokens": 3, "n": None, "stop": None, "stream": False, "stream_options": None,
    }  # fmt: skip
    assert client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 3


def test_text_parts_reach_the_template_as_they_are(client: TestClient):
    seen = []
    llm = ScriptedLLM()
    llm.prepare_chat = lambda messages, sampling, **options: (
        seen.append((messages, options)) or llm.prepare("a", sampling)
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {**USER, "name": "Ann"}]
    with TestClient(create_app(llm)) as other:  # pyright: ignore[reportArgumentType]
        assert other.post(CHAT, json={"messages": messages}).status_code == 200
    expected = [{"role": "system", "content": parts}, {**USER, "name": "Ann"}]
    assert seen == [(expected, {"add_generation_prompt": True, "continue_final_message": False})]


def test_models_routes_and_methods_that_do_not_exist(client: TestClient):
    error = refused(client.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    refused(client.get("/v1/models/gpt-9"), 404)
    refused(client.get("/v1/nothing"), 404)
    refused(client.get(COMPLETIONS), 405)
    assert client.get("/v1/models/scripted").json()["id"] == "scripted"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["scripted"]


def test_a_body_that_is_too_long_is_a_413():
    app = create_app(ScriptedLLM(), max_body_bytes=100)  # pyright: ignore[reportArgumentType]
    with TestClient(app) as client:
        refused(client.post(COMPLETIONS, json={"prompt": "x" * 200}), 413)
        refused(client.post(COMPLETIONS, content=(b" " * 60 for _ in range(3))), 413)
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_too_many_sequences_in_one_body_are_named(client: TestClient):
    error = refused(client.post(COMPLETIONS, json={"prompt": ["a"] * 131, "n": 2}))
    assert "262" in error["message"]


@pytest.mark.parametrize("key", ["secret", "clé ☃"])
def test_the_key_is_wanted_everywhere_but_for_health(key: str):
    with TestClient(create_app(ScriptedLLM(), api_key=key)) as client:  # pyright: ignore[reportArgumentType]
        assert client.get("/health").status_code == 200
        wrong = [None, b"", b"Bearer", b"Bearer x", b"Basic " + key.encode(), b"\xff\xfe", key.encode()]
        for value in wrong:
            headers = {} if value is None else {b"Authorization": value}
            answer = client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)  # pyright: ignore
            assert refused(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            refused(client.get("/v1/models", headers=headers), 401)  # pyright: ignore[reportArgumentType]
        headers = {b"Authorization": b"Bearer " + key.encode()}
        assert client.get("/v1/models", headers=headers).status_code == 200  # pyright: ignore


def test_request_ids_are_cut_and_may_repeat(client: TestClient):
    for sent, back in (("mine", "mine"), ("mine", "mine"), ("x" * 10_000, "x" * 128)):
        answer = client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": sent})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == back
    assert client.get("/health").headers["x-request-id"]


def test_tokens_there_and_back(client: TestClient):
    answer = client.post("/tokenize", json={"prompt": "hé"}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == ([104, 195, 169], 3, 128)
    assert client.post("/detokenize", json={"tokens": [104, 195, 169]}).json() == {"prompt": "hé"}
    chat = client.post("/tokenize", json={"messages": [USER]}).json()
    assert bytes(chat["tokens"]) == b"u:hi\na:"
    refused(client.post("/tokenize", json={}))
    long = client.post("/tokenize", json={"messages": [{**USER, "content": "x" * 500}]}).json()
    assert (long["count"], long["max_model_len"]) == (505, 128), "counted, not refused"
    assert client.post("/tokenize", json={"prompt": "x" * 500}).json()["count"] == 500
    for name in ("add_generation_prompt", "continue_final_message"):
        for value in (True, False):
            assert refused(client.post("/tokenize", json={"prompt": "a", name: value}))["param"] == name
        assert client.post("/tokenize", json={"prompt": "a", name: None}).status_code == 200
    refused(client.post("/detokenize", json={"tokens": [256]}))


def test_tokens_with_their_spellings_and_without_special_ones(client: TestClient):
    body = {"prompt": "BOS"}
    assert client.post("/tokenize", json=body).json()["tokens"] == [0, 66, 79, 83]
    plain = client.post("/tokenize", json={**body, "add_special_tokens": False}).json()
    assert (plain["tokens"], plain["token_strs"]) == ([66, 79, 83], None)
    spelled = client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert spelled["token_strs"] == ["<68>", "<69>"]


def test_the_tokenizer_is_described(client: TestClient):
    told = client.get("/tokenizer_info").json()
    assert (told["model_max_length"], told["eos_token"], told["chat_template"]) == (128, "", "the template")
    assert told["tokenizer_class"] == "ScriptedTokenizer"


def test_every_key_of_logit_bias_that_is_no_id_is_named(client: TestClient):
    error = refused(client.post(COMPLETIONS, json={"prompt": "a", "logit_bias": {"x": 1, "7": 1, "y": 2}}))
    assert error["param"] == "logit_bias"
    assert "'x', 'y'" in error["message"]
    assert (
        "256 tokens"
        in refused(client.post(COMPLETIONS, json={"prompt": "a", "logit_bias": {"300": 1}}))["message"]
    )


def test_routes_that_clients_of_vllm_know(client: TestClient):
    assert client.get("/version").json()["version"]
    assert client.get("/ping").json() == client.get("/health").json()
    card = client.get("/v1/models").json()["data"][0]
    assert (card["root"], card["parent"]) == ("scripted", None)
    chat = client.post("/invocations", json={"messages": [USER], "max_tokens": 2}).json()
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "U:")
    completion = client.post("/invocations", json={"prompt": "ab", "max_tokens": 2}).json()
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "AB")
    assert refused(client.post("/invocations", json={"input": "a"}))["param"]
    refused(client.post("/invocations", content=b"{"))


def test_a_history_that_openai_has_answered_is_taken(client: TestClient) -> None:
    """Its answers carry an empty list of annotations; one with something in it cannot be shown to a model."""
    turn = {"role": "assistant", "content": "a", "annotations": [], "refusal": None}
    body = {"messages": [USER, turn, USER], "max_tokens": 1}
    assert client.post(CHAT, json=body).status_code == 200
    turn["annotations"] = [{"type": "url_citation"}]
    refused(client.post(CHAT, json=body))


def test_arguments_of_a_call_are_strict_json(client: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": NaN}'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    error = refused(client.post(CHAT, json={"messages": messages, "max_tokens": 1}))
    assert error["param"].endswith("function.arguments")


def test_names_and_arguments_count_as_text(client: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f" * 7_000_000, "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    assert "max_model_len" in refused(client.post(CHAT, json={"messages": messages}))["message"]


def test_usage_so_far_in_every_chunk(client: TestClient) -> None:
    """vLLM's continuous_usage_stats, which load tools send: only beside include_usage."""
    for whole in (True, False):
        options = {"include_usage": whole, "continuous_usage_stats": True}
        body = {"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": options}
        lines = client.post(COMPLETIONS, json=body).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if not whole:
            assert all("usage" not in chunk for chunk in chunks)
            continue
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] >= 1
        assert counts[-1] == 3
