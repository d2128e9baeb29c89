"""/openapi.json against the server: whatever the body, no 5xx and no answer that it does not describe."""

from __future__ import annotations

from collections.abc import Callable

import jsonschema
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from test_server_openai_sdk import fake_llm

from jaxinfer.server.app import create_app
from jaxinfer.server.openapi import openapi

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


def description() -> dict:
    """As it is served, but with the name of the one model there is, so that more bodies are run."""
    document = openapi(keyed=False)
    for body in document["components"]["schemas"].values():
        if "model" in body.get("properties", {}):
            body["properties"]["model"] = {"enum": ["fake", None]}
    return document


schema = schemathesis.openapi.from_dict(description())


@pytest.fixture
def address(serve: Callable[[FastAPI], str]) -> str:
    return serve(create_app(fake_llm()))


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_body_gets_what_the_description_does_not_know(case, address: str):
    case.call_and_validate(base_url=address, checks=CHECKS)


def test_every_route_of_programs_is_described():
    app = create_app(fake_llm(), api_key="secret")
    document = openapi(keyed=True)
    with TestClient(app) as client:
        assert client.get("/openapi.json").status_code == 401
        served = client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert served == document
    assert set(document["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/models",
        "/v1/models/{name}", "/tokenize", "/detokenize", "/version", "/health",
    }  # fmt: skip
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == (path != "/health")
            assert ("security" in operation) == (path != "/health")
    for described in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(described)


def test_answers_of_every_kind_are_as_described():
    """What random bodies seldom reach: logprobs, echo, ids, and the errors."""
    root = openapi(keyed=False)

    def check(name: str, value: object) -> None:
        found = {"$ref": f"#/components/schemas/{name}", "components": root["components"]}
        jsonschema.validate(value, found, cls=jsonschema.Draft202012Validator)

    extras = {"max_tokens": 3, "prompt_logprobs": 2, "return_token_ids": True, "temperature": 0}
    with TestClient(create_app(fake_llm())) as client:
        body = {"prompt": ["hi", "other"], "n": 2, "echo": True, "logprobs": 2, **extras}
        check("CompletionBody", body)
        check("Completion", client.post("/v1/completions", json=body).json())
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": 2,
            **extras,
        }
        check("ChatBody", chat)
        check("Chat", client.post("/v1/chat/completions", json=chat).json())
        batch = {**chat, "messages": [chat["messages"], chat["messages"]]}
        check("BatchChatBody", batch)
        check("BatchChat", client.post("/v1/chat/completions/batch", json=batch).json())
        tools = [{"type": "function", "function": {"name": "f"}}]
        forced = {**chat, "tools": tools, "tool_choice": "required", "max_tokens": 200}
        check("ChatBody", forced)
        check("Chat", client.post("/v1/chat/completions", json=forced).json())
        check("Error", client.post("/v1/completions", json={}).json())
        check("Health", client.get("/health").json())
        with pytest.raises(jsonschema.ValidationError):
            check("ChatBody", {**chat, "guided_json": {}})
        with pytest.raises(jsonschema.ValidationError):
            check("Chat", {**client.post("/v1/chat/completions", json=chat).json(), "more": 1})
