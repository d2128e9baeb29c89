"""Tools: what bodies may say of them, and calls found in what a model writes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from cpu_time import cpu_time
from fake_runner import FakeRunner
from fastapi.testclient import TestClient
from test_server_openai_sdk import LIMITS

from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.server.calls import Call, CallParser
from jaxinfer.server.tools import CallForm, Tool, ToolUse, tool_use
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.grammar import GrammarCompiler
from jaxinfer.text.tokenizer import ByteTokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "enum": ["Oslo", "Rom"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of now", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}@{{ m.tool_call_id }}{% endif %};{% endfor %}{{ mood }}"
)


def parsed(text: str, cuts: list[int] | None = None, **use: Any) -> list:
    """What a parser makes of a text: its texts joined and, for each call, (name, arguments)."""
    parser = CallParser(ToolUse({"weather": PARAMETERS, "now": None}, **use))
    ends = [*(cuts or []), len(text)]
    items, at = [], 0
    for end in ends:
        items += parser.push(text[at:end])
        at = end
    items += parser.finish()
    result: list[Any] = []
    for item in items:
        if isinstance(item, Call):
            result.append((item.name, item.arguments))
        elif result and isinstance(result[-1], str):
            result[-1] += item
        else:
            result.append(item)
    return result


CALL = ("weather", '{"city": "Oslo"}')
CASES = {
    "text alone": ("Hello {you} <tool", ["Hello {you} <tool"]),
    "one call": (f"<tool_call>\n{OSLO}\n</tool_call>", [CALL]),
    "text and two calls": (
        f'Let me see. \n<tool_call>{OSLO}</tool_call>\n<tool_call>{{"name":"now"}}</tool_call>\n',
        ["Let me see.", CALL, ("now", "{}")],
    ),
    "text behind a call": (f"<tool_call>{OSLO}</tool_call> done", [CALL, " done"]),
    "a call without its end": (f"ok\n<tool_call>\n{OSLO}", ["ok", CALL]),
    "a call cut short": ('<tool_call>{"name": "wea', ['<tool_call>{"name": "wea']),
    "another function": (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "rm", "arguments": {}}</tool_call>'],
    ),
    "NaN is no JSON": (
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        ['<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'],
    ),
    "Llama 3": ('{"name": "weather", "parameters": {"city": "Oslo"}}', [CALL]),
    "Llama 3, two": (f' {OSLO}; {{"name": "now", "parameters": {{}}}}\n', [CALL, ("now", "{}")]),
    "other JSON": ('{"city": "Oslo", "name": 3}', ['{"city": "Oslo", "name": 3}']),
    "JSON with a name": ('{"name": "weather"}', ['{"name": "weather"}']),
    "JSON, then text": (f"{OSLO} is it", [f"{OSLO} is it"]),
    "a tag within what looked like a call": (
        f'{{"name": x <tool_call>{OSLO}</tool_call>',
        ['{"name": x', CALL],
    ),
    "beyond ASCII": (
        '<tool_call>{"name": "now", "arguments": {"é": "\\u2603"}}</tool_call>',
        [("now", '{"é": "☃"}')],
    ),
    "half a pair": (
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}</tool_call>',
        [("now", '{"a": "\\ud83d"}')],
    ),
    "white space": ("  \n", ["  \n"]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str):
    text, expected = CASES[name]
    assert parsed(text) == expected
    assert parsed(text, list(range(len(text)))) == expected
    draw = random.Random(name)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 3)))
        assert parsed(text, cuts) == expected, cuts


def test_text_is_not_held_back_longer_than_it_must():
    parser = CallParser(ToolUse({"now": None}))
    assert list(parser.push("Hello <b")) == ["Hello <b"]
    assert list(parser.push(" <tool_c")) == []
    assert list(parser.push("ase>")) == [" <tool_case>"]
    other = CallParser(ToolUse({"now": None}))
    assert list(other.push('{"answer": 1')) == ['{"answer": 1'], "no key of a call"


def test_nesting_too_deep_is_text():
    text = '<tool_call>{"name": "now", "arguments": ' + "[" * 100_000 + "</tool_call>"
    assert parsed(text) == [text]


def test_one_call_where_parallel_calls_are_off():
    two = f"<tool_call>{OSLO}</tool_call><tool_call>{OSLO}</tool_call>"
    assert parsed(two, parallel=False) == [CALL]
    assert parsed(two) == [CALL, CALL]


# ------------------------------------------------------------------------------------- over HTTP


def client_of(answer: str, template: str = TEMPLATE) -> TestClient:
    """A server whose model answers everything with `answer`: prompts are put into its script on the way."""
    tokenizer = ByteTokenizer()
    runner = FakeRunner(LIMITS)
    chat = ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token)
    llm = LLM.from_parts(runner, LIMITS, tokenizer=tokenizer, chat_template=chat, model_name="fake")
    prepare = llm.prepare_chat

    def scripted(*args: Any, **options: Any) -> Any:
        request = prepare(*args, **options)
        runner.scripts[request.prompt_token_ids] = (*answer.encode(), 257)
        seen.append(bytes(request.prompt_token_ids).decode())
        return request

    seen: list[str] = []
    llm.prepare_chat = scripted
    client = TestClient(create_app(llm))
    client.seen = seen  # type: ignore[attr-defined]
    return client


def streamed(client: TestClient, body: dict) -> dict[str, Any]:
    """The message that the chunks of a stream make, and its finish_reason."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for event in client.post(CHAT, json={**body, "stream": True}).text.split("\n\n")[:-2]:
        (choice,) = json.loads(event[6:])["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
        message["finish_reason"] = choice["finish_reason"]
    return message


SHORT = [{"type": "function", "function": {"name": "weather"}}, TOOLS[1]]


def test_an_answer_with_calls_whole_and_streamed():
    body = {"messages": [USER], "tools": SHORT}
    with client_of(f"Well.\n<tool_call>\n{OSLO}\n</tool_call>") as client:
        answer = client.post(CHAT, json=body).json()
        stream = streamed(client, body)
        off = client.post(CHAT, json={**body, "tool_choice": "none"}).json()["choices"][0]
        prompts = client.seen  # type: ignore[attr-defined]
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == (
        "function",
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
    )
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    assert (stream["content"], stream["finish_reason"]) == ("Well.", "tool_calls")
    assert [c["function"] for c in stream["tool_calls"]] == [call["function"]]
    assert prompts[0].startswith('T[{"type": "function", "function": {"name": "weather"}}')
    assert not prompts[2].startswith("T"), "the model does not see functions that it may not call"
    assert "tool_calls" not in off["message"]
    assert off["message"]["content"].endswith("</tool_call>")
    assert off["finish_reason"] == "stop"


def test_calls_alone_have_no_content_and_an_end_by_length_stays_one():
    body = {"messages": [USER], "tools": SHORT}
    with client_of(OSLO + ";" + " " * 30) as client:
        choice = client.post(CHAT, json=body).json()["choices"][0]
        cut = client.post(CHAT, json={**body, "max_tokens": len(OSLO) + 3}).json()["choices"][0]
        short = client.post(CHAT, json={**body, "max_tokens": 9}).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == len(cut["message"]["tool_calls"]) == 1
    assert (choice["finish_reason"], cut["finish_reason"]) == ("tool_calls", "length")
    assert (short["message"]["content"], short["finish_reason"]) == (OSLO[:9], "length")


def test_calls_and_results_in_the_history_reach_the_template():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    bare = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    with client_of("ok") as client:
        answer = client.post(CHAT, json={"messages": messages, "chat_template_kwargs": {"mood": "calm"}})
        assert answer.status_code == 200, answer.text
        (prompt,) = client.seen  # type: ignore[attr-defined]
        tokens = client.post("/tokenize", json={"messages": [USER], "tools": SHORT}).json()["tokens"]
    assert prompt == 'user:hi;assistant:!weather{"city": "Oslo"}!now{};tool:rain@c1;calm'
    assert bytes(tokens).decode().startswith('T[{"type"')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_demanded_is_made_whatever_the_template_and_the_model(choice: Any):
    body = {"messages": [USER], "tools": TOOLS[:1], "tool_choice": choice}
    expected = "tool_calls" if choice == "required" else "stop"
    with client_of("no", template="{{ messages[0].content }}") as client:
        whole = client.post(CHAT, json=body).json()["choices"][0]
        stream = streamed(client, body)
    for message, reason in ((whole["message"], whole["finish_reason"]), (stream, stream["finish_reason"])):
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) in ({"city": "Oslo"}, {"city": "Rom"})
        assert reason == expected


