"""The openai SDK against a real server, engine, scheduler and tokenizer; only the device is fake."""

from __future__ import annotations

from collections.abc import Callable, Generator

import openai
import pytest
from fake_runner import FakeRunner
from fastapi import FastAPI

from jaxinfer.core import Limits
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import ByteTokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LIMITS = Limits(
    num_pages=200,
    page_size=8,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=256,
    vocab_size=259,
    eos_token_ids=frozenset({257}),
)
HELLO = "Hallo Wörld ☃"


def fake_llm() -> LLM:
    """Answers `hi` with HELLO and the end of text, and everything else with noise."""
    tokenizer = ByteTokenizer()
    template = ChatTemplate(TEMPLATE, tokenizer.bos_token, tokenizer.eos_token)
    answer = (*HELLO.encode(), 257)
    prompts = ("hi", "user: hi\nassistant: ")
    runner = FakeRunner(LIMITS, scripts={tuple(p.encode()): answer for p in prompts})
    return LLM.from_parts(runner, LIMITS, tokenizer=tokenizer, chat_template=template, model_name="fake")


@pytest.fixture
def address(serve: Callable[[FastAPI], str]) -> str:
    return serve(create_app(fake_llm(), api_key="secret"))


@pytest.fixture
def client(address: str) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=address + "/v1", api_key="secret", max_retries=0, timeout=10) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hi"}]


def test_models_and_a_chat(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)  # pyright: ignore
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(HELLO.encode()) + 1
    assert answer.usage.prompt_tokens == len(b"user: hi\nassistant: ")
    # What the SDK made of an answer goes back as history.
    history = [{"role": "system", "content": "be kind"}, *MESSAGES, answer.choices[0].message, *MESSAGES]
    again = client.chat.completions.create(model="fake", messages=history, max_tokens=4)  # pyright: ignore
    assert again.choices[0].finish_reason == "length"


def test_a_streamed_chat_with_usage_and_logprobs(client: openai.OpenAI):
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,  # pyright: ignore
            stream=True,
            logprobs=True,
            top_logprobs=3,
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == HELLO
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    entries = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert chunks[-1].usage.completion_tokens == len(entries) == len(HELLO.encode()) + 1
    assert bytes(b for entry in entries[:-1] for b in entry.bytes) == HELLO.encode()
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_the_stream_helper_puts_the_answer_together(client: openai.OpenAI):
    with client.chat.completions.stream(model="fake", messages=MESSAGES, n=2) as stream:  # pyright: ignore
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [HELLO, HELLO]


def test_completions_whole_and_streamed_agree(client: openai.OpenAI):
    asked = {"model": "fake", "prompt": ["hi", "other"], "n": 2, "seed": 3, "max_tokens": 20, "logprobs": 2}
    whole = client.completions.create(**asked)
    texts = [""] * 4
    entries = [0] * 4
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            entries[choice.index] += len(choice.logprobs.tokens)
    assert [choice.text for choice in whole.choices] == texts
    assert texts[:2] == [HELLO, HELLO]
    assert texts[2] != texts[3]
    assert sum(entries) == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == 7


def test_stop_strings_end_a_stream_without_being_seen(client: openai.OpenAI):
    for stream in (False, True):
        answer = client.completions.create(model="fake", prompt="hi", stop=["Wö"], stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == "Hallo "
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.anyio
async def test_many_at_once_each_get_their_own(address: str):
    import asyncio

    async with openai.AsyncOpenAI(base_url=address + "/v1", api_key="secret", timeout=20) as client:

        async def ask(i: int) -> str:
            prompt = [i % 5 + 1] * (i % 5 + 1)
            answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=9, temperature=0)
            return answer.choices[0].text

        async def ask_streaming(i: int) -> str:
            prompt = [i % 5 + 1] * (i % 5 + 1)
            chunks = await client.completions.create(
                model="fake", prompt=prompt, max_tokens=9, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        alone = [await ask(i) for i in range(5)]
        together = await asyncio.gather(*[(ask, ask_streaming)[i % 2](i) for i in range(30)])
    assert together == [alone[i % 5] for i in range(30)]


def test_errors_are_the_sdks_own(client: openai.OpenAI, address: str):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # pyright: ignore
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="hi", max_tokens=10_000)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, frequency_penalty=3)  # pyright: ignore
    assert caught.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, verbosity="low")  # pyright: ignore
    assert caught.value.param == "verbosity"
    with (
        openai.OpenAI(base_url=address + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_leaving_a_stream_frees_the_pages_and_the_next_turn_is_fresh(serve: Callable[[FastAPI], str]):
    from scripted import eventually

    llm = fake_llm()
    url = serve(create_app(llm))
    with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0, timeout=10) as client:
        before = llm.engine.stats()
        for _ in range(3):
            stream = client.completions.create(model="fake", prompt="other", stream=True, seed=1)
            first = next(iter(stream)).choices[0].text
            stream.close()
            again = client.completions.create(model="fake", prompt="other", seed=1)
            assert again.choices[0].text.startswith(first)
        assert eventually(lambda: llm.engine.stats()["running"] == 0, 2)
        after = llm.engine.stats()
    # What the prefix cache keeps is given back at need.
    assert after["pages_free"] + after["pages_cached"] == before["pages_free"] == after["pages_total"]
    assert after["pages_live"] == 0


def test_a_failing_step_fails_its_request_and_nothing_else(serve: Callable[[FastAPI], str]):
    tokenizer = ByteTokenizer()
    llm = LLM.from_parts(FakeRunner(LIMITS, nan_tokens={7}), LIMITS, tokenizer=tokenizer, model_name="fake")
    url = serve(create_app(llm))
    with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0, timeout=10) as client:
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake", prompt=[7], max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="fake", messages=MESSAGES)  # pyright: ignore
        assert client.completions.create(model="fake", prompt="b", max_tokens=3).choices[0].text
