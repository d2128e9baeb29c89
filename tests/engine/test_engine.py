"""What the engine tells: events, text, ends, logprobs, numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from fake_runner import FakeRunner, expected

from jaxinfer.core import Limits, Logprob, Request, RequestError, SamplingParams, TokenEvent
from jaxinfer.engine import Engine
from jaxinfer.engine.output import LOGPROB_FLOOR
from jaxinfer.text import ByteTokenizer

BOS, EOS = 256, 257
LIMITS = Limits(
    num_pages=65,
    page_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_model_len=128,
    vocab_size=260,
    eos_token_ids=frozenset({EOS}),
)


class Clock:
    """Each look at it costs a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Request:
    params = SamplingParams(**{"seed": 0, "max_tokens": 8, **sampling})
    return Request(request_id=name, prompt_token_ids=prompt, sampling=params)


def engine(*scripts: bytes | list[int], limits: Limits = LIMITS, text: bool = True, **runner: Any) -> Engine:
    """Prompt (i,) is followed by scripts[i], then by EOS."""
    table = {(i,): (*script, EOS) for i, script in enumerate(scripts)}
    fake = FakeRunner(limits, scripts=table, **runner)
    return Engine(fake, limits, ByteTokenizer() if text else None, seed=0)


def drain(target: Engine, steps: int = 1000) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while target.has_work:
        events += target.step()
        steps -= 1
        assert steps, "no end"
    assert target.check() == []
    assert target.stats()["pages_live"] == 0
    return events


def say(script: bytes | list[int], **sampling: Any) -> tuple[str, TokenEvent, list[TokenEvent]]:
    """The text of one scripted answer, its last event and all of them."""
    target = engine(script)
    target.add(request(prompt=(0,), **{"max_tokens": 100, **sampling}))
    events = drain(target)
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    return "".join(e.text for e in events), events[-1], events


# ----------------------------------------------------------------------------------------------- events


def test_nothing_to_do() -> None:
    idle = engine()
    assert idle.step() == []
    assert not idle.has_work


def test_no_event_before_the_first_token_and_one_per_token_after() -> None:
    """A prompt of 40 and a budget of 16 (B039)."""
    target = engine(text=False)
    target.add(request(prompt=tuple(range(1, 41)), max_tokens=3, ignore_eos=True))
    assert [len(target.step()) for _ in range(5)] == [0, 0, 1, 1, 1]
    assert not target.has_work


def test_each_continuation_has_its_index_its_seed_and_one_end() -> None:
    """n = 3: the first equals n = 1 (B005, B091, B092)."""
    target = engine(text=False)
    three = request("three", n=3, ignore_eos=True)
    target.add(three)
    target.add(request("one", ignore_eos=True))
    events = drain(target)
    tokens = {}
    for event in events:
        key = event.request_id, event.index
        tokens[key] = (*tokens.get(key, ()), *event.token_ids)
    for index in range(3):
        assert tokens["three", index] == expected(three, LIMITS, index)[0]
    assert tokens["three", 0] == tokens["one", 0]
    assert len({tokens["three", i] for i in range(3)}) == 3
    ends = [(e.request_id, e.index) for e in events if e.finish_reason]
    assert sorted(ends) == [("one", 0), ("three", 0), ("three", 1), ("three", 2)]


def test_unseeded_requests_differ_and_follow_the_engine_seed() -> None:
    """Equal prompts in one batch, and in two engines (B083, B084)."""

    def run(seed: int | None) -> list[tuple[int, ...]]:
        target = Engine(FakeRunner(LIMITS), LIMITS, seed=seed)
        for name in "ab":
            target.add(request(name, seed=None, n=2, ignore_eos=True))
        target.add(request("seeded", seed=5, ignore_eos=True))
        out: dict[tuple[str, int], tuple[int, ...]] = {}
        for event in drain(target):
            key = event.request_id, event.index
            out[key] = out.get(key, ()) + event.token_ids
        return [out[key] for key in sorted(out)]

    first, second, third = run(1), run(1), run(None)
    assert first == second
    assert len(set(first)) == 5
    assert first[4] == third[4], "the seeded one"
    assert set(first[:4]).isdisjoint(third[:4])