ASKING = {"messages": [USER], "tools": TOOLS}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**ASKING, "tools": [*TOOLS, TOOLS[1]]}, "tools[2]"),
        ({**ASKING, "tools": [TOOLS[1]] * 129}, "tools"),
        ({**ASKING, "tools": [{"type": "code"}]}, "tools[0].type"),
        ({**ASKING, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({**ASKING, "tool_choice": "always"}, "tool_choice"),
        (
            {**ASKING, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        ({**ASKING, "response_format": {"type": "json_object"}}, "tools"),
        ({**ASKING, "structured_outputs": {"regex": "a"}}, "tools"),
        (
            {
                "messages": [USER],
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"colour": "red"}}}],
            },
            "tools",
        ),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs.tokenizer"),
        ({"messages": [USER], "chat_template_kwargs": {"timeout_s": 1}}, "chat_template_kwargs.timeout_s"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_bodies_are_refused_with_the_parameter_named(body: dict, param: str):
    with client_of("ok") as client:
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert client.post(CHAT, json={"messages": [USER]}).status_code == 200


def test_a_template_without_tools_refuses_those_that_it_would_ignore():
    with client_of("ok", template="{{ messages[0].content }}") as client:
        answer = client.post(CHAT, json=ASKING)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        for choice in ("auto", "none"):
            body = {"messages": [USER], "tools": [], "tool_choice": choice, "parallel_tool_calls": True}
            assert client.post(CHAT, json=body).status_code == 200


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
BRIEF = "{% if tools %}T{% endif %}{{ messages[0].content }}"
TAGGED = CallForm(tagged=True)
LLAMA = CallForm(tagged=False)


def allows(form: CallForm, text: str) -> bool:
    """Whether an answer to STRICT under tool_choice auto may be this text, and end there."""
    use = tool_use([Tool.model_validate(tool) for tool in STRICT], "auto", None, form=form)
    assert use is not None
    matcher = GrammarCompiler(ByteTokenizer(), 259).matcher(SamplingParams(grammar=use.grammar()))
    assert matcher is not None
    for token in [*text.encode(), 257]:
        mask = matcher.mask()
        if not mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.accept(token)
    return True


def call(arguments: str, name: str = "weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


@pytest.mark.parametrize("form", [TAGGED, LLAMA])
def test_strict_arguments_follow_their_schema_where_an_answer_may_be_text(form: CallForm):
    for text in ("", "Hello, <you>!", "é\n\n</tool_call> <tool_cal", "  spaced {out}"):
        assert allows(form, text)
    good, other = call('{"city": "Oslo"}'), call('{"city": 5}', "now")
    for text in (good, f"\n{good}\n", other):
        assert allows(form, f"<tool_call>{text}</tool_call>")
        assert allows(form, f"Well:\n<tool_call>{text}</tool_call>\n<tool_call>{good}</tool_call> done")
    for text in (
        call('{"city": "Mars"}'),
        call("{}"),
        call("{}", "rm"),
        "hello",
        call('{"city": "Oslo"}', key="x"),
    ):
        assert not allows(form, f"<tool_call>{text}</tool_call>")
        assert not allows(form, f"Well: <tool_call>{good}</tool_call><tool_call>{text}</tool_call>")


def test_an_answer_that_starts_with_a_brace_is_a_call_where_the_model_calls_without_tags():
    good, wrong = (call(f'{{"city": "{city}"}}', key="parameters") for city in ("Oslo", "Mars"))
    assert allows(LLAMA, good)
    assert allows(LLAMA, f"{good}; {good}")
    assert not allows(LLAMA, wrong)
    assert not allows(LLAMA, f"{good}; {wrong}")
    assert not allows(LLAMA, '{"city": "Oslo"}')
    assert allows(LLAMA, f"So: {wrong}")  # amid text that is no call
    assert allows(TAGGED, wrong)


def test_a_json_answer_is_no_call_of_a_model_that_tags_its_calls():
    tagged = BRIEF + "{# <tool_call> #}"
    bare = call('{"city": "Mars"}')
    with client_of(bare, tagged) as client:
        strict = client.post(CHAT, json={"messages": [USER], "tools": STRICT}).json()["choices"][0]
        loose = client.post(CHAT, json={"messages": [USER], "tools": TOOLS}).json()["choices"][0]
    assert (strict["message"]["content"], strict["finish_reason"]) == (bare, "stop")
    assert loose["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Mars"}'


@pytest.mark.parametrize("template", [BRIEF, BRIEF + "{# <tool_call> #}"])
def test_a_strict_call_under_auto_over_http(template: str):
    mars = call(json.dumps({"city": "Mars"}))
    answer = f"Well. <tool_call>{mars}</tool_call>"
    body = {"messages": [USER], "tools": STRICT, "max_tokens": 90}
    with client_of(answer, template) as client:
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
        stream = streamed(client, body)
    for said in (message, stream):
        first = said["tool_calls"][0]["function"]
        assert json.loads(first["arguments"]) in ({"city": "Oslo"}, {"city": "Rom"})
        assert said["content"].startswith("Well.")
    with client_of("Only text.", template) as client:
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == ("Only text.", False)


def test_strict_is_refused_where_tags_are_control_tokens():
    tools = [Tool.model_validate(tool) for tool in STRICT]
    with pytest.raises(RequestError, match="control token") as caught:
        tool_use(tools, None, None, form=CallForm(tagged=True, control=True))
    assert caught.value.param == "tools[0].function.strict"
    assert tool_use(tools, "required", None, form=CallForm(tagged=True, control=True)) is not None


@pytest.mark.parametrize("start", ['{"name": "f", "a": "', '<tool_call>{"name": "f", "a": "', "  "])
def test_a_long_call_costs_the_same_a_token(start: str):
    """Of 40000 pieces; looking at all that is held for each of them took 11 s."""
    parser = CallParser(ToolUse({"f": None}))
    pieces = [start, *[" word" if start.strip() else "  "] * 40_000]
    with cpu_time() as spent:
        assert [item for piece in pieces for item in parser.push(piece)] == []
        assert spent() < 2.0
    assert "".join(map(str, parser.finish())) == "".join(pieces)
