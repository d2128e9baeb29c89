"""The API as /openapi.json describes it: bodies from their models, answers and errors by hand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxinfer.core.sampling import MAX_LOGPROBS, MAX_N, MIN_REPETITION_PENALTY
from jaxinfer.engine.validate import MAX_PRIORITY
from jaxinfer.server.schema import (
    LABELS,
    NOT_SERVED,
    BatchChatBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

_REF = "#/components/schemas/"
_RANGES = {
    # parameter -> least and most, as SamplingParams checks them
    "n": (1, MAX_N), "max_tokens": (0, None), "max_completion_tokens": (1, None), "min_tokens": (0, None),
    "temperature": (0, None), "top_p": (0, 1), "top_k": (-1, None), "min_p": (0, 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 100), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2), "logprobs": (0, MAX_LOGPROBS), "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS), "priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "seed": (-(2**63), 2**64 - 1),
}  # fmt: skip


def openapi(*, keyed: bool) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the routes that programs use. `keyed`: whether they want the API key."""
    schemas: dict[str, Any] = dict(_ANSWERS)
    paths: dict[str, Any] = {
        "/v1/completions": {"post": _generating("completions", CompletionBody, "Completion", schemas)},
        "/v1/chat/completions": {"post": _generating("chatCompletions", ChatBody, "Chat", schemas)},
        "/v1/chat/completions/batch": {
            "post": _generating("chatBatch", BatchChatBody, "BatchChat", schemas, streams=False)
        },
        "/tokenize": {"post": _posting("tokenize", TokenizeBody, "Tokens", schemas)},
        "/detokenize": {"post": _posting("detokenize", DetokenizeBody, "Text", schemas)},
        "/v1/models": {"get": _getting("models", "Models")},
        "/v1/models/{name}": {"get": {**_getting("model", "Model"), "parameters": [_NAME]}},
        "/version": {"get": _getting("version", "Version")},
        "/health": {"get": _getting("health", "Health")},
    }
    for path, operations in paths.items():
        for operation in operations.values():
            answers = operation["responses"]
            if path == "/health":
                answers["503"] = {"description": "The engine does not run.", **_json("Health")}
            elif keyed:
                answers["401"] = _error("No valid API key.")
                operation["security"] = [{"key": []}]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _getting(name: str, answer: str) -> dict[str, Any]:
    answers = {"200": {"description": "As asked.", **_json(answer)}}
    if name == "model":
        answers["404"] = _error("No such model.")
    return {"operationId": name, "responses": answers}


def _posting(name: str, body: type[BaseModel], answer: str, schemas: dict[str, Any]) -> dict[str, Any]:
    schemas[body.__name__] = _body_schema(body, schemas)
    return {
        "operationId": name,
        "requestBody": {"required": True, **_json(body.__name__)},
        "responses": {
            "200": {"description": "As asked.", **_json(answer)},
            "400": _error("The body cannot be served; `param` names what is wrong with it."),
            "404": _error("No such model."),
            "408": _error("The body did not come in time."),
            "413": _error("The body is too long."),
        },
    }


def _generating(
    name: str, body: type[BaseModel], answer: str, schemas: dict[str, Any], *, streams: bool = True
) -> dict[str, Any]:
    operation = _posting(name, body, answer, schemas)
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    retry = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    operation["responses"]["429"] = {**_error("As many requests wait as may."), "headers": retry}
    operation["responses"]["500"] = _error("The request failed.")
    operation["responses"]["503"] = {**_error("The engine has stopped."), "headers": retry}
    return operation


