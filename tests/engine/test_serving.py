"""What serving adds: the prefix cache, forks, priorities, deadlines, scored prompts, steps ahead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner, expected, score_of

from jaxinfer.core import Limits, Request, RequestError, SamplingParams, TokenEvent
from jaxinfer.engine import Engine
from jaxinfer.engine.scheduler import AGEING_S
from jaxinfer.engine.trace import FileTrace

LIMITS = Limits(
    num_pages=65, page_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, vocab_size=50
)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(
    limits: Limits = LIMITS, *, clock: Any = None, runner: dict[str, Any] | None = None, **options: Any
) -> Engine:
    options = {"prefix_caching": True, "asynchronous": True, **options}
    more = {} if clock is None else {"clock": clock}
    return Engine(FakeRunner(limits, **(runner or {})), limits, seed=0, **more, **options)


def request(name: str = "r", prompt: tuple[int, ...] = tuple(range(1, 11)), **changes: Any) -> Request:
    fields = {f.name for f in dataclasses.fields(Request)}
    own = {key: changes.pop(key) for key in tuple(changes) if key in fields}
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 4, "ignore_eos": True, **changes})
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, **own)


def run(target: Engine, *requests: Request) -> dict[tuple[str, int], list[TokenEvent]]:
    for each in requests:
        target.add(each)
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    while target.has_work:
        for event in target.step():
            events.setdefault((event.request_id, event.index), []).append(event)
        assert target.check() == []
    assert target.runner.garbage_reads == 0  # type: ignore[attr-defined]
    assert target.stats()["pages_live"] == 0
    return events


def tokens(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


# --------------------------------------------------------------------------------------- the prefix cache


def test_a_prompt_that_was_there_before_is_not_computed_again() -> None:
    target = engine()
    first = run(target, request("a"))["a", 0]
    computed = target.stats()["computed_tokens"]
    again = run(target, request("b"))["b", 0]
    assert tokens(again) == tokens(first) == expected(request(), LIMITS)[0]
    assert first[-1].metrics is not None
    assert again[-1].metrics is not None
    # Two full pages, and one token of the third: its page holds 9 and 10, and then what was generated.
    assert (first[-1].metrics.cached_tokens, again[-1].metrics.cached_tokens) == (0, 9)
    assert target.stats()["computed_tokens"] - computed == 1 + 3
    assert target.stats()["prefix_cache"]["hits"] == 9


def test_what_begins_alike_is_continued_in_a_copy() -> None:
    """Another text from the seventh token on: the first page is shared, two tokens of the second copied."""
    target = engine()
    run(target, request("a", max_tokens=6))
    other = request("b", prompt=(*range(1, 7), 40, 41, 42), max_tokens=6)
    events = run(target, other)["b", 0]
    assert tokens(events) == expected(other, LIMITS)[0]
    assert events[-1].metrics is not None
    assert events[-1].metrics.cached_tokens == 6
    assert [len(plan.copies) for plan in target.runner.plans].count(1) == 1  # type: ignore[attr-defined]
    assert (
        tokens(run(target, request("c", max_tokens=6))["c", 0]) == expected(request(max_tokens=6), LIMITS)[0]
    )


def test_a_salt_keeps_a_cache_to_itself() -> None:
    target = engine()
    cached = []
    for number, salt in enumerate(("x", "y", "x", None)):
        (event,) = run(target, request(f"r{number}", cache_salt=salt, max_tokens=1))[f"r{number}", 0]
        assert event.metrics is not None
        cached.append(event.metrics.cached_tokens)
    assert cached == [0, 0, 8, 0]


def test_what_a_failed_step_or_a_nan_has_left_is_never_found() -> None:
    """B150, B159: afterwards the same prompt runs as cold."""
    for broken in ({"fail_steps": {1}}, {"nan_tokens": {10}}):
        target = engine(runner=broken)
        run(target, request("a", max_tokens=1), request("b", prompt=tuple(range(20, 30)), max_tokens=1))
        target.runner.nan_tokens = ()  # type: ignore[attr-defined]
        (event,) = run(target, request("c", max_tokens=1))["c", 0]
        assert event.token_ids == expected(request(max_tokens=1), LIMITS)[0]
        assert event.metrics is not None
        if "nan_tokens" in broken:
            assert event.metrics.cached_tokens == 0


def test_eviction_takes_what_was_used_last() -> None:
    """A pool of 8 pages and prompts of 2: the one used again stays, the others go, and all come out right."""
    small = dataclasses.replace(LIMITS, num_pages=9)
    target = engine(small)
    prompts = [tuple(range(10 * i, 10 * i + 9)) for i in range(5)]
    for number in range(20):
        run(target, request(f"keep{number}", prompt=prompts[0], max_tokens=1))
        ask = request(f"r{number}", prompt=prompts[1 + number % 4], max_tokens=2)
        assert tokens(run(target, ask)[f"r{number}", 0]) == expected(ask, small)[0]
    (event,) = run(target, request("last", prompt=prompts[0], max_tokens=1))["last", 0]
    assert event.metrics is not None
    assert event.metrics.cached_tokens == 8
    assert target.stats()["prefix_cache"]["evictions"] > 0


def test_continuations_share_the_prompts_pages() -> None:
    """Four of a prompt of 18 tokens (5 pages): 4 pages shared, and a copy of the fifth for each."""
    target = engine(prefix_caching=False)
    asked = request("a", prompt=tuple(range(18)), n=4, max_tokens=9)
    target.add(asked)
    most = 0
    while target.has_work:
        target.step()
        most = max(most, target.stats()["pages_live"])
    assert most == 4 + 4 * 2, "what each generates goes into pages of its own"
    events = run(engine(), asked)
    for index in range(4):
        assert tokens(events["a", index]) == expected(asked, LIMITS, index)[0]


# ------------------------------------------------------------------------------------------- who is first


def order_of_ends(target: Engine, *requests: Request) -> list[str]:
    for each in requests:
        target.add(each)
    ends = []
    while target.has_work:
        ends += [event.request_id for event in target.step() if event.finish_reason]
    return ends


def test_the_urgent_are_served_first_and_take_the_rows_of_the_others() -> None:
    one = dataclasses.replace(LIMITS, max_num_seqs=1)
    jobs = [request("slow", priority=0, max_tokens=8), request("urgent", priority=-1, max_tokens=8)]
    assert order_of_ends(engine(one, policy="priority"), *jobs) == ["urgent", "slow"]
    assert order_of_ends(engine(one, policy="fcfs"), *jobs) == ["slow", "urgent"]
    target = engine(one, policy="priority")
    target.add(jobs[0])
    target.step()
    target.step()
    assert order_of_ends(target, jobs[1]) == ["urgent", "slow"]
    assert target.stats()["preemptions"] == 1


def test_whoever_waits_long_enough_overtakes() -> None:
    one, clock = dataclasses.replace(LIMITS, max_num_seqs=1), Clock()
    target = engine(one, policy="priority", clock=clock)
    target.add(request("first", priority=-5, max_tokens=3))
    target.add(request("patient", priority=1, max_tokens=3))
    clock.now += AGEING_S + 1
    assert order_of_ends(target, request("late", priority=0, max_tokens=3)) == ["first", "patient", "late"]


def test_a_request_ends_when_its_time_is_up() -> None:
    clock = Clock()
    target = engine(clock=clock)
    target.add(request("a", max_tokens=50, timeout_s=5.0))
    target.add(request("b", max_tokens=50))
    events = [*target.step(), *target.step()]
    clock.now += 5.0
    while target.has_work:
        events += target.step()
    ends = {event.request_id: event for event in events if event.finish_reason}
    assert (ends["a"].finish_reason, ends["b"].finish_reason) == ("abort", "length")
    assert ends["a"].error == "not finished within its timeout of 5 s"
    assert target.stats()["pages_live"] == 0
    waiting = engine(dataclasses.replace(LIMITS, max_num_seqs=1), clock=clock)
    waiting.add(request("a", max_tokens=50))
    waiting.add(request("b", timeout_s=1.0))
    waiting.step()
    clock.now += 2
    assert [e.request_id for e in waiting.step() if e.finish_reason] == ["b"], "also while it waits"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 1.5), ("priority", True), ("priority", 10**9), ("cache_salt", ""), ("cache_salt", 7),
        ("cache_salt", "x" * 300), ("timeout_s", 0), ("timeout_s", float("nan")), ("timeout_s", "1"),
        ("timeout_s", 10**400),
    ],
)  # fmt: skip
def test_odd_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine().add(request(**{name: value}))
    assert caught.value.param == name


def test_a_long_prompt_stalls_nobody() -> None:
    """While 100 tokens enter in chunks, each step also runs the streams that are under way."""
    target = engine(asynchronous=False)
    for name in "ab":
        target.add(request(name, prompt=(1, 2), max_tokens=40))
    target.step()
    target.add(request("long", prompt=tuple(i % 50 for i in range(100)), max_tokens=2))
    told = []
    while not any(event.request_id == "long" for event in told):
        told = target.step()
        assert {"a", "b"} <= {event.request_id for event in told}


# -------------------------------------------------------------------------------------------- scored prompts


@pytest.mark.parametrize("budget", [2, 3, 7, 64])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompt_logprobs_are_those_of_every_position(budget: int, asynchronous: bool) -> None:
    limits = dataclasses.replace(LIMITS, max_num_batched_tokens=budget)
    prompt = tuple(range(1, 24))
    target = engine(limits, asynchronous=asynchronous)
    run(target, request("warm", prompt=prompt))  # the cache is not used: the logits are wanted
    asked = request("r", prompt=prompt, prompt_logprobs=2, n=2, max_tokens=3)
    events = run(target, asked, request("other", prompt=(9,) * 9))
    (told,) = [e.prompt_logprobs for e in events["r", 0] if e.prompt_logprobs is not None]
    assert not any(e.prompt_logprobs for e in events["r", 1])
    assert told[0] is None
    assert len(told) == len(prompt)
    for position, entries in enumerate(told[1:], 1):
        score = score_of(list(prompt[:position]), prompt[position], 2)
        assert entries is not None
        assert entries[prompt[position]].logprob == score.logprob
        assert len(entries) >= 2
    assert tokens(events["r", 0]) == expected(asked, limits)[0]
    assert tokens(events["r", 1]) == expected(asked, limits, 1)[0]


def test_prompt_logprobs_survive_a_preemption() -> None:
    small = dataclasses.replace(LIMITS, num_pages=13, max_num_batched_tokens=6)
    target = engine(small)
    asked = [
        request(f"r{i}", prompt=tuple((i + j) % 50 for j in range(14)), prompt_logprobs=0, max_tokens=20)
        for i in range(3)
    ]
    events = run(target, *asked)
    assert target.stats()["preemptions"] > 0
    for each in asked:
        (told,) = [e.prompt_logprobs for e in events[each.request_id, 0] if e.prompt_logprobs is not None]
        prompt = each.prompt_token_ids
        for position in range(1, len(prompt)):
            entries = told[position]
            assert entries is not None
            assert (
                entries[prompt[position]].logprob
                == score_of(list(prompt[:position]), prompt[position], 0).logprob
            )


# ------------------------------------------------------------------------------------------------ steps ahead


def test_the_next_step_starts_before_the_last_one_is_read() -> None:
    target = engine()
    events = run(target, request("a", max_tokens=9))["a", 0]
    runner: Any = target.runner
    assert runner.most_in_flight == 2
    assert sum(piece.chained for plan in runner.plans for piece in plan.slices) == 8
    assert tokens(events) == expected(request(max_tokens=9), LIMITS)[0]


def test_the_trace_is_json_and_tells_of_steps_and_requests(tmp_path: Path) -> None:
    trace = FileTrace(tmp_path / "trace.json")
    target = engine(trace=trace)
    run(target, request("a"), request("b", n=2))
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("step ") for name in names) == target.stats()["steps"]
    assert names.count("token") == 3 * 4
    assert [names.count(name) for name in ("arrived", "queue", "prefill", "decode")] == [2, 3, 3, 3]
    assert all(event.get("dur", 0) >= 0 for event in events)
    gauges = [event["args"] for event in events if event.get("name") == "gauges"]
    assert all(g["pages_free"] + g["pages_cached"] + g["pages_live"] == 64 for g in gauges)


# ------------------------------------------------------------------------------------ what review has found


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    target = engine(trace=FileTrace("/dev/full"))
    for number in range(40):
        events = run(target, request(f"r{number}"))
        assert tokens(events[f"r{number}", 0]) == expected(request(), LIMITS)[0]
    target.trace.close()
    assert sum("the trace ends here" in record.message for record in caplog.records) == 1


def test_deadlines_of_the_ended_are_not_kept_and_are_not_a_later_requests() -> None:
    """B164."""
    clock = Clock()
    target = engine(clock=clock)
    for _ in range(300):
        run(target, request("again", timeout_s=5.0, max_tokens=1))
    assert len(target._deadlines) < 200
    clock.now += 4.0
    target.add(request("again", timeout_s=5.0, max_tokens=9))
    target.step()
    clock.now += 2.0  # the time of the earlier ones is up
    events = []
    while target.has_work:
        events += target.step()
    assert events[-1].finish_reason == "length"


def test_an_error_of_a_step_that_nobody_waited_for_is_blamed_on_nobody() -> None:
    target = engine(runner={"fail_steps": {2}, "fail_in": "dispatch"})
    target.add(request("doomed", max_tokens=20))
    target.step()
    target.step()
    target.cancel("doomed")  # its step is in flight, and nobody waits for it
    assert target._flight is None
    innocent = request("innocent")
    events = run(target, innocent)
    assert tokens(events["innocent", 0]) == expected(innocent, LIMITS)[0]


def test_the_urgent_take_pages_only_where_that_helps() -> None:
    """A newcomer that would not fit beside a more urgent one costs nobody its pages."""
    small = dataclasses.replace(LIMITS, num_pages=13)
    target = engine(small, policy="priority", prefix_caching=False, asynchronous=False)
    target.add(request("first", prompt=tuple(range(24)), priority=-9, max_tokens=16))
    target.add(request("low", prompt=(1, 2, 3), priority=9, max_tokens=8))
    target.step()
    target.step()
    target.step()
    target.add(request("big", prompt=tuple(range(30)), priority=0, max_tokens=8))
    target.step()
    assert target.stats()["preemptions"] == 0
    while target.has_work:
        target.step()
    assert target.check() == []


def test_a_flood_of_long_prompts_starves_nobody() -> None:
    """Twenty long prompts, and streams among them: each step runs what is under way, and all end in order."""
    target = engine(asynchronous=False)
    target.add(request("stream", prompt=(1, 2), max_tokens=60))
    target.step()
    for number in range(20):
        target.add(request(f"long{number}", prompt=tuple((number + i) % 50 for i in range(90)), max_tokens=2))
    target.add(request("short", prompt=(7,), max_tokens=2))
    ends, told = [], 0
    while target.has_work:
        events = target.step()
        if "stream" not in ends:
            assert "stream" in {event.request_id for event in events}, "a running stream misses no step"
        ends += [event.request_id for event in events if event.finish_reason]
        told += 1
    longs = [name for name in ends if name.startswith("long")]
    assert longs == [f"long{n}" for n in range(20)]
    assert "short" in ends


def test_a_row_without_a_choice_ends_and_keeps_the_cache() -> None:
    from jaxinfer.core import Sampled

    target = engine(asynchronous=False)
    target.runner._sample = lambda draw, history: Sampled(0, float("-inf"), 0)  # type: ignore[attr-defined]
    (event,) = run(target, request("r"))["r", 0]
    assert event.error == "no token is left to choose: biases, masks and held-back ids exclude all"
