"""The library's front door, over the fake device."""

from __future__ import annotations

import io
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, expected

from jaxinfer.config import EngineConfig
from jaxinfer.core import (
    ConfigError,
    EngineDeadError,
    Limits,
    Request,
    RequestError,
    SamplingParams,
    TokenEvent,
)
from jaxinfer.llm import LLM
from jaxinfer.text import ByteTokenizer, ChatTemplate

EOS = 257
LIMITS = Limits(
    num_pages=65,
    page_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=128,
    vocab_size=259,
    eos_token_ids=frozenset({EOS}),
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if not loop.last or add_generation_prompt %}/"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ extra }}"
)


def make(*scripts: tuple[str, str], limits: Limits = LIMITS, **options: Any) -> LLM:
    """Prompts that begin with scripts[i][0] are followed by scripts[i][1] and EOS."""
    table = {tuple(prompt.encode()): (*answer.encode(), EOS) for prompt, answer in scripts}
    options = {"tokenizer": ByteTokenizer(), "chat_template": ChatTemplate(TEMPLATE), **options}
    return LLM.from_parts(FakeRunner(limits, scripts=table), limits, **options)


def seeded(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 6, "ignore_eos": True, **changes})


# ----------------------------------------------------------------------------------------------- generate


def test_results_come_in_the_order_of_the_prompts() -> None:
    """Texts and ids mixed, more prompts than run at once (B091)."""
    llm = make(*((f"{i}:", "x" * (12 - i)) for i in range(10)))
    prompts = [f"{i}:" if i % 2 else list(f"{i}:".encode()) for i in range(10)]
    outputs = llm.generate(prompts)
    assert [o.outputs[0].text for o in outputs] == ["x" * (12 - i) for i in range(10)]
    assert [o.prompt for o in outputs] == [f"{i}:" if i % 2 else None for i in range(10)]
    assert outputs[3].prompt_token_ids == tuple(b"3:")
    assert outputs[3].outputs[0].token_ids == (*b"x" * 9, EOS)
    assert outputs[3].outputs[0].finish_reason == "stop"
    assert len({o.request_id for o in outputs}) == 10
    assert outputs[3].metrics.ttft_s is not None


@pytest.mark.parametrize(
    "prompt", ["ab", [97, 98], (97, 98), np.array([97, 98]), [np.int32(97), np.int64(98)]]
)
def test_one_prompt_of_any_kind(prompt: Any) -> None:
    (output,) = make(("ab", "yes")).generate(prompt)
    assert output.outputs[0].text == "yes"
    assert output.prompt_token_ids == (97, 98)


@pytest.mark.parametrize(
    "prompts",
    [
        [np.array([97, 98]), np.array([97, 98, 99])],
        [np.array([97]), [97, 98]],
        np.array([[97, 98], [98, 97]]),
        np.array([[97, 98]], np.uint16),
    ],
)
def test_several_prompts_of_arrays(prompts: Any) -> None:
    outputs = make().generate(prompts, seeded())
    assert [o.prompt_token_ids for o in outputs] == [tuple(int(i) for i in row) for row in prompts]