def _body_schema(body: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """A body's schema, its definitions moved to `schemas`; with what is accepted if it asks for nothing."""
    schema = body.model_json_schema(ref_template=_REF + "{model}")
    schemas |= schema.pop("$defs", {})
    fields = schema["properties"]
    for name, (least, most) in _RANGES.items():
        for kind in fields.get(name, {}).get("anyOf", ()):
            if kind["type"] in ("integer", "number"):
                kind |= {"minimum": least} | ({} if most is None else {"maximum": most})
    for name, values in NOT_SERVED.items():
        note = "Not served: only what asks for nothing is accepted."
        fields.setdefault(name, {"enum": [None, *values], "description": note})
    for name, kind in LABELS.items():
        kinds = ["object" if kind is dict else "string", "null"]
        fields.setdefault(name, {"type": kinds, "description": "A label; it changes no answer."})
    return schema


def _json(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF + name}}}}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, **_json("Error")}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object of these members and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_STRING, _COUNT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
_MAYBE_STRING, _IDS = {"type": ["string", "null"]}, _list(_COUNT)
_LOGPROB = {"type": "number", "maximum": 0}
_MAYBE_LOGPROB = {"type": ["number", "null"], "maximum": 0}
_REASON = {"enum": ["stop", "length", "tool_calls"]}
_ENTRY = {"token": _STRING, "logprob": _LOGPROB, "bytes": _list({"type": "integer", "maximum": 255})}
_OF_PROMPT = _list({
    "type": ["object", "null"],
    "additionalProperties": _object({"logprob": _LOGPROB, "rank": _COUNT, "decoded_token": _STRING}),
})  # fmt: skip

_TIMES = (
    "queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second",
)  # fmt: skip
_COMPLETION_LOGPROBS = _object({
    "tokens": _list(_STRING),
    "token_logprobs": _list(_MAYBE_LOGPROB),
    "top_logprobs": _list({"type": ["object", "null"], "additionalProperties": _LOGPROB}),
    "text_offset": _IDS,
})  # fmt: skip
_CALL = _object({
    "id": _STRING,
    "type": {"const": "function"},
    "function": _object({"name": _STRING, "arguments": _STRING}),
})  # fmt: skip
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _MAYBE_STRING, "refusal": {"type": "null"}},
    {"tool_calls": {**_list(_CALL), "minItems": 1}},
)
_CHAT_LOGPROBS = _object({
    "content": _list(_object({**_ENTRY, "top_logprobs": _list(_object(_ENTRY))})),
    "refusal": {"type": "null"},
})  # fmt: skip


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_EXTRAS = {name: _or_null(_IDS) for name in ("prompt_token_ids", "token_ids")}
_EXTRAS["prompt_logprobs"] = _or_null(_OF_PROMPT)


def _answer(kind: str, choice: dict[str, Any], extras: dict[str, Any]) -> dict[str, Any]:
    shape = {
        "index": _COUNT,
        **choice,
        "finish_reason": _REASON,
        "stop_reason": {"type": ["string", "integer", "null"]},
    }
    head = {"id": _STRING, "object": {"const": kind}, "created": _COUNT, "model": _STRING}
    choices = {**_list(_object(shape, _EXTRAS)), "minItems": 1}
    told = {"usage": {"$ref": _REF + "Usage"}, "metrics": _or_null({"$ref": _REF + "Timings"})}
    return _object({**head, "choices": choices, **told}, extras)


_ANSWERS: dict[str, Any] = {
    "Error": _object({
        "error": _object({
            "message": _STRING,
            "type": _STRING,
            "param": _MAYBE_STRING,
            "code": _MAYBE_STRING,
        })
    }),
    "Usage": _object({
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }),
    "Timings": _object({}, {name: {"type": "number", "minimum": 0} for name in _TIMES}),
    "Completion": _answer(
        "text_completion", {"text": _STRING, "logprobs": _or_null(_COMPLETION_LOGPROBS)}, {}
    ),
    "Chat": _answer(
        "chat.completion", {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS)}, _EXTRAS
    ),
    "BatchChat": _answer(
        "chat.completion", {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS)}, {}
    ),
    "Tokens": _object({
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _IDS,
        "token_strs": _or_null(_list(_STRING)),
    }),
    "Version": _object({"version": _STRING}),
    "Text": _object({"prompt": _STRING}),
    "Model": _object({
        "id": _STRING,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _STRING,
        "root": _STRING,
        "parent": {"type": "null"},
        "max_model_len": _COUNT,
    }),
    "Models": _object({"object": {"const": "list"}, "data": _list({"$ref": _REF + "Model"})}),
    "Health": {"type": "object", "properties": {"status": _STRING}, "required": ["status"]},
}  # fmt: skip
