"""The bridge between asyncio and the engine's thread."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from scripted import ScriptedEngine, ScriptedLLM, eventually

from jaxinfer.core import EngineDeadError, RequestError, SamplingParams
from jaxinfer.server.tickets import merge_events
from jaxinfer.server.worker import EngineWorker, OverloadedError, StoppingError

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(llm: ScriptedLLM, max_queue: int = 4):
    worker = EngineWorker(llm.engine, llm.limits, max_queue=max_queue)
    worker.start()
    try:
        yield worker
    finally:
        llm.engine.gate.set()
        await asyncio.to_thread(worker.stop)


async def read(ticket) -> list:
    return [event async for events in ticket for event in events]


def text_of(events, request_id: str, index: int = 0) -> str:
    return "".join(e.text for e in events if (e.request_id, e.index) == (request_id, index))


async def test_a_ticket_tells_every_sequence_of_every_request():
    llm = ScriptedLLM()
    requests = [llm.prepare(p, SamplingParams(n=2)) for p in ("ab", "xyz")]
    async with running(llm) as worker:
        events = await read(await worker.submit(requests))
    for request, expected in zip(requests, ("ABABABAB", "XYZXYZXY"), strict=True):
        for index in range(2):
            assert text_of(events, request.request_id, index) == expected
    assert sum(e.finish_reason == "length" for e in events) == 4


async def test_a_slow_reader_gets_merged_events_and_all_of_the_text():
    llm = ScriptedLLM(ScriptedEngine(length=5000))
    request = llm.prepare("abc", SamplingParams(logprobs=1))
    async with running(llm) as worker:
        ticket = await worker.submit([request])
        assert await asyncio.to_thread(eventually, lambda: ticket.ended)
        events = await read(ticket)
    assert len(events) <= 3 * 32
    assert text_of(events, request.request_id) == ("ABC" * 1667)[:5000]
    assert sum(len(e.token_ids) for e in events) == sum(len(e.logprobs) for e in events) == 5000
    assert [e.finish_reason for e in events if e.finish_reason] == ["length"]
    assert events[-1].metrics is not None


def test_merged_events_keep_order_and_the_end():
    llm = ScriptedLLM(ScriptedEngine(length=3))
    llm.engine.add(llm.prepare("abc", SamplingParams()))
    merged = merge_events([e for _ in range(3) for e in llm.engine.step()])
    assert (merged.text, merged.token_ids, merged.logprobs) == ("ABC", (65, 66, 67), None)
    assert merged.finish_reason == "length"


async def test_merged_events_keep_the_logprobs_of_the_prompt():
    llm = ScriptedLLM(ScriptedEngine(length=3))
    llm.engine.add(llm.prepare("abc", SamplingParams(prompt_logprobs=1)))
    events = [e for _ in range(3) for e in llm.engine.step()]
    assert events[0].prompt_logprobs is not None
    for part in (events, events[:2]):
        assert merge_events(part).prompt_logprobs == events[0].prompt_logprobs
    assert merge_events(events[1:]).prompt_logprobs is None


async def test_cancel_reaches_the_engine_and_frees_the_place():
    llm = ScriptedLLM(ScriptedEngine(length=10**9, step_s=0.001))
    async with running(llm) as worker:
        ticket = await worker.submit([llm.prepare("abc", SamplingParams())])
        await anext(ticket)
        worker.cancel(ticket)
        worker.cancel(ticket)
        assert await asyncio.to_thread(eventually, lambda: not llm.engine.running)
        assert await asyncio.to_thread(eventually, lambda: worker.health()["sequences"] == 0)
        assert llm.engine.cancelled == ["r0"]
        again = await worker.submit([llm.prepare("abc", SamplingParams(max_tokens=2))])
        assert text_of(await read(again), "r1") == "AB"


async def test_cancelling_the_submitter_cancels_the_request():
    llm = ScriptedLLM(ScriptedEngine(length=10**9))
    llm.engine.gate.clear()
    async with running(llm) as worker:
        await worker.submit([llm.prepare("a", SamplingParams())])
        task = asyncio.create_task(worker.submit([llm.prepare("b", SamplingParams())]))
        await asyncio.sleep(0.02)  # the engine is held inside a step: the second request is not taken yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        llm.engine.gate.set()
        assert await asyncio.to_thread(eventually, lambda: worker.health()["sequences"] == 1)
        assert "r1" not in llm.engine.running


async def test_a_request_the_engine_refuses_takes_its_whole_ticket_with_it():
    llm = ScriptedLLM()
    requests = [llm.prepare(p, SamplingParams()) for p in ("ok", "x" * 101)]
    async with running(llm) as worker:
        with pytest.raises(RequestError, match="too small"):
            await worker.submit(requests)
        assert llm.engine.cancelled == ["r0"]
        assert worker.health()["sequences"] == 0
        assert worker.health()["status"] == "ok"


async def test_overload_is_refused_at_once_and_the_accepted_finish():
    llm = ScriptedLLM(max_num_seqs=2)
    llm.engine.gate.clear()
    async with running(llm, max_queue=2) as worker:
        first = await worker.submit([llm.prepare("a", SamplingParams())])
        others = [asyncio.create_task(worker.submit([llm.prepare("b", SamplingParams())])) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="4 sequences"):
            await worker.submit([llm.prepare("c", SamplingParams())])
        with pytest.raises(RequestError, match="5 sequences"):
            await worker.submit([llm.prepare("c", SamplingParams(n=5))])
        llm.engine.gate.set()
        for ticket in [first, *[await task for task in others]]:
            assert sum(len(e.token_ids) for e in await read(ticket)) == 8
        await worker.submit([llm.prepare("d", SamplingParams())])


async def test_death_fails_what_is_pending_and_what_comes():
    llm = ScriptedLLM(ScriptedEngine(die_at=3))
    async with running(llm) as worker:
        ticket = await worker.submit([llm.prepare("abc", SamplingParams())])
        with pytest.raises(EngineDeadError, match=r"the engine has stopped: RuntimeError$"):
            await asyncio.wait_for(read(ticket), 5)
        with pytest.raises(EngineDeadError):
            await worker.submit([llm.prepare("abc", SamplingParams())])
        assert worker.health()["status"] == "dead"
        assert worker.health()["error"] == "RuntimeError"  # no paths, no kilobytes: those are in the log


async def test_a_fault_in_add_fails_the_ticket_that_was_being_added():
    llm = ScriptedLLM()
    request = llm.prepare("abc", SamplingParams())
    async with running(llm) as worker:
        ticket = await worker.submit([request])
        await read(ticket)
        with pytest.raises(EngineDeadError):  # the same id again: an assertion of the engine, our own fault
            await asyncio.wait_for(worker.submit([request]), 5)
        assert worker.health()["sequences"] == 0


async def test_stop_ends_open_tickets_and_refuses_new_ones():
    llm = ScriptedLLM(ScriptedEngine(length=10**9, step_s=0.001))
    async with running(llm) as worker:
        ticket = await worker.submit([llm.prepare("abc", SamplingParams())])
        await asyncio.to_thread(worker.stop)
        with pytest.raises(StoppingError):
            await read(ticket)
        with pytest.raises(StoppingError):
            await worker.submit([llm.prepare("abc", SamplingParams())])
        assert not llm.engine.running


async def test_an_idle_engine_is_not_polled():
    llm = ScriptedLLM()
    asked = 0

    class Watched(ScriptedEngine):
        @property
        def has_work(self) -> bool:
            nonlocal asked
            asked += 1
            return bool(self.running)

    llm.engine = Watched()
    async with running(llm) as worker:
        await read(await worker.submit([llm.prepare("abc", SamplingParams())]))
        before = asked
        await asyncio.sleep(0.1)
        assert asked - before <= 2