@pytest.mark.parametrize("wrong", [[np.array([[97]])], [np.array([1.5])], 5, np.zeros((2, 2, 2), int)])
def test_arrays_that_are_no_prompts(wrong: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make().generate(wrong)
    assert caught.value.param == "prompt"


def test_no_prompts_are_no_answers() -> None:
    assert make().generate([]) == []
    assert make().chat([]) == []


def test_one_sampling_params_for_all_or_one_each() -> None:
    llm = make(("a", "123456"))
    texts = [o.outputs[0].text for o in llm.generate(["a", "a"], SamplingParams(max_tokens=2))]
    assert texts == ["12", "12"]
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    assert [o.outputs[0].text for o in llm.generate(["a", "a"], each)] == ["1", "123"]
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts") as caught:
        llm.generate(["a", "a"], each[:1])
    assert caught.value.param == "sampling_params"


def test_n_continuations_of_each_prompt() -> None:
    llm = make()
    outputs = llm.generate(["ab", "cd"], seeded(n=3, logprobs=1))
    for output in outputs:
        request = Request(
            request_id="x", prompt_token_ids=output.prompt_token_ids, sampling=seeded(n=3, logprobs=1)
        )
        for index, one in enumerate(output.outputs):
            assert (one.index, one.finish_reason) == (index, "length")
            assert one.token_ids == expected(request, LIMITS, index)[0]
            assert one.logprobs is not None
            assert one.cumulative_logprob == pytest.approx(
                sum(p[i].logprob for p, i in zip(one.logprobs, one.token_ids, strict=True))
            )
        assert output.metrics.total_s is not None


def test_logprobs_only_when_asked_for() -> None:
    (output,) = make(("a", "xyz")).generate("a")
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([300], "prompt"),
        ([-1], "prompt"),
        ([True, 1], "prompt"),
        ([1, "a"], "prompt"),
        ([2**63], "prompt"),
        ("\ud83d", "prompt"),
        (None, "prompt"),
        (b"bytes", "prompt"),
        ({"text": "a"}, "text"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ("x" * 128, "prompt"),
    ],
)
def test_one_wrong_prompt_stops_the_batch_before_it_starts(wrong: Any, param: str) -> None:
    """VA, B040, B071, B094, B095."""
    llm = make(("a", "yes"))
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", wrong, "a"])
    assert caught.value.param == param
    assert llm.stats()["requests"] == 0
    assert llm.generate("a")[0].outputs[0].text == "yes"


def test_one_wrong_sampling_stops_the_batch_too() -> None:
    llm = make(("a", "yes"))
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate(["a", "a"], [SamplingParams(), SamplingParams(max_tokens=128)])
    assert llm.stats()["requests"] == 0


def test_a_prompt_that_fails_later_disturbs_no_other() -> None:
    llm = make(("a", "yes"))
    llm.engine.runner.nan_tokens = {0}  # type: ignore[attr-defined]
    good, bad, again = llm.generate(["a", [0], "a"])
    assert (good.outputs[0].text, again.outputs[0].text) == ("yes", "yes")
    assert (bad.outputs[0].finish_reason, bad.outputs[0].text) == ("error", "")
    assert "finite" in (bad.outputs[0].error or "")


def test_ctrl_c_cancels_what_it_interrupts() -> None:
    llm = make(("a", "yes"))
    fetch = llm.engine.runner.fetch
    calls = iter(range(2))

    def interrupted(pending: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return fetch(pending)

    llm.engine.runner.fetch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 9)
    llm.engine.runner.fetch = fetch  # type: ignore[method-assign]
    assert not llm.engine.has_work
    assert llm.stats()["pages_live"] == 0
    assert [o.outputs[0].text for o in llm.generate(["a"] * 3)] == ["yes"] * 3


def test_an_engine_that_loses_a_request_does_not_hang() -> None:
    llm = make(("a", "yes"))
    llm.engine.step = lambda: [llm.engine.scheduler.finish(0, "abort")][:0]  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        llm.generate("a")


def test_progress_goes_to_stderr_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)
    llm = make(("a", "yes"))
    llm.generate(["a", "a"])
    assert capsys.readouterr() == ("", "")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    llm.generate(["a", "a"], progress=True)
    assert "generating" in terminal.getvalue()
    assert capsys.readouterr().out == ""


# -------------------------------------------------------------------------------------------- stream, chat


def test_stream_is_generate_piece_by_piece() -> None:
    llm = make(("a", "héllo 😀!"))
    events = list(llm.stream("a"))
    assert "".join(e.text for e in events) == llm.generate("a")[0].outputs[0].text == "héllo 😀!"
    assert [e.finish_reason for e in events if e.finish_reason] == ["stop"]
    assert [e.index for e in llm.stream("a", seeded(n=2)) if e.finish_reason] in ([0, 1], [1, 0])


def test_stream_refuses_at_the_call() -> None:
    llm = make()
    with pytest.raises(RequestError):
        llm.stream("")
    with pytest.raises(RequestError, match="prepared"):
        llm.stream(llm.prepare("a"), SamplingParams())