# ------------------------------------------------------------------------------------------- text and ends


def test_text_is_the_decoded_tokens_whatever_the_pieces() -> None:
    text, last, events = say("héllo 😀 ok".encode())
    assert text == "héllo 😀 ok"
    assert "\ufffd" not in "".join(e.text for e in events)
    assert (last.token_ids, last.text, last.finish_reason, last.stop_reason) == ((EOS,), "", "stop", None)


def test_a_half_character_at_the_end_is_told_at_the_end() -> None:
    text, last, _ = say("a😀".encode()[:3], max_tokens=3)
    assert text.startswith("a\ufffd")
    assert last.finish_reason == "length"


def test_a_stop_string_over_several_tokens_is_cut_and_no_part_of_it_was_told() -> None:
    """B047, B048; what only looked like it is told late, not lost."""
    text, last, events = say(b"ABC DEF ABC DEFGHIJ rest", stop=["DEFGHIJ"])
    assert text == "ABC DEF ABC "
    assert (last.finish_reason, last.stop_reason, last.error) == ("stop", "DEFGHIJ", None)
    assert sum(len(e.token_ids) for e in events) == len("ABC DEF ABC DEFGHIJ")
    text, last, _ = say(b"ABC DEFGHIJ rest", stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert text == "ABC DEFGHIJ"


def test_held_back_text_comes_with_the_end() -> None:
    text, last, _ = say(b"AB DEF", stop=["DEFG"])
    assert (text, last.text, last.finish_reason) == ("AB DEF", "DEF", "stop")
    text, last, _ = say(b"AB DEF", stop=["DEFG"], max_tokens=6)
    assert (text, last.text, last.finish_reason) == ("AB DEF", "DEF", "length")


def test_a_stop_that_completes_with_the_last_token_allowed_is_a_stop() -> None:
    """B056: by string and by id; and by a string that only the end of the text decides."""
    text, last, _ = say(b"ab!!", stop=["!!"], max_tokens=4)
    assert (text, last.finish_reason, last.stop_reason) == ("ab", "stop", "!!")
    text, last, events = say([97, 98, 10, 99, 99, 99], stop_token_ids=[10], max_tokens=3)
    assert (text, last.finish_reason, last.stop_reason) == ("ab", "stop", 10)
    assert len(events) == 3
    text, last, _ = say(b"abc", stop=["abcd", "c"], max_tokens=3)
    assert (text, last.finish_reason, last.stop_reason) == ("ab", "stop", "c")


def test_a_stop_token_keeps_its_id_and_shows_its_text_only_when_asked() -> None:
    text, last, _ = say(b"abc", stop_token_ids=[98])
    assert (text, last.token_ids, last.stop_reason) == ("a", (98,), 98)
    text, _, _ = say(b"abc", stop_token_ids=[98], include_stop_str_in_output=True)
    assert text == "ab"


def test_eos_shows_its_text_only_when_special_tokens_are_shown() -> None:
    assert say(b"ab")[0] == "ab"
    assert say(b"ab", include_stop_str_in_output=True)[0] == "ab"
    assert say(b"ab", skip_special_tokens=False)[0] == "ab<|eos|>"


def test_min_tokens_holds_back_eos_stop_ids_and_stop_strings() -> None:
    """B051, B052."""
    text, _, events = say(b"a.b.c.", stop=["."], min_tokens=3)
    assert text == "a.b"
    assert len(events) == 4
    text, _, events = say(b"ab", min_tokens=5)
    assert all(e.token_ids[0] != EOS for e in events[:5])
    assert len(events) > 5


def test_ignore_eos_runs_to_max_tokens() -> None:
    """B053; and to the model's limit where max_tokens is omitted."""
    _, last, events = say(b"ab", ignore_eos=True, max_tokens=9)
    assert (len(events), last.finish_reason) == (9, "length")
    _, last, events = say(b"ab", ignore_eos=True, max_tokens=None)
    assert (len(events), last.finish_reason) == (127, "length")


def test_ids_past_the_tokenizer_have_no_text() -> None:
    """A model head wider than its tokenizer (B064)."""
    assert say([97, 259, 98])[0] == "ab"


def test_a_tokenizer_that_breaks_ends_only_its_sequence() -> None:
    target = engine(b"abc", b"abc")
    target.add(request("good", prompt=(0,)))
    target.add(request("bad", prompt=(1,)))
    stream = next(o for o in target._outputs.values() if o.sequence.request.request_id == "bad")._stream
    stream.push = lambda token_id: 1 / 0  # type: ignore[union-attr, method-assign]
    events = drain(target)
    bad = [e for e in events if e.request_id == "bad"]
    assert [(e.finish_reason, e.token_ids) for e in bad] == [("error", (97,))]
    assert "ZeroDivisionError" in (bad[0].error or "")
    assert "".join(e.text for e in events if e.request_id == "good") == "abc"


def test_without_a_tokenizer_text_is_empty_and_stop_strings_are_refused() -> None:
    target = engine(b"abc", text=False)
    target.add(request(prompt=(0,)))
    assert {e.text for e in drain(target)} == {""}
    with pytest.raises(RequestError, match="tokenizer"):
        target.add(request(stop="x"))


# ------------------------------------------------------------------------------------------------ logprobs


def test_logprobs_hold_the_chosen_one_and_the_top_k() -> None:
    """0 alternatives: the chosen one alone (B079). One entry per token, also where text is held (B073)."""
    for count in (0, 1, 2, 5):
        _, _, events = say(b"abc", logprobs=count, stop=["bcd"])
        for event in events:
            assert event.logprobs is not None
            (entries,) = event.logprobs
            (chosen,) = event.token_ids
            assert next(iter(entries)) == chosen
            assert entries[chosen] == Logprob(-1.0 - chosen / 260, 2, ByteTokenizer().token_text(chosen))
            # The fake's most likely are 0, then the chosen one, then the rest in order.
            assert len(entries) == max(count, 1 + min(count, 1))
    assert all(e.logprobs is None for e in say(b"abc")[2])


def test_minus_infinity_never_reaches_json() -> None:
    """B072."""
    _, _, events = say(b"abc", logprobs=5)
    values = [p.logprob for e in events for entries in e.logprobs or () for p in entries.values()]
    assert LOGPROB_FLOOR in values
    assert all(math.isfinite(v) for v in values)
    json.dumps([asdict(e) for e in events], allow_nan=False)


# ------------------------------------------------------------------------------------------------- cancels


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_cancel_in_any_state(steps: int) -> None:
    """Waiting, amid its prefill, decoding; n = 2. The same prompt again runs as fresh (B099, B100)."""
    target = engine(text=False)
    again = request("again", prompt=tuple(range(1, 41)), n=2, ignore_eos=True)
    target.add(request("r", prompt=again.prompt_token_ids, n=2, ignore_eos=True))
    for _ in range(steps):
        target.step()
    assert target.cancel("r")
    assert not target.cancel("r")
    assert target.stats()["pages_live"] == 0
    target.add(again)
    events = target.step()
    ends = [(e.request_id, e.index, e.finish_reason) for e in events if e.finish_reason]
    assert ends == [("r", 0, "abort"), ("r", 1, "abort")]
    assert events[0].metrics is not None
    tokens = [
        t for e in events + drain(target) if (e.request_id, e.index) == ("again", 0) for t in e.token_ids
    ]
    assert tuple(tokens) == expected(again, LIMITS)[0]
    assert target.stats()["finished"] == {"stop": 0, "length": 2, "abort": 2, "error": 0}


def test_cancel_leaves_finished_continuations_alone() -> None:
    target = engine(b"a", b"abcdef")
    target.add(request("short", prompt=(0,)))
    target.add(request("long", prompt=(1,)))
    for _ in range(3):
        target.step()
    assert not target.cancel("short")
    assert target.cancel("long")
    assert [(e.request_id, e.finish_reason) for e in drain(target)] == [("long", "abort")]
    assert not target.cancel("unknown")


def test_text_held_back_at_a_cancel_is_told() -> None:
    target = engine(b"ab DEF")
    target.add(request(prompt=(0,), stop="DEFG"))
    said = [target.step() for _ in range(6)]
    assert target.cancel("r")
    assert "".join(e.text for events in [*said, drain(target)] for e in events) == "ab DEF"


def test_ids_in_use_are_refused_and_free_again_after_the_end() -> None:
    """B097."""
    target = engine(b"a", text=False)
    target.add(request("r", prompt=(0,)))
    with pytest.raises(RequestError, match="in use") as caught:
        target.add(request("r", prompt=(0,)))
    assert caught.value.param == "request_id"
    drain(target)
    target.add(request("r", prompt=(0,)))
    assert drain(target)[-1].finish_reason == "stop"


# ------------------------------------------------------------------------------------------------- numbers


def test_times_count_from_arrival_and_survive_preemption() -> None:
    """B166. The clock moves by a second at each look, so only the order of things is checked."""
    limits = Limits(
        num_pages=7, page_size=2, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128, vocab_size=260
    )
    target = Engine(FakeRunner(limits), limits, clock=Clock())
    for name in "ab":
        target.add(request(name, max_tokens=10))
    events = drain(target)
    last = {e.request_id: e.metrics for e in events if e.finish_reason}
    assert last["a"] is not None
    assert last["b"] is not None
    assert (last["a"].preemptions, last["b"].preemptions) == (0, 1)
    for metrics in last.values():
        assert metrics is not None
        assert metrics.queue_s is not None
        assert metrics.ttft_s is not None
        assert metrics.total_s is not None
        assert 0 < metrics.queue_s < metrics.ttft_s < metrics.total_s
        assert metrics.tpot_s is not None
        assert metrics.ttft_s + 9 * metrics.tpot_s <= metrics.total_s
    stats = target.stats()
    assert stats["ttft_s"]["count"] == stats["tpot_s"]["count"] == 2
    assert stats["preemptions"] == 1


def test_one_token_has_no_time_per_token() -> None:
    target = engine(text=False)
    target.add(request(max_tokens=1))
    (event,) = drain(target)
    assert event.metrics is not None
    assert event.metrics.tpot_s is None
    assert event.metrics.ttft_s is not None


def test_stats() -> None:
    target = engine(text=False)
    target.add(request("r", max_tokens=4, n=2, ignore_eos=True))
    target.step()
    stats = target.stats()
    assert stats["pages_total"] == 64
    gauges = ("pages_free", "pages_live", "running", "waiting")
    assert [stats[name] for name in gauges] == [63, 1, 1, 1], "the second continuation waits for the prompt"
    target.step()
    assert [target.stats()[name] for name in gauges] == [62, 2, 2, 0]
    drain(target)
    stats = target.stats()
    assert stats["compiled_programs"] == 0, "the runner's own"
    assert (stats["requests"], stats["finished"]["length"], stats["steps"]) == (1, 2, 5)
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["computed_tokens"]) == (
        3,
        8,
        3 + 3 + 1 + 3,
    )
    assert stats["cached_tokens"] == 0, "what the second continuation shares is no hit of the cache"
    assert 0 < stats["host_share"] < 1
    json.dumps(stats, allow_nan=False)


def test_nothing_of_a_request_is_kept_after_its_end() -> None:
    """B164."""
    target = engine(b"ab")
    for number in range(200):
        target.add(request(f"r{number}", prompt=(0,)))
        if number % 3 == 0:
            target.cancel(f"r{number}")
    drain(target)
    scheduler = target.scheduler
    kept = [target._outputs, target._uids_of, target._unsaid, scheduler.running, scheduler.waiting]
    kept += [scheduler._in_flight, scheduler._suspects, target._flight, target._deadlines]
    assert not any(kept)
