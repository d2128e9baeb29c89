"""What callers hand to the library that is not what it takes: refused by name, nothing started."""

from __future__ import annotations

from typing import Any

import pytest
from test_llm import make

from jaxinfer.core import RequestError, SamplingParams


def test_an_empty_list_is_a_batch_of_none_and_an_empty_conversation_is_refused() -> None:
    assert make().chat([]) == []
    with pytest.raises(RequestError) as caught:
        make().chat([[{"role": "user", "content": "Hi"}], []])  # a conversation without a message
    assert caught.value.param == "messages"
    with pytest.raises(RequestError) as caught:
        make().prepare_chat([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("wrong", [None, "Hi", {"role": "user", "content": "Hi"}, 5, [5], ["Hi"]])
def test_what_is_no_conversation_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make().chat(wrong)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("wrong", [5, "greedy", [SamplingParams(), 5], [{"heat": 1}, None]])
def test_what_is_no_sampling_is_refused_by_name(wrong: Any) -> None:
    llm = make(("a", "yes"))
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "a"], wrong)
    assert caught.value.param in ("sampling_params", "heat")
    assert llm.stats()["requests"] == 0


def test_fields_are_laid_over_the_models_own() -> None:
    llm = make(("a", "123456"), default_sampling=SamplingParams(max_tokens=2, top_k=5))
    assert llm.generate("a")[0].outputs[0].text == "12"
    assert llm.generate("a", {"max_tokens": 3})[0].outputs[0].text == "123"
    assert llm.generate("a", SamplingParams())[0].outputs[0].text == "123456"
    each = [None, {"max_tokens": None}, SamplingParams(max_tokens=1)]
    assert [o.outputs[0].text for o in llm.generate(["a"] * 3, each)] == ["12", "123456", "1"]
    assert llm.sampling({"n": 2}) == SamplingParams(max_tokens=2, top_k=5, n=2)
    assert llm.sampling() == llm.default_sampling