def test_closing_a_stream_cancels_its_request() -> None:
    llm = make()
    stream = llm.stream("a", seeded(max_tokens=100))
    next(stream)
    assert llm.stats()["running"] == 1
    stream.close()
    stats = llm.stats()
    assert (stats["running"], stats["pages_live"], stats["finished"]["abort"]) == (0, 0, 1)
    assert not llm.engine.has_work
    llm.stream("a").close()  # never begun: nothing to cancel
    assert llm.stats()["requests"] == 1


def test_streams_may_be_read_by_turns() -> None:
    """And a batch in between; the streams get their own events, whoever ran the step."""
    llm = make(("a", "aaaa"), ("b", "bbbbbbbb"), ("c", "cc"))
    first, second = llm.stream("a"), llm.stream("b")
    texts = ["", ""]
    for index, stream in [(0, first), (1, second), (0, first)]:
        texts[index] += next(stream).text
    assert llm.generate("c")[0].outputs[0].text == "cc"
    texts[1] += "".join(e.text for e in second)
    texts[0] += "".join(e.text for e in first)
    assert texts == ["aaaa", "bbbbbbbb"]


def test_closing_one_of_two_streams_leaves_the_other() -> None:
    llm = make(("a", "aaaa"), ("b", "bbbb"))
    first, second = llm.stream("a"), llm.stream("b")
    said = next(first).text
    next(second)
    second.close()
    assert said + "".join(e.text for e in first) == "aaaa"


def test_a_request_streamed_twice_at_once_is_refused_and_the_first_goes_on() -> None:
    llm = make(("a", "aaaa"))
    request = llm.prepare("a")
    first = llm.stream(request)
    said = next(first).text
    with pytest.raises(RequestError, match="in use"):
        next(llm.stream(request))
    assert said + "".join(e.text for e in first) == "aaaa"
    assert llm.stats()["finished"]["abort"] == 0
    assert "".join(e.text for e in llm.stream(request)) == "aaaa", "its id is free again"


def test_closing_a_stream_that_ended_leaves_the_next_of_the_same_request() -> None:
    llm = make(("a", "aaaa"))
    request = llm.prepare("a")
    first = llm.stream(request)
    while next(first).finish_reason is None:
        pass
    second = llm.stream(request)
    said = next(second).text
    first.close()
    assert said + "".join(e.text for e in second) == "aaaa"


def test_threads_may_share_one() -> None:
    llm = make(*((f"{i}:", f"answer {i}") for i in range(8)))
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = "".join(o.outputs[0].text for o in llm.generate([f"{i}:"] * 3))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == {i: f"answer {i}" * 3 for i in range(8)}


def test_chat_goes_through_the_template() -> None:
    llm = make(("[user]Hi/[assistant]", "Hello!"), ("[user]Bye/[assistant]", "See you"))
    hi, bye = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]
    (output,) = llm.chat(hi)
    assert output.outputs[0].text == "Hello!"
    assert [o.outputs[0].text for o in llm.chat([bye, hi])] == ["See you", "Hello!"]
    assert "".join(e.text for e in llm.stream(llm.prepare_chat(bye))) == "See you"


def test_template_options() -> None:
    llm = make()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]

    def text(**options: Any) -> str:
        return bytes(llm.prepare_chat(messages, **options).prompt_token_ids).decode()

    assert text() == "[user]Hi/[assistant]Well/[assistant]"
    assert text(continue_final_message=True) == "[user]Hi/[assistant]Well"
    assert text(add_generation_prompt=False, extra="!") == "[user]Hi/[assistant]Well!"
    with pytest.raises(RequestError) as caught:
        text(add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_encode_chat_is_what_prepare_chat_runs_however_long() -> None:
    llm = make()
    messages = [{"role": "user", "content": "Hi"}]
    assert tuple(llm.encode_chat(messages)) == llm.prepare_chat(messages).prompt_token_ids
    long = [{"role": "user", "content": "x" * 500}]
    assert len(llm.encode_chat(long)) == len("[user]/[assistant]") + 500
    with pytest.raises(RequestError, match="max_model_len"):
        llm.prepare_chat(long)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": [{"type": "text", "text": "a\udc00"}]}],
        [{"role": "user"}],
        ["Hi"],
        "Hi",
    ],
)
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make().prepare_chat(messages)
    assert caught.value.param == "messages"


