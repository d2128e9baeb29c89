"""What an engine survives: failed steps, rows of NaN, Ctrl-C, faults of its own; and what is told of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fake_runner import expected
from test_engine import LIMITS, drain, engine, request

from jaxinfer.core import RequestError


@pytest.mark.parametrize("fail_in", ["dispatch", "fetch"])
def test_a_failed_step_fails_its_culprit_and_the_engine_goes_on(fail_in: str) -> None:
    """B102, B150: also after the failure everything runs as if nothing had been."""
    target = engine(text=False, fail_tokens={255}, fail_in=fail_in)
    good, late = request("good", ignore_eos=True), request("late", prompt=(9, 9), ignore_eos=True)
    target.add(good)
    target.add(request("bad", prompt=(5, 255, 5)))
    events = drain(target)
    target.add(late)
    events += drain(target)
    (bad,) = [e for e in events if e.request_id == "bad"]
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert "DeviceError" in (bad.error or "")
    for asked in (good, late):
        tokens = [t for e in events if e.request_id == asked.request_id for t in e.token_ids]
        assert tuple(tokens) == expected(asked, LIMITS)[0]
    stats = target.stats()
    assert (stats["failed_steps"], stats["finished"]["error"]) == (2, 1)


def test_failed_steps_in_a_row_are_counted_until_one_is_good() -> None:
    target = engine(text=False, fail_steps={1, 2, 3, 6})
    for name in "abcd":
        target.add(request(name, max_tokens=30, ignore_eos=True))
    counts = []
    for _ in range(7):
        target.step()
        counts.append(target.stats()["failed_in_a_row"])
    assert counts == [0, 1, 2, 3, 0, 0, 1]
    assert target.failed_in_a_row == 1


def test_a_step_that_failed_before_the_device_was_touched_costs_no_recomputation() -> None:
    target = engine(text=False, fail_tokens={255}, fail_in="host")
    good = request("good", ignore_eos=True)
    target.add(good)
    events = target.step()
    target.add(request("bad", prompt=(5, 255, 5)))
    events += drain(target)
    assert [e.finish_reason for e in events if e.request_id == "bad"] == ["error"]
    assert (
        tuple(t for e in events if e.request_id == "good" for t in e.token_ids) == expected(good, LIMITS)[0]
    )
    assert target.stats()["failed_steps"] == 2
    assert target.stats()["computed_tokens"] == 3 + 7, "each token of good once"


def test_what_the_client_hears_of_a_failed_step_is_one_short_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = engine(text=False)
    target.add(request())

    def dispatch(plan: Any) -> Any:
        raise ValueError("/home/me/secret.py\n" + "HLO " * 10_000)

    target.runner.dispatch = dispatch  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        (event,) = drain(target)
    assert event.error == "the step failed on the device (ValueError)"
    assert "/home/me/secret.py" in caplog.text


def test_what_the_client_hears_of_a_failed_detokeniser_is_one_short_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = engine(b"abc")
    target.add(request(prompt=(0,)))
    (output,) = target._outputs.values()

    def push(*arguments: Any) -> str:
        raise ValueError("/home/me/secret.py")

    output._stream.push = push  # type: ignore[union-attr, method-assign]
    with caplog.at_level(logging.ERROR):
        (event,) = drain(target)
    assert event.error == "detokenising token 97 failed (ValueError)"
    assert "/home/me/secret.py" in caplog.text


@pytest.mark.parametrize("place", ["tell", "commit", "after"])
def test_a_fault_between_recording_and_telling_hangs_nobody_and_loses_no_token(place: str) -> None:
    """Whoever has a token that was not told ends with "error"; earlier events come with the next step."""
    target = engine(text=False)
    asked = [request(name, ignore_eos=True) for name in "abc"]
    for one in asked:
        target.add(one)
    said = target.step()
    calls = iter(range(100))
    owner: Any = {"tell": target, "commit": target.scheduler, "after": target}[place]
    name = {"tell": "_tell", "commit": "_append", "after": "_check_when_idle"}[place]
    real = getattr(owner, name)

    def faulty(*arguments: Any) -> Any:
        if next(calls) == (0 if place == "after" else 1):
            raise ZeroDivisionError
        return real(*arguments)

    setattr(owner, name, faulty)
    with pytest.raises(ZeroDivisionError):
        target.step()
    delattr(owner, name)
    events = said + drain(target)
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason}
    # In commit, a's token was recorded and never told; b and c had none yet and run it again.
    failed = {"tell": "bc", "commit": "a", "after": ""}[place]
    assert ends == {name: "error" if name in failed else "length" for name in "abc"}
    for one in asked:
        tokens = tuple(t for e in events if e.request_id == one.request_id for t in e.token_ids)
        full = expected(one, LIMITS)[0]
        assert tokens == (full[:1] if one.request_id in failed else full)


def test_a_token_whose_logprobs_cannot_be_told_ends_its_sequence() -> None:
    target = engine(b"abc")
    target.add(request(prompt=(0,), max_tokens=1, logprobs=1))
    target.tokenizer.token_text = lambda token: 1 / 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        target.step()
    (event,) = drain(target)
    assert (event.finish_reason, event.token_ids) == ("error", ())
    assert target.stats()["finished"] == {"stop": 0, "length": 0, "abort": 0, "error": 1}


def test_the_ends_of_the_cancelled_survive_an_interrupted_step() -> None:
    target = engine(text=False)
    target.add(request("a"))
    target.add(request("b", ignore_eos=True))
    target.step()
    target.cancel("a")
    real = target.runner.fetch

    def interrupted(pending: Any) -> Any:
        raise KeyboardInterrupt

    target.runner.fetch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        target.step()
    target.runner.fetch = real  # type: ignore[method-assign]
    assert ("a", "abort") in [(e.request_id, e.finish_reason) for e in drain(target)]


def test_a_row_of_nan_ends_alone() -> None:
    """B159."""
    target = engine(text=False, nan_tokens={255})
    good = request("good", ignore_eos=True)
    target.add(request("bad", prompt=(5, 255, 5)))
    target.add(good)
    events = drain(target)
    (bad,) = [e for e in events if e.request_id == "bad"]
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert "finite" in (bad.error or "")
    assert tuple(t for e in events if e is not bad for t in e.token_ids) == expected(good, LIMITS)[0]
    assert target.stats()["failed_steps"] == 0


@pytest.mark.parametrize("place", ["dispatch", "fetch", "commit"])
def test_ctrl_c_amid_a_step_leaves_a_usable_engine(place: str) -> None:
    target = engine(text=False)
    asked = request(ignore_eos=True)
    target.add(asked)
    said = target.step()
    owner = target.scheduler if place == "commit" else target.runner

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    setattr(owner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.step()
    delattr(owner, place)
    assert target.check() == []
    tokens = tuple(t for e in said + drain(target) for t in e.token_ids)
    assert tokens == expected(asked, LIMITS)[0]


def test_a_refused_request_changes_nothing() -> None:
    """B094, B095, B040, B031: and the next one is served."""
    target = engine(b"a", text=False)
    for prompt in ((), (260,), (-1,), (2**63,), (True,), (1,) * 128):
        with pytest.raises(RequestError):
            target.add(request(prompt=prompt))
    assert not target.has_work
    target.add(request(prompt=(0,)))
    assert drain(target)[-1].finish_reason == "stop"
    assert target.stats()["requests"] == 1


def test_a_broken_invariant_is_told_and_counted_and_kills_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """B008."""
    target = engine(b"a", b"b", text=False)
    leaked = target.scheduler.pool.allocate(1)
    with caplog.at_level(logging.ERROR):
        target.add(request(prompt=(0,)))
        while target.has_work:
            target.step()
    assert "idle, but" in caplog.text
    assert target.stats()["invariant_failures"] == 1
    assert leaked is not None
    target.scheduler.pool.free(leaked)
    target.add(request(prompt=(1,)))
    assert drain(target)[-1].finish_reason == "stop"
    assert target.stats()["invariant_failures"] == 1
