"""Prompts, options and results as people write them who come from vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from test_llm import make, seeded

from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.text import ByteTokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


class StartsWithBos(ByteTokenizer):
    """Puts BOS before every text."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        ids = super().encode(text, add_special_tokens, parse_special)
        return [256, *ids] if add_special_tokens else ids


@pytest.fixture
def llm() -> LLM:
    return make(("a", "yes"), ("c", "no"), ("[user]", "Hello"))


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ({"prompt": "a"}, "a", (97,)),
        ({"prompt_token_ids": [97]}, None, (97,)),
        ({"prompt": "as I say", "prompt_token_ids": [97]}, "as I say", (97,)),
    ],
)
def test_prompts_may_be_mappings(llm: LLM, prompt: Any, text: str | None, ids: tuple[int, ...]) -> None:
    for prompts in (prompt, [prompt, prompt]):
        for output in llm.generate(prompts):
            assert (output.prompt, output.prompt_token_ids) == (text, ids)
            assert output.outputs[0].text == "yes"
    assert llm.prepare(prompt).prompt_token_ids == ids


@pytest.mark.parametrize("name", ["multi_modal_data", "prompt_embeds", "encoder_prompt"])
def test_prompts_of_other_kinds_are_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        llm.generate({"prompt": "a", name: {}})
    assert caught.value.param == name


def test_a_long_prompt_is_cut_where_that_is_asked_for(llm: LLM) -> None:
    def ids(**options: Any) -> tuple[int, ...]:
        return llm.prepare("abcdef", options.pop("sampling", None), **options).prompt_token_ids

    assert ids(truncate_prompt_tokens=2) == tuple(b"ef")
    assert ids(truncate_prompt_tokens=2, truncation_side="right") == tuple(b"ab")
    assert ids(truncate_prompt_tokens=6) == ids(truncate_prompt_tokens=-1) == ids() == tuple(b"abcdef")
    assert llm.prepare("abcdef", truncate_prompt_tokens=2).prompt is None
    assert llm.prepare("abcdef", truncate_prompt_tokens=9).prompt == "abcdef"
    long = "a" * 500  # max_model_len is 128
    assert len(llm.prepare(long, truncate_prompt_tokens=-1).prompt_token_ids) == 127
    sampling = SamplingParams(max_tokens=28)
    assert len(llm.prepare(long, sampling, truncate_prompt_tokens=-1).prompt_token_ids) == 100
    with pytest.raises(RequestError, match="maximum context length is 128"):
        llm.prepare(long, truncate_prompt_tokens=400)
    chat = llm.prepare_chat([{"role": "user", "content": long}], truncate_prompt_tokens=12)
    assert chat.prompt_token_ids == tuple(b"/[assistant]")
    outputs = llm.generate(["xa", "xc"], seeded(), truncate_prompt_tokens=1)
    assert [o.outputs[0].text[:1] for o in outputs] == ["y", "n"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", True),
        ("truncate_prompt_tokens", 1.5),
        ("truncation_side", "middle"),
        ("add_special_tokens", 1),
    ],
)
def test_wrong_options_are_refused_by_name(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        llm.prepare("a", **{name: value})
    assert caught.value.param == name


def test_a_text_runs_with_what_its_tokenizer_adds_unless_told_otherwise() -> None:
    llm = make(tokenizer=StartsWithBos())
    assert llm.prepare("a").prompt_token_ids == (256, 97)
    assert llm.prepare("a", add_special_tokens=False).prompt_token_ids == (97,)
    assert llm.encode("a", add_special_tokens=False) == [97]
    assert llm.prepare_chat(MESSAGES, add_special_tokens=False)
    with pytest.raises(RequestError, match="that its template writes") as caught:
        llm.prepare_chat(MESSAGES, add_special_tokens=True)
    assert caught.value.param == "add_special_tokens"


def test_a_chat_may_bring_a_template_and_its_variables(llm: LLM) -> None:
    named = llm.prepare_chat(MESSAGES, chat_template_kwargs={"extra": "!"})
    assert named.prompt_token_ids == llm.prepare_chat(MESSAGES, extra="!").prompt_token_ids
    own = llm.prepare_chat(MESSAGES, chat_template="<{{ messages[0].content }}>{{ extra }}", extra="!")
    assert own.prompt_token_ids == tuple(b"<Hi>!")
    assert make(chat_template=None).prepare_chat(MESSAGES, chat_template="x").prompt_token_ids == tuple(b"x")
    with pytest.raises(RequestError, match="lora_request") as caught:
        llm.chat(MESSAGES, lora_request="mine")
    assert caught.value.param == "lora_request"
    assert llm.chat(MESSAGES, lora_request=None)[0].finished


def test_other_names_of_what_is_there(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(logprobs=1), use_tqdm=False, priority=None)
    assert output.finished
    assert output.num_cached_tokens == output.metrics.cached_tokens == 0
    assert output.outputs[0].finished()
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][ord("y")].decoded_token == "y"
    tokenizer = llm.get_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.get_vocab()["<|bos|>"] == 256
    with pytest.raises(RequestError, match="progress and use_tqdm"):
        llm.generate("a", progress=True, use_tqdm=True)


def test_a_prompt_that_is_too_long_has_openais_code(llm: LLM) -> None:
    for asked in (("a" * 128, None), ("a", SamplingParams(max_tokens=128))):
        with pytest.raises(RequestError, match="this model's maximum context length is 128 tokens") as caught:
            llm.prepare(*asked)
        assert caught.value.code == "context_length_exceeded"