def test_without_tokenizer_or_template() -> None:
    llm = make(tokenizer=None, chat_template=None)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(RequestError, match="stop strings"):
        llm.prepare([1], SamplingParams(stop="x"))
    (output,) = llm.generate([97], seeded())
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 6


# ------------------------------------------------------------------------------------------------ the rest


def test_prepare_schedules_nothing_and_makes_ids_of_its_own() -> None:
    llm = make()
    first, second = llm.prepare("ab"), llm.prepare([97, 98])
    assert first.prompt_token_ids == second.prompt_token_ids == (97, 98)
    assert (first.prompt, second.prompt) == ("ab", None)
    assert first.request_id != second.request_id
    assert first.sampling == SamplingParams()
    assert not llm.engine.has_work


def test_encode() -> None:
    assert make().encode("hé") == list("hé".encode())
    with pytest.raises(RequestError, match="surrogate"):
        make().encode("a\ud83d")


def test_the_engine_seed_fixes_unseeded_requests() -> None:
    def run(seed: int | None) -> list[tuple[int, ...]]:
        llm = make(engine_config=EngineConfig(seed=seed))
        return [o.outputs[0].token_ids for o in llm.generate(["a", "a"], seeded(seed=None))]

    assert run(3) == run(3)
    assert run(3) != run(None)
    assert len(set(run(3))) == 2


def test_an_unknown_engine_option_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM("nowhere", max_seqs=3)


def test_a_model_is_loaded_through_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from jaxinfer import runtime

    asked: list[Any] = []

    def load(model: str, config: EngineConfig, *, progress: bool | None) -> Any:
        asked.append((model, config, progress))
        return SimpleNamespace(
            runner=FakeRunner(LIMITS),
            limits=LIMITS,
            tokenizer=ByteTokenizer(),
            chat_template=None,
            model_name="tiny",
            model_config=None,
            engine_config=config,
            default_sampling=SamplingParams(top_k=3),
        )

    monkeypatch.setattr(runtime, "load", load)
    llm = LLM("tiny", max_num_seqs=2, progress=False)
    # Whoever makes an LLM of their own may give priorities; a server serves in order of arrival.
    assert asked == [("tiny", EngineConfig(max_num_seqs=2, scheduling_policy="priority"), False)]
    assert llm.prepare("a", priority=3).priority == 3
    assert llm.llm_engine is llm.engine
    stream = llm.stream("a", seeded())
    next(stream)
    assert llm.llm_engine.get_num_unfinished_requests() == 1
    stream.close()
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    served = LLM("tiny", scheduling_policy="fcfs")
    with pytest.raises(RequestError, match="scheduling_policy"):
        served.prepare("a", priority=3)
    assert llm.model_name == "tiny"
    assert llm.default_sampling == llm.prepare("a").sampling == SamplingParams(top_k=3)
    assert len(llm.generate("a", seeded())[0].outputs[0].token_ids) == 6


def test_a_forgotten_stream_closed_amid_a_step_does_not_hang() -> None:
    """A garbage collection may close a stream while this thread is inside a step and holds the lock."""
    llm = make(("a", "yes"), ("b", "no"))
    forgotten = [llm.stream("a")]
    next(forgotten[0])
    step = llm.engine.step

    def collecting_step() -> list[TokenEvent]:
        forgotten.clear()  # the last reference: the generator is closed here
        return step()

    llm.engine.step = collecting_step  # type: ignore[method-assign]
    assert llm.generate("b")[0].outputs[0].text == "no"
    assert not llm.engine.has_work
    assert llm.stats()["pages_live"] == 0


def test_ctrl_c_waits_for_the_end_of_the_step_and_leaves_the_engine_whole() -> None:
    llm = make(("a", "yes"))
    schedule = llm.engine.scheduler.schedule
    interrupted: list[bool] = []

    def interrupted_schedule() -> Any:
        plan = schedule()
        if not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)
        return plan

    llm.engine.scheduler.schedule = interrupted_schedule  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a")
    assert llm.generate("a")[0].outputs[0].text == "yes"
    assert llm.stats()["pages_live"] == 0
    assert not llm.engine.check()
