"""The library's front door: prompts in, text out.

    llm = LLM("smollm2-135m", max_num_seqs=16)
    llm.generate(["Gravity is"], SamplingParams(max_tokens=32))[0].outputs[0].text

The calling thread runs the engine; a server runs `llm.engine` on a thread of its own instead and uses
`prepare` and `prepare_chat` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import uuid
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from types import FrameType
from typing import Any

from jaxinfer.arguments import (
    Message,
    Prompt,
    Sampling,
    as_batch,
    as_conversations,
    as_int,
    check_text,
    check_texts,
    one_each,
    sampling_over,
)
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.core import (
    EngineDeadError,
    Limits,
    Request,
    RequestError,
    RequestOutput,
    Runner,
    SamplingParams,
    TokenEvent,
)
from jaxinfer.engine import Engine, validate
from jaxinfer.outputs import Continuation, request_output
from jaxinfer.progress import phase


class LLM:
    """One loaded model. `engine_options` are the fields of EngineConfig.

    MODEL is a pulled name, a Hugging Face folder, a .gguf file or "random:CONFIG". Raises ConfigError for
    an option that is unknown or cannot run. Several threads may call it; one of them runs each step.

    `default_sampling` is what a request without SamplingParams gets: the model's own values, from its
    generation_config.json, and SamplingParams' defaults elsewhere.
    """

    def __init__(self, model: str, *, progress: bool | None = None, **engine_options: Any):
        config = EngineConfig.from_kwargs(**engine_options)
        from jaxinfer import runtime  # imports jax, which takes a second: not before a model is wanted

        loaded = runtime.load(model, config, progress=progress)
        self._set_up(
            loaded.runner,
            loaded.limits,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            model_name=loaded.model_name,
            model_config=loaded.model_config,
            engine_config=loaded.engine_config,
            default_sampling=loaded.default_sampling,
        )

    @classmethod
    def from_parts(
        cls,
        runner: Runner,
        limits: Limits,
        *,
        tokenizer: Any = None,
        chat_template: Any = None,
        model_name: str = "model",
        model_config: ModelConfig | None = None,
        engine_config: EngineConfig | None = None,
        default_sampling: SamplingParams | None = None,
    ) -> LLM:
        """Put one together from what `runtime.load` would have made; for tests and experiments.

        `tokenizer` and `chat_template` have the interface of `jaxinfer.text.Tokenizer` and `ChatTemplate`.
        """
        llm = cls.__new__(cls)
        llm._set_up(
            runner,
            limits,
            tokenizer=tokenizer,
            chat_template=chat_template,
            model_name=model_name,
            model_config=model_config,
            engine_config=engine_config or EngineConfig(),
            default_sampling=default_sampling or SamplingParams(),
        )
        return llm

    def _set_up(
        self,
        runner: Runner,
        limits: Limits,
        *,
        tokenizer: Any,
        chat_template: Any,
        model_name: str,
        model_config: ModelConfig | None,
        engine_config: EngineConfig,
        default_sampling: SamplingParams,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_name = model_name
        self.model_config = model_config
        self.engine_config = engine_config
        self.default_sampling = default_sampling
        self.engine = Engine(runner, limits, tokenizer, seed=engine_config.seed)
        # Whoever waits for an answer runs a step, and files its events with all who wait.
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that holds the lock
        self._left: list[tuple[str, list[TokenEvent]]] = []  # requests that nobody waits for any more
        self._mailboxes: dict[str, list[TokenEvent]] = {}

    # ------------------------------------------------------------------------------------- answers

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: Sampling | Seq[Sampling] = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several together; results are in the order of the prompts.

        A prompt is a text or a list of token ids. `sampling_params` is one for all, or one per prompt: None
        for the model's own (`default_sampling`), a mapping for the model's own with these fields replaced, or
        a SamplingParams, which is taken as it is.
        `progress` None shows a bar on stderr for more than one prompt, if stderr is a terminal.
        Raises RequestError, having started nothing, when any of the prompts cannot be served. A prompt
        that fails later ends with finish_reason "error" and disturbs no other.
        """
        batch = as_batch(prompts)
        params = one_each(sampling_params, len(batch), "prompts")
        return self._answer([self.prepare(p, s) for p, s in zip(batch, params, strict=True)], progress)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: Sampling | Seq[Sampling] = None,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"} messages.

        `template_options` are those of `prepare_chat`. Otherwise as `generate`. An empty list is a batch of
        no conversations and gives [], as `generate([])` does; a conversation without messages within a batch,
        and `prepare_chat([])`, raise RequestError.
        """
        batch = as_conversations(messages)
        params = one_each(sampling_params, len(batch), "conversations")
        requests = [self.prepare_chat(m, s, **template_options) for m, s in zip(batch, params, strict=True)]
        return self._answer(requests, progress)

    def stream(self, prompt: Prompt | Request, sampling_params: Sampling = None) -> Generator[TokenEvent]:
        """Continue one prompt, or what `prepare` or `prepare_chat` made; yields its events as they come.

        Each of the n continuations ends with an event that has a finish_reason. Closing the iterator
        cancels the request. Raises RequestError at once when it cannot be served.
        """
        if isinstance(prompt, Request):
            if sampling_params is not None:
                raise RequestError("a prepared request has its sampling_params already", "sampling_params")
            return self._events([prompt])
        return self._events([self.prepare(prompt, sampling_params)])

    def stats(self) -> dict[str, Any]:
        """What the engine counts: pages, sequences, steps, times (`Engine.stats`)."""
        with self._turn():
            return self.engine.stats()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as `generate` would run it. Raises RequestError for what is no text."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids instead of text", "prompt")
        check_text(text, "prompt")
        return list(self.tokenizer.encode(text))

    # ---------------------------------------------------------------------------------- preparing

    def prepare(self, prompt: Prompt, sampling_params: Sampling = None) -> Request:
        """Turn a prompt into a request with an id of its own; schedules nothing. Safe on any thread.

        Raises RequestError for everything about it that the engine would refuse.
        """
        if isinstance(prompt, str):
            return self._request(self.encode(prompt), sampling_params, prompt)
        if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
            raise RequestError(f"a prompt must be a string or a list of token ids, got {prompt!r}", "prompt")
        return self._request([as_int(i) for i in prompt], sampling_params, None)

    def prepare_chat(
        self,
        messages: Seq[Message],
        sampling_params: Sampling = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> Request:
        """Turn a conversation into a request, through the model's chat template; as `prepare`.

        `add_generation_prompt` (by default: not `continue_final_message`) opens the assistant's answer;
        `continue_final_message` leaves the last message open instead. Further options go to the template.
        """
        ids = self.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_options,
        )
        return self._request(ids, sampling_params, None)

    def encode_chat(
        self,
        messages: Seq[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a conversation, as `prepare_chat` would run it, however many they are."""
        if self.chat_template is None or self.tokenizer is None:
            raise RequestError(
                "this model has no chat template; use generate with a plain prompt", "messages"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                "continue_final_message",
            )
        check_texts(messages, "messages")
        check_texts(tools, "tools")
        from jaxinfer.text import ChatTemplateError, TokenizerError

        try:
            return list(
                self.chat_template.render(
                    messages,
                    self.tokenizer,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **template_options,
                )
            )
        except (ChatTemplateError, TokenizerError) as error:
            raise RequestError(str(error), "messages") from error

    def sampling(self, wanted: Sampling = None) -> SamplingParams:
        """The sampling of a request that asks for `wanted`: None, fields over the model's own, or all of it.

        Raises RequestError for a field that is unknown or out of range.
        """
        return sampling_over(self.default_sampling, wanted)

    def _request(self, ids: Seq[int], wanted: Sampling, prompt: str | None) -> Request:
        sampling = self.sampling(wanted)
        request = Request(
            request_id=uuid.uuid4().hex, prompt_token_ids=tuple(ids), sampling=sampling, prompt=prompt
        )
        asked = isinstance(wanted, SamplingParams) or "max_tokens" in (wanted or {})
        if asked or sampling.max_tokens is None:
            validate(request, self.limits, has_tokenizer=self.tokenizer is not None)
            return request
        # The model's own max_tokens is no demand of this request: where less fits, less is generated.
        open_ended = dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=None))
        most = validate(open_ended, self.limits, has_tokenizer=self.tokenizer is not None)
        fitting = min(sampling.max_tokens, most)
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=fitting))

    # ------------------------------------------------------------------------------------ running

    def _answer(self, requests: list[Request], progress: bool | None) -> list[RequestOutput]:
        wanted = len(requests) > 1 and sys.stderr.isatty() if progress is None else progress
        answers = {r.request_id: [Continuation(index) for index in range(r.sampling.n)] for r in requests}
        with phase("generating", total=len(requests), wanted=wanted) as advance:
            for event in self._events(requests):
                parts = answers[event.request_id]
                parts[event.index].add(event)
                if event.finish_reason is not None and all(part.finish_reason for part in parts):
                    advance(1)
        return [request_output(r, answers[r.request_id]) for r in requests]

    def _events(self, requests: list[Request]) -> Generator[TokenEvent]:
        """Run requests together until all have ended; closing this cancels those that have not."""
        mailbox: list[TokenEvent] = []
        unfinished = {request.request_id: request.sampling.n for request in requests}
        try:
            with self._turn():
                for request in requests:
                    self.engine.add(request)
                    self._mailboxes[request.request_id] = mailbox
            while unfinished:
                for event in self._news(mailbox):
                    if event.finish_reason is not None:
                        unfinished[event.request_id] -= 1
                        if not unfinished[event.request_id]:
                            del unfinished[event.request_id]
                    yield event
        finally:
            self._left += [(request.request_id, mailbox) for request in requests]
            # A garbage collection amid a step may close a forgotten stream: that step's turn clears up.
            if self._holder != threading.get_ident():
                with self._turn():
                    pass

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        """Hold the engine. Ctrl-C waits for the turn to end: amid a step it would tear pages and queues."""
        with _interrupts_held_back(), self._lock:
            self._holder = threading.get_ident()
            try:
                yield
                self._clear_up()
            finally:
                self._holder = None

    def _clear_up(self) -> None:
        """Cancel what is unfinished of the requests that were left."""
        cancelled = False
        while self._left:
            request_id, mailbox = self._left.pop()
            # Else not ours: it was never added, or its id has been free and is another call's by now.
            if self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
                cancelled |= self.engine.cancel(request_id)
        if cancelled and not self.engine.scheduler.has_unfinished:
            self._step()  # only the ends of the cancelled are left to tell: then the engine is idle

    def _news(self, mailbox: list[TokenEvent]) -> list[TokenEvent]:
        """What has come into a mailbox; runs a step when it is empty."""
        with self._turn():
            if not mailbox:
                if not self.engine.has_work:
                    raise EngineDeadError("the engine ended without an answer to this request")
                self._step()
            news = mailbox.copy()
            mailbox.clear()
        return news

    def _step(self) -> None:
        for event in self.engine.step():
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:  # None: cancelled; nobody reads its last words
                mailbox.append(event)


@contextlib.contextmanager
def _interrupts_held_back() -> Generator[None]:
    """On the main thread, deliver a Ctrl-C after the block instead of amid it; a second one at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(caught) == 1:
            handler(*caught[0])
