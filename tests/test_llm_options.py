"""What requests, engines and texts may ask for beside sampling: priority, salt, timeout, trace, scores."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner, score_of
from test_llm import LIMITS, make, seeded

from jaxinfer.config import DynamicRope, EngineConfig, LayerConfig, LinearRope, ModelConfig, Rope
from jaxinfer.core import ConfigError, JaxInferError, RequestError, SamplingParams
from jaxinfer.llm import LLM

CHAT = [{"role": "user", "content": "Hi"}]


def urgent(**options: Any) -> LLM:
    return make(engine_config=EngineConfig(scheduling_policy="priority"), **options)


# ------------------------------------------------------------------------------- options of a request


def test_options_reach_the_request() -> None:
    llm, options = urgent(), {"priority": -2, "cache_salt": "mine", "timeout_s": 5.0}
    for request in (llm.prepare("a", **options), llm.prepare_chat(CHAT, **options)):  # type: ignore[arg-type]
        assert (request.priority, request.cache_salt, request.timeout_s) == (-2, "mine", 5.0)
    plain = llm.prepare("a")
    assert (plain.priority, plain.cache_salt, plain.timeout_s) == (0, None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 1.5), ("priority", True), ("priority", 1001), ("priority", "1"),
        ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 257),
        ("timeout_s", 0), ("timeout_s", -1), ("timeout_s", "1"), ("timeout_s", math.inf), ("timeout_s", True),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(name: str, value: Any) -> None:
    llm = urgent()
    calls = [
        lambda: llm.prepare("a", **{name: value}),
        lambda: llm.prepare_chat(CHAT, **{name: value}),
        lambda: llm.generate(["a", "b"], **{name: value}),
        lambda: llm.generate(["a", "b"], **{name: [llm.prepare("a").__getattribute__(name), value]}),
        lambda: llm.chat(CHAT, **{name: value}),
        lambda: llm.stream("a", **{name: value}),
    ]
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == name
    assert llm.stats()["requests"] == 0


def test_a_batch_takes_one_value_or_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    real = LLM._answer

    def answer(self: LLM, requests: Any, progress: Any) -> Any:
        seen.append(tuple((r.priority, r.cache_salt, r.timeout_s) for r in requests))
        return real(self, requests, progress)

    monkeypatch.setattr(LLM, "_answer", answer)
    llm = urgent()
    llm.generate(["a", "b"], seeded(), priority=[3, -1], cache_salt="x", timeout_s=[None, 9.0])
    llm.chat([CHAT, CHAT], seeded(), priority=2, cache_salt=("x", None))
    assert seen == [((3, "x", None), (-1, "x", 9.0)), ((2, "x", None), (2, None, None))]
    for name, wrong in (("priority", [1]), ("cache_salt", ["a", "b", "c"]), ("timeout_s", [])):
        with pytest.raises(RequestError, match=f"{name} has {len(wrong)} values for 2 prompts") as caught:
            llm.generate(["a", "b"], **{name: wrong})  # type: ignore[arg-type]
        assert caught.value.param == name


def test_a_priority_without_effect_is_refused() -> None:
    with pytest.raises(RequestError, match="scheduling_policy") as caught:
        make().prepare("a", priority=1)
    assert caught.value.param == "priority"
    assert make().prepare("a", priority=0).priority == 0


def test_the_urgent_are_answered_first() -> None:
    llm = urgent(limits=replace(LIMITS, max_num_seqs=1))
    requests = [llm.prepare("a", seeded(), priority=priority) for priority in (5, 0, -5)]
    ends = [e.request_id for e in llm._turns.events(requests) if e.finish_reason]
    assert ends == [request.request_id for request in reversed(requests)]


def test_a_request_ends_when_its_time_is_up() -> None:
    llm = make()
    clock = itertools.count()
    llm.engine.clock = lambda: float(next(clock))
    slow, quick = llm.generate(["a", "b"], seeded(max_tokens=100), timeout_s=[50.0, None])
    assert (slow.outputs[0].finish_reason, quick.outputs[0].finish_reason) == ("abort", "length")
    assert "50 s" in (slow.outputs[0].error or "")
    assert len(slow.outputs[0].token_ids) < 100
    assert llm.stats()["pages_live"] == 0


def test_a_prepared_request_has_its_options_already() -> None:
    llm = urgent()
    for options in ({"priority": 1}, {"cache_salt": "x"}, {"timeout_s": 1.0}):
        with pytest.raises(RequestError, match="already") as caught:
            llm.stream(llm.prepare("a"), **options)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(options))


def test_salts_keep_the_prefix_cache_apart() -> None:
    llm = make()
    prompt = list(range(40))

    def cached(salt: str | None) -> int:
        return llm.generate(prompt, seeded(), cache_salt=salt)[0].metrics.cached_tokens

    assert [cached(salt) for salt in (None, "a", "b")] == [0, 0, 0]
    assert all(cached(salt) >= 36 for salt in (None, "a", "b"))


def test_of_several_continuations_the_prompt_is_counted_once() -> None:
    llm = make()
    llm.generate(list(range(40)), seeded())
    (output,) = llm.generate(list(range(40)), seeded(n=3))
    assert 36 <= output.metrics.cached_tokens < 40


# ----------------------------------------------------------------------------- options of the engine


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_the_engine_is_built_as_configured(asynchronous: bool, caching: bool) -> None:
    config = EngineConfig(async_scheduling=asynchronous, enable_prefix_caching=caching, seed=1)
    llm = make(("a", "yes"), engine_config=config)
    assert (llm.engine.asynchronous, llm.engine.scheduler.policy) == (asynchronous, "fcfs")
    assert (llm.engine.scheduler.tables.cache is not None) == caching
    assert [o.outputs[0].text for o in llm.generate(["a"] * 9)] == ["yes"] * 9
    assert "".join(event.text for event in llm.stream("a")) == "yes"
    assert urgent().engine.scheduler.policy == "priority"


def model(rope: Rope | None = None, window: int | None = None) -> ModelConfig:
    return ModelConfig(
        vocab_size=259, hidden_size=8, intermediate_size=8, num_heads=1, head_dim=8,
        layers=(LayerConfig(1, window),), max_position=128, rms_norm_eps=1e-5, rope=rope or Rope(),
        tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (model(), None),
        (model(LinearRope(factor=2.0)), None),
        (model(DynamicRope(factor=2.0, original_max_position=128)), None),
        (model(DynamicRope(factor=2.0, original_max_position=127)), "dynamic rope"),
        (model(window=16), "sliding window"),
    ],
)
def test_prefix_caching_is_off_where_it_cannot_be(
    config: ModelConfig, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = make(model_config=config)
        assert (llm.engine.scheduler.tables.cache is None) == (told is not None)
        assert len(caplog.messages) == (told is not None)
        assert all(told in message for message in caplog.messages if told)
        caplog.clear()
        make(model_config=config, engine_config=EngineConfig(enable_prefix_caching=False))
    assert not caplog.messages


def test_a_trace_is_complete_when_the_llm_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with make(("a", "yes"), engine_config=EngineConfig(trace=str(path))) as llm:
        llm.generate("a")
    names = [event.get("name") for event in json.loads(path.read_text())]
    assert {"step 0", "arrived", "token", "decode"} <= set(names)
    llm.close()
    assert llm.generate("a")[0].outputs[0].text == "yes", "it goes on, untraced"
    assert names == [event.get("name") for event in json.loads(path.read_text())]


def test_a_trace_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace"):
        LLM("nowhere", trace=str(tmp_path / "no" / "trace.json"))


# ----------------------------------------------------------------------------- scores of prompts


@pytest.mark.parametrize("asynchronous", [True, False])
def test_logprobs_of_the_prompt(asynchronous: bool) -> None:
    """Of every token but the first, however the prompt is cut into chunks, and beside others."""
    llm = make(engine_config=EngineConfig(async_scheduling=asynchronous))
    prompts = [list(range(7, 7 + length)) for length in (1, 2, 50)]
    for n in (1, 3):
        for output in llm.generate(prompts, seeded(n=n, prompt_logprobs=2)):
            ids, known = list(output.prompt_token_ids), output.prompt_logprobs
            assert known is not None
            assert (known[0], len(known)) == (None, len(ids))
            for i, entries in enumerate(known[1:], 1):
                assert entries is not None
                assert entries[ids[i]].logprob == score_of(ids[:i], ids[i], 2).logprob
                assert set(entries) == {ids[i], 0, 1}
    assert llm.generate("a", seeded())[0].prompt_logprobs is None


def test_score_is_the_sum_of_the_logprobs_of_the_prompt() -> None:
    llm = make()
    texts = ["hello there", [5, 6, 7], "x" * 127]
    scores = llm.score(texts)
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    for score, output in zip(scores, outputs, strict=True):
        assert score.token_ids == output.prompt_token_ids
        known = [
            k and k[i].logprob for i, k in zip(score.token_ids, output.prompt_logprobs or (), strict=True)
        ]
        assert list(score.logprobs) == known
        assert score.nll == pytest.approx(-sum(known[1:]))  # type: ignore[arg-type]
        assert score.perplexity == pytest.approx(math.exp(score.nll / (len(known) - 1)))
    assert llm.score("hello there") == scores[:1]
    assert llm.score([5, 6, 7]) == scores[1:2]
    assert llm.score([]) == []
    assert scores[0] == llm.score(["hello there", "another"])[0]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [("", "0 tokens"), ("a", "1 tokens"), ([5], "1 tokens"), ("x" * 128, "128 tokens.*127")],
)
def test_texts_that_cannot_be_scored_are_refused_by_name(wrong: Any, told: str) -> None:
    llm = make()
    with pytest.raises(RequestError, match=f"text 2 has {told}") as caught:
        llm.score(["fine", wrong])
    assert caught.value.param == "prompt"
    assert llm.stats()["requests"] == 0


def test_a_score_whose_run_fails_raises() -> None:
    llm = make()
    llm.engine.runner.nan_tokens = {0}  # type: ignore[attr-defined]
    with pytest.raises(JaxInferError, match="finite"):
        llm.score([[0, 1], [2, 3]])
    assert llm.score([[2, 3]])[0].nll > 0


def test_a_text_that_is_all_but_impossible_has_an_infinite_perplexity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fake_runner

    worst = fake_runner.Sampled(0, -math.inf, 1)
    monkeypatch.setattr(
        fake_runner, "score_of", lambda history, target, count: worst._replace(token_id=target)
    )
    (score,) = make().score("ab")
    assert (score.nll, score.perplexity) == (9999.0, math.inf)


# ------------------------------------------------------------------------------------------ loops


def test_streams_read_by_turns_while_a_step_is_in_flight() -> None:
    """Cancels, ends and new requests while the device still runs a step for them."""
    llm = make()
    streams = [llm.stream([i, i], seeded(max_tokens=3 + i)) for i in range(1, 9)]
    said = [list(itertools.islice(stream, 2)) for stream in streams]
    for stream in streams[::2]:
        stream.close()
    rest = [list(stream) for stream in streams[1::2]]
    for i, tail in zip(range(1, 8, 2), rest, strict=True):
        assert len([t for e in [*said[i], *tail] for t in e.token_ids]) == 4 + i
    assert (llm.stats()["pages_live"], llm.engine.has_work, llm.engine.check()) == (0, False, [])


def test_a_default_repetition_penalty_is_used() -> None:
    seen: list[list[int]] = []
    llm = make(default_sampling=SamplingParams(repetition_penalty=1.3, max_tokens=3))
    runner: FakeRunner = llm.engine.runner  # type: ignore[assignment]
    sample = runner.sample

    def noted(pending: Any, draws: Any) -> None:
        seen.extend(list(draw.changes.ids) for draw in draws if draw is not None)
        sample(pending, draws)

    runner.sample = noted  # type: ignore[method-assign]
    (output,) = llm.generate([5, 5, 9], {"seed": 1})
    assert seen == [[5, 9, *output.outputs[0].token_ids[:i]] for i in range(3)]


def test_what_depends_on_the_platform_is_filled_in_and_nothing_else() -> None:
    cpu, gpu = EngineConfig().on("cpu"), EngineConfig().on("gpu")
    assert (cpu.dtype, cpu.kv_cache_dtype, cpu.max_num_seqs, cpu.max_num_batched_tokens) == (
        "float32", "float32", 32, 512
    )  # fmt: skip
    assert (gpu.dtype, gpu.kv_cache_dtype, gpu.max_num_seqs, gpu.max_num_batched_tokens) == (
        "bfloat16", "bfloat16", 256, 2048
    )  # fmt: skip
    stated = EngineConfig(dtype="float16", kv_cache_dtype="int8", max_num_seqs=3, max_num_batched_tokens=7)
    assert stated.on("cpu") == stated.on("gpu") == stated
    assert EngineConfig(dtype="float16").on("gpu").kv_cache_dtype == "float16"
