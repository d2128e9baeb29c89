"""What is refused before it is scheduled, and what the refusal says (VA, CH, B031, B041, B055)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from jaxinfer.core import Limits, Request, RequestError, SamplingParams
from jaxinfer.engine import validate
from jaxinfer.engine.validate import continuation_seed

ROOMY = Limits(
    num_pages=1000,
    page_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=2048,
    vocab_size=100,
    eos_token_ids=frozenset({2}),
)
TIGHT = Limits(  # 12 usable pages: 48 tokens
    num_pages=13, page_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=2048, vocab_size=100
)


def request(prompt: Any, **sampling: Any) -> Request:
    return Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))


def refusal(prompt: Any, limits: Limits = ROOMY, has_tokenizer: bool = True, **sampling: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        validate(request(prompt, **sampling), limits, has_tokenizer=has_tokenizer)
    return caught.value


@pytest.mark.parametrize("wrong", [100, -1, 2**63, True, 1.0, "1", None])
def test_ids_outside_the_vocabulary(wrong: Any) -> None:
    error = refusal((1, wrong, 3))
    assert error.param == "prompt"
    assert repr(wrong) in str(error)
    assert "99" in str(error)


@pytest.mark.parametrize("prompt", [(), [], "text", None])
def test_a_prompt_must_be_a_list_of_ids(prompt: Any) -> None:
    assert refusal(prompt).param == "prompt"


def test_a_prompt_needs_room_for_one_token() -> None:
    assert validate(request((1,) * 2047), ROOMY) == 1
    error = refusal((1,) * 2048)
    assert error.param == "prompt"
    assert "2048" in str(error)


def test_the_message_has_limit_prompt_and_requested_numbers() -> None:
    assert validate(request((1,) * 8, max_tokens=2040), ROOMY) == 2040
    error = refusal((1,) * 8, max_tokens=2045)
    assert error.param == "max_tokens"
    assert {"2048", "8", "2045", "2053", "2040"} <= set(re.findall(r"\d+", str(error)))


def test_what_can_never_fit_the_pool_is_refused() -> None:
    assert validate(request((1,) * 48, max_tokens=1), TIGHT) == 1
    error = refusal((1,) * 49, TIGHT)
    assert error.param == "prompt"
    assert all(number in str(error) for number in ("49", "13", "12", "48"))
    error = refusal((1,) * 48, TIGHT, max_tokens=2)
    assert error.param == "max_tokens"
    assert all(number in str(error) for number in ("48", "13", "12", "at most 1"))


def test_an_omitted_max_tokens_runs_to_what_there_is() -> None:
    assert validate(request((1,) * 8), ROOMY) == 2040
    assert validate(request((1,) * 8), TIGHT) == 41  # the last token needs no K/V
    error = refusal((1,) * 8, TIGHT, min_tokens=42)
    assert error.param == "min_tokens"


@pytest.mark.parametrize("token", [100, -1, 105])
def test_stop_token_ids_outside_the_vocabulary(token: int) -> None:
    error = refusal((1,), stop_token_ids=[5, token])
    assert error.param == "stop_token_ids"
    assert str(token) in str(error)


def test_stop_strings_need_a_tokenizer() -> None:
    assert refusal((1,), has_tokenizer=False, stop="x").param == "stop"
    validate(request((1,), stop="x"), ROOMY)


def test_min_tokens_must_leave_a_token_to_choose() -> None:
    few, everything = dataclasses.replace(ROOMY, vocab_size=20), list(range(20))
    assert refusal((1,), few, min_tokens=1, stop_token_ids=everything).param == "min_tokens"
    validate(request((1,), stop_token_ids=everything), few)


def test_sampling_must_be_sampling_params() -> None:
    with pytest.raises(RequestError):
        validate(Request(request_id="r", prompt_token_ids=(1,), sampling={}), ROOMY)  # type: ignore[arg-type]


def test_seeds_of_continuations() -> None:
    assert continuation_seed(5, 0) == 5
    assert continuation_seed(-1, 0) == 2**64 - 1
    seeds = [continuation_seed(seed, index) for seed in range(100) for index in range(10)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert continuation_seed(5, 3) == continuation_seed(5, 3)
