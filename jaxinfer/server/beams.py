"""Beam search behind the endpoint (vLLM's `use_beam_search`): a ticket a step, in places that are kept from
the first to the last, and the answer at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from fastapi.concurrency import run_in_threadpool

from jaxinfer.core import FinishReason, Limits, Logprob, Request, RequestError, SamplingParams, TokenEvent
from jaxinfer.llm.beams import BeamSearch, BeamSearchParams, BeamSearchSequence
from jaxinfer.server.wire import ApiError
from jaxinfer.server.worker import EngineWorker, Places

_NO_LIMIT = 2**31
"""Stands for a max_tokens that was left out: it is cut to what fits behind each prompt."""

_SERVED = {"n", "max_tokens", "ignore_eos", "logprobs", "skip_special_tokens", "temperature"}


def beam_params(
    sampling: Mapping[str, Any], *, use_beam_search: bool | None, length_penalty: float | None
) -> BeamSearchParams | None:
    """The search that a body asks for with these fields of SamplingParams; None where it asks for none.

    Raises RequestError for what a search does not know: everything that changes how a token is drawn.
    """
    if not use_beam_search:
        if length_penalty not in (None, 1):
            raise RequestError("length_penalty needs use_beam_search: true", "length_penalty")
        return None
    asked, plain = SamplingParams(**sampling), SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        if field.name not in _SERVED and getattr(asked, field.name) != getattr(plain, field.name):
            raise RequestError(
                f"{field.name} has no place in a beam search; leave it out, or use_beam_search", field.name
            )
    if asked.temperature not in (0.0, 1.0):
        raise RequestError(
            "temperature must be 0 or 1, or left out, for a beam search: beams are ranked by what the model "
            f"itself finds likely; got {asked.temperature:g}",
            "temperature",
        )
    try:
        return BeamSearchParams(
            beam_width=asked.n,
            max_tokens=asked.max_tokens or _NO_LIMIT,
            ignore_eos=asked.ignore_eos,
            length_penalty=1.0 if length_penalty is None else length_penalty,
        )
    except RequestError as error:
        name = "n" if error.param == "beam_width" else error.param
        raise RequestError(str(error).replace("beam_width", "n with use_beam_search"), name) from None


async def beam_events(
    worker: EngineWorker,
    requests: Sequence[Request],
    params: BeamSearchParams,
    limits: Limits,
    decode: Callable[[Sequence[int]], str],
) -> AsyncGenerator[list[TokenEvent]]:
    """One event for each of the outputs of each request, all at the end; the best of a request has index 0.

    Raises what `EngineWorker.reserve` and `submit` raise, and ApiError for a step that failed.
    """
    with worker.reserve(params.beam_width * len(requests)) as places:
        searches = [BeamSearch(request, _fitting(params, request, limits), limits) for request in requests]
        failure: FinishReason = "abort"
        try:
            # What a step ranks and copies grows with the context: a thread has the time for it.
            asked = await run_in_threadpool(_asked, searches)
            while asked:
                known = await _known(worker, [request for _, group in asked for request in group], places)
                asked = await run_in_threadpool(_taken, asked, known)
        except Exception:
            failure = "error"
            raise
        finally:
            for search in searches:
                search.count(worker, None if search.done else failure)
    for request, search in zip(requests, searches, strict=True):
        yield await run_in_threadpool(_events, request, search, decode)


type _Asked = list[tuple[BeamSearch, list[Request]]]


def _fitting(params: BeamSearchParams, request: Request, limits: Limits) -> BeamSearchParams:
    """With no more tokens than fit behind the prompt."""
    fit = limits.max_model_len - len(request.prompt_token_ids)
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, fit))


def _asked(searches: Sequence[BeamSearch]) -> _Asked:
    """What those that are not done want to know next."""
    return [(search, search.requests()) for search in searches if not search.done]


def _taken(asked: _Asked, known: Mapping[str, dict[int, Logprob]]) -> _Asked:
    """Tell searches what they asked for, and ask again."""
    for search, group in asked:
        search.take([known[request.request_id] for request in group])
    return _asked([search for search, _ in asked])


async def _known(
    worker: EngineWorker, requests: Sequence[Request], places: Places
) -> dict[str, dict[int, Logprob]]:
    """What is known of the one token of each request, by its id."""
    known: dict[str, dict[int, Logprob]] = {}
    ticket = await worker.submit(requests, places)
    try:
        async for events in ticket:
            for event in events:
                if event.finish_reason in ("error", "abort"):
                    raise ApiError(500, event.error or "the request was aborted", code="generation_error")
                if event.logprobs:
                    known[event.request_id] = event.logprobs[0]
    finally:
        worker.cancel(ticket)
    return known


def _events(request: Request, search: BeamSearch, decode: Callable[[Sequence[int]], str]) -> list[TokenEvent]:
    return [_event(request, index, beam, decode) for index, beam in enumerate(search.best())]


def _event(
    request: Request, index: int, beam: BeamSearchSequence, decode: Callable[[Sequence[int]], str]
) -> TokenEvent:
    sampling, ids = request.sampling, beam.output_token_ids
    ended = beam.finish_reason == "stop" and sampling.skip_special_tokens
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = tuple(
            {i: entry for i, entry in entries.items() if i == token or entry.rank <= sampling.logprobs}
            for token, entries in zip(ids, beam.logprobs, strict=True)
        )
    return TokenEvent(
        request_id=request.request_id,
        index=index,
        text=decode(ids[:-1] if ended else ids),
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=beam.finish_reason,
    )
