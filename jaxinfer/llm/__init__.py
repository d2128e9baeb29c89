"""The library's front door: prompts in, text out.

    with LLM("smollm2-135m", max_num_seqs=16) as llm:
        llm.generate(["Gravity is"], SamplingParams(max_tokens=32))[0].outputs[0].text

The calling thread runs the engine; a server runs `llm.engine` on a thread of its own instead and uses
`prepare` and `prepare_chat` only.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import uuid
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Self

from jaxinfer.arguments import (
    Message,
    Prompt,
    Sampling,
    as_batch,
    as_conversations,
    one_each,
    one_of,
    options_each,
    sampling_over,
)
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.core import (
    Limits,
    Request,
    RequestError,
    RequestOutput,
    Runner,
    SamplingParams,
    TokenEvent,
)
from jaxinfer.engine import Engine, validate
from jaxinfer.engine.trace import NO_TRACE, FileTrace, Trace
from jaxinfer.llm.beams import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jaxinfer.llm.beams import run as run_beams
from jaxinfer.llm.caching import shares_prefixes
from jaxinfer.llm.prompts import Cut, Prompts
from jaxinfer.llm.structures import StructuredTokenizer
from jaxinfer.llm.turns import Turns
from jaxinfer.outputs import SCORING, Continuation, Score, request_output, score_of
from jaxinfer.progress import phase

logger = logging.getLogger(__name__)


class LLM:
    """One loaded model. `engine_options` are the fields of EngineConfig.

    MODEL is a pulled name, a Hugging Face folder, a .gguf file or "random:CONFIG". Raises ConfigError for
    an option that is unknown or cannot run. Several threads may call it; one of them runs each step.

    `default_sampling` is what a request without SamplingParams gets: the model's own values, from its
    generation_config.json, and SamplingParams' defaults elsewhere.

    Every request may have a `priority` (lower is served first; scheduling_policy "priority" is the default
    here, where whoever calls owns the model, and "fcfs" that of a server and of EngineConfig), a
    `cache_salt` (it shares the prefix cache only with those of the same salt) and a `timeout_s` (it ends with
    "abort" that long after its arrival). For a batch each is one value for all, or a list of one per prompt.
    """

    def __init__(self, model: str, *, progress: bool | None = None, **engine_options: Any):
        engine_options.setdefault("scheduling_policy", "priority")  # in order of arrival where all are equal
        config = EngineConfig.from_kwargs(**engine_options)
        trace = _open_trace(config)  # a path that cannot be written is told before minutes of loading
        try:
            from jaxinfer import runtime  # imports jax, which takes a second: not before a model is wanted

            loaded = runtime.load(model, config, progress=progress)
            self._set_up(
                loaded.runner,
                loaded.limits,
                trace,
                tokenizer=loaded.tokenizer,
                chat_template=loaded.chat_template,
                model_name=loaded.model_name,
                model_config=loaded.model_config,
                engine_config=loaded.engine_config,
                default_sampling=loaded.default_sampling,
            )
        except BaseException:
            trace.close()
            raise

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
        engine_config = engine_config or EngineConfig()
        llm._set_up(
            runner,
            limits,
            _open_trace(engine_config),
            tokenizer=tokenizer,
            chat_template=chat_template,
            model_name=model_name,
            model_config=model_config,
            engine_config=engine_config,
            default_sampling=default_sampling or SamplingParams(),
        )
        return llm

    def _set_up(
        self,
        runner: Runner,
        limits: Limits,
        trace: Trace,
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
        wanted = engine_config.enable_prefix_caching
        self._structured = None if tokenizer is None else StructuredTokenizer(tokenizer, limits.vocab_size)
        self.engine = Engine(
            runner,
            limits,
            self._structured,
            seed=engine_config.seed,
            policy=engine_config.scheduling_policy,
            prefix_caching=shares_prefixes(wanted, limits, model_config, model_name),
            asynchronous=engine_config.async_scheduling,
            trace=trace,
        )
        self._turns = Turns(self.engine)
        self._prompts = Prompts(tokenizer, chat_template)

    def close(self) -> None:
        """Complete the file of EngineConfig.trace. What runs goes on, untraced; again, it does nothing."""
        trace, self.engine.trace = self.engine.trace, NO_TRACE
        trace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- answers

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: Sampling | Seq[Sampling] = None,
        progress: bool | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Seq[int] | None = 0,
        cache_salt: str | Seq[str | None] | None = None,
        timeout_s: float | Seq[float | None] | None = None,
        truncate_prompt_tokens: int | Seq[int | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several together; results are in the order of the prompts.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`.
        `sampling_params` is one for all, or one per prompt: None for the model's own (`default_sampling`), a
        mapping for the model's own with these fields replaced, or a SamplingParams, which is taken as it is.
        `progress` None shows a bar on stderr for more than one prompt, if stderr is a terminal; `use_tqdm` is
        vLLM's name for it. `truncate_prompt_tokens`: see `prepare`.
        Raises RequestError, having started nothing, when any of the prompts cannot be served. A prompt
        that fails later ends with finish_reason "error" and disturbs no other.
        """
        batch = as_batch(prompts)
        params = one_each(sampling_params, len(batch), "prompts")
        given = {
            "priority": 0 if priority is None else priority,
            "cache_salt": cache_salt,
            "timeout_s": timeout_s,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }
        options = options_each(given, len(batch), "prompts")
        progress = one_of("progress", progress, "use_tqdm", use_tqdm)
        requests = [self.prepare(p, s, **o) for p, s, o in zip(batch, params, options, strict=True)]
        return self._answer(requests, progress)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: Sampling | Seq[Sampling] = None,
        progress: bool | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Seq[int] | None = 0,
        cache_salt: str | Seq[str | None] | None = None,
        timeout_s: float | Seq[float | None] | None = None,
        truncate_prompt_tokens: int | Seq[int | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"} messages.

        `template_options` are those of `prepare_chat`. Otherwise as `generate`. An empty list is a batch of
        no conversations and gives [], as `generate([])` does; a conversation without messages within a batch,
        and `prepare_chat([])`, raise RequestError.
        """
        batch = as_conversations(messages)
        params = one_each(sampling_params, len(batch), "conversations")
        given = {
            "priority": 0 if priority is None else priority,
            "cache_salt": cache_salt,
            "timeout_s": timeout_s,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }
        options = options_each(given, len(batch), "conversations")
        progress = one_of("progress", progress, "use_tqdm", use_tqdm)
        requests = [
            self.prepare_chat(m, s, **o, **template_options)
            for m, s, o in zip(batch, params, options, strict=True)
        ]
        return self._answer(requests, progress)

    def beam_search(
        self,
        prompts: Prompt | Seq[Prompt],
        params: BeamSearchParams,
        progress: bool | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Seq[int] | None = 0,
        cache_salt: str | Seq[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest outputs of one prompt or several, in the order of the prompts (`llm/beams.py`).

        Arguments as of `generate`. Raises RequestError as `generate`, and JaxInferError when a step fails.
        """
        batch = as_batch(prompts)
        given = {"priority": 0 if priority is None else priority, "cache_salt": cache_salt}
        sampling = SamplingParams(max_tokens=params.max_tokens)
        requests = [
            self.prepare(p, sampling, **o)
            for p, o in zip(batch, options_each(given, len(batch), "prompts"), strict=True)
        ]
        searches = [BeamSearch(request, params, self.limits) for request in requests]
        wanted = one_of("progress", progress, "use_tqdm", use_tqdm)
        with phase("searching", total=len(batch), wanted=self._shows(len(batch), wanted)) as advance:
            run_beams(self._turns, searches, advance)
        return [
            BeamSearchOutput(sequences=tuple(self._with_text(beam) for beam in search.best()))
            for search in searches
        ]

    def score(self, texts: Prompt | Seq[Prompt], progress: bool | None = None) -> list[Score]:
        """How likely each text (or list of token ids) is: the logprob of every token but the first, nll and
        perplexity, in the order of the texts. A text is tokenised as a prompt is (BOS and all).

        Raises RequestError, having started nothing, for a text of fewer than 2 tokens or more than
        max_model_len - 1, and JaxInferError when a run fails on the device. Longer texts are scored in
        windows, by the lab.
        """
        ids = [self.scored_ids(text, f"text {number}") for number, text in enumerate(as_batch(texts), 1)]
        return [score_of(output) for output in self.generate(ids, SCORING, progress)]

    def stream(
        self,
        prompt: Prompt | Request,
        sampling_params: Sampling = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[TokenEvent]:
        """Continue one prompt, or what `prepare` or `prepare_chat` made; yields its events as they come.

        Each of the n continuations ends with an event that has a finish_reason. Closing the iterator
        cancels the request. Raises RequestError at once when it cannot be served.
        """
        options = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        if not isinstance(prompt, Request):
            return self._turns.events([self.prepare(prompt, sampling_params, **options)])  # type: ignore[arg-type]
        for name, value in {"sampling_params": sampling_params, **options}.items():
            if value is not None and (name, value) != ("priority", 0):
                raise RequestError(f"a prepared request has its {name} already", name)
        return self._turns.events([prompt])

    def get_tokenizer(self) -> Any:
        """The model's `jaxinfer.text.Tokenizer`; None for a folder without one."""
        return self.tokenizer

    @property
    def llm_engine(self) -> Engine:
        """vLLM's name for `engine`."""
        return self.engine

    def stats(self) -> dict[str, Any]:
        """What the engine counts: pages, sequences, steps, times (`Engine.stats`)."""
        with self._turns.turn():
            return self.engine.stats()

    def measure_machine(self) -> None:
        """Measure what the device can read and multiply in a second, so that `stats` has `bandwidth` and
        `matmul_rate`; a second on a CPU. Nothing to measure where `from_parts` got another kind of runner."""
        from jaxinfer.runtime import JaxRunner

        with self._turns.turn():
            if isinstance(self.engine.runner, JaxRunner):
                self.engine.runner.measure_machine()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `generate` would run it; without `add_special_tokens`, of the text alone.
        Raises RequestError for what is no text."""
        return self._prompts.encode(text, add_special_tokens=add_special_tokens)

    # ---------------------------------------------------------------------------------- preparing

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: Sampling = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
        add_special_tokens: bool = True,
    ) -> Request:
        """Turn a prompt into a request with an id of its own; schedules nothing. Safe on any thread.

        `truncate_prompt_tokens` leaves the last tokens of a longer prompt (`truncation_side` "right": the
        first), as many as it says; -1 as many as fit. `add_special_tokens` False runs a text as it is,
        without what the tokenizer puts around it (BOS). Raises RequestError for everything about it that the
        engine would refuse, a schema or grammar that cannot be compiled included.
        """
        options = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        cut = Cut(truncate_prompt_tokens, truncation_side)
        ids, text = self._prompts.read(prompt, add_special_tokens=add_special_tokens)
        return self._request(ids, sampling_params, text, options, cut)

    def scored_ids(self, text: Prompt, name: str) -> list[int]:
        """The token ids of a text that can be scored. Raises RequestError, with its `name`, if it cannot."""
        ids, limit = self._prompts.read(text)[0], self.limits.max_model_len
        if not 2 <= len(ids) < limit:
            raise RequestError(
                f"{name} has {len(ids)} tokens; a text is scored from 2 tokens on, up to {limit - 1} "
                f"(max_model_len {limit}, less the one that is generated)",
                "prompt",
            )
        return ids

    def prepare_chat(
        self,
        messages: Seq[Message],
        sampling_params: Sampling = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
        **template_options: Any,
    ) -> Request:
        """Turn a conversation into a request, through the model's chat template; as `prepare`.

        `add_generation_prompt` (by default: not `continue_final_message`) opens the assistant's answer;
        `continue_final_message` leaves the last message open instead. `chat_template` is a template to use
        instead of the model's. Further options, and those in `chat_template_kwargs`, go to the template.
        """
        cut = Cut(truncate_prompt_tokens, truncation_side)
        ids = self.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_options,
        )
        options = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        return self._request(ids, sampling_params, None, options, cut)

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
        return self._prompts.chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_options,
        )

    def sampling(self, wanted: Sampling = None) -> SamplingParams:
        """The sampling of a request that asks for `wanted`: None, fields over the model's own, or all of it.

        Raises RequestError for a field that is unknown or out of range.
        """
        return sampling_over(self.default_sampling, wanted)

    def _request(
        self, ids: list[int], wanted: Sampling, prompt: str | None, options: dict[str, Any], cut: Cut
    ) -> Request:
        sampling = self.sampling(wanted)
        left = cut.cut(ids, self.limits.max_model_len - (sampling.max_tokens or 1))
        if len(left) < len(ids):
            ids, prompt = left, None  # what is left has a text of its own, if anybody asks
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(ids),
            sampling=sampling,
            prompt=prompt,
            **options,
        )
        asked = isinstance(wanted, SamplingParams) or "max_tokens" in (wanted or {})
        if asked or sampling.max_tokens is None:
            self._check(request)
            return request
        # The model's own max_tokens is no demand of this request: where less fits, less is generated.
        open_ended = dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=None))
        fitting = min(sampling.max_tokens, self._check(open_ended))
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=fitting))

    def _check(self, request: Request) -> int:
        """`validate`, and what only this room knows of: the policy, and whether a structure compiles."""
        most = validate(request, self.limits, has_tokenizer=self.tokenizer is not None)
        if request.priority and self.engine_config.scheduling_policy != "priority":
            raise RequestError(
                f"priority {request.priority} has no effect where requests are served in order of arrival; "
                'leave it out, or start with scheduling_policy "priority"',
                "priority",
            )
        if request.sampling.structured and self._structured is not None:
            self._structured.check_structure(request.sampling)
        return most

    def _with_text(self, beam: BeamSearchSequence) -> BeamSearchSequence:
        text = None if self.tokenizer is None else self.tokenizer.decode(beam.tokens)
        return dataclasses.replace(beam, text=text)

    # ------------------------------------------------------------------------------------ running

    def _shows(self, count: int, progress: bool | None) -> bool:
        return count > 1 and sys.stderr.isatty() if progress is None else progress

    def _answer(self, requests: list[Request], progress: bool | None) -> list[RequestOutput]:
        wanted = self._shows(len(requests), progress)
        answers = {r.request_id: [Continuation(index) for index in range(r.sampling.n)] for r in requests}
        with phase("generating", total=len(requests), wanted=wanted) as advance:
            for event in self._turns.events(requests):
                parts = answers[event.request_id]
                parts[event.index].add(event)
                if event.finish_reason is not None and all(part.finish_reason for part in parts):
                    advance(1)
        return [request_output(r, answers[r.request_id]) for r in requests]


def _open_trace(config: EngineConfig) -> Trace:
    return NO_TRACE if config.trace is None else FileTrace(config.trace)
