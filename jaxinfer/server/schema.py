"""The bodies that clients send: what is understood, and what is refused by name.

A body is either served as it says or refused with the parameter named; nothing is accepted and ignored.
Three kinds of key, then: fields of the models below; labels and hints that change no answer (`LABELS`);
and parameters of OpenAI or vLLM that this version does not serve (`NOT_SERVED`), which pass only with a
value that asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, PlainValidator, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from jaxinfer.core import MAX_LOGPROBS, STRUCTURES, RequestError, SamplingParams
from jaxinfer.llm.beams import BeamSearchParams
from jaxinfer.server.answers import Wanted
from jaxinfer.server.beams import beam_params
from jaxinfer.server.messages import Conversation, Message, Messages, in_pieces
from jaxinfer.server.structures import ResponseFormat, Strict, StructuredOutputs, refuse_constant
from jaxinfer.server.tools import CallForm, ToolChoice, ToolUse, tool_use

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    # parameter -> the values, besides null, that ask for nothing
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),  # of a completion; a chat has them
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # of a completion
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # of a completion
    "tools": ([],),  # of a completion
    "verbosity": (),
    "web_search_options": (),
}
_INSTEAD = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("choice", "grammar", "json", "regex")}
_INSTEAD |= {"functions": "tools", "function_call": "tool_choice"}
"""What older parameters are called now."""
LABELS = {"metadata": dict, "prompt_cache_key": str, "safety_identifier": str, "user": str}


class StreamOptions(Strict):
    """`include_usage` asks for one more chunk, the last, that holds the usage of the whole answer. With it,
    vLLM's `continuous_usage_stats` asks for the usage so far in every chunk; alone it asks for nothing."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


# ------------------------------------------------------------------------------------------- prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def _check_prompt(value: Any) -> Any:
    """One pass over what may be 100 000 ids; a union type would try four shapes and report four errors."""
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and (all(isinstance(p, str) for p in value) or all(_is_ids(p) for p in value)):
        return value
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


_PROMPT_SHAPES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
]
Prompt = Annotated[Any, PlainValidator(_check_prompt), WithJsonSchema({"anyOf": _PROMPT_SHAPES})]


# -------------------------------------------------------------------------------------------- bodies


class _Sampled(Strict):
    """What the two generating endpoints share. Ranges are checked by SamplingParams."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logprob_token_ids: list[int] | None = None

    def _wanted(self, **others: Any) -> Wanted:
        stream = self.stream_options or StreamOptions()
        return Wanted(
            include_usage=bool(stream.include_usage),
            usage_so_far=bool(stream.include_usage and stream.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            names_as_ids=bool(self.return_tokens_as_token_ids),
            told_ids=bool(self.logprob_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            **others,
        )

    def beams(self, sampling: dict[str, Any]) -> BeamSearchParams | None:
        """The beam search that is asked for beside `sampling`; None for none. Raises RequestError."""
        asked = {"use_beam_search": self.use_beam_search, "length_penalty": self.length_penalty}
        try:
            params = beam_params(sampling, **asked)
        except RequestError as error:
            raise self.renamed(error) from None
        if params is not None and self.stream:
            raise RequestError(
                "a beam search cannot be streamed: which outputs are best is known at its end", "stream"
            )
        return params

    def options(self) -> dict[str, Any]:
        """What the body gives besides sampling, as keywords of `LLM.prepare`."""
        names = ("priority", "cache_salt", "truncate_prompt_tokens", "truncation_side", "add_special_tokens")
        options = {name: getattr(self, name) for name in names}
        return {name: value for name, value in options.items() if value is not None}

    def renamed(self, error: RequestError) -> RequestError:
        """The error with its parameter called what it is called in the body."""
        if error.param == "prompt_logprobs" and self.prompt_logprobs is None:
            return RequestError(str(error), "logprobs", error.code)  # with echo
        if error.param not in STRUCTURES and not str(error.param).startswith("structured_outputs"):
            return error
        if self.structured_outputs is not None:
            return error
        # Without either, a call of a tool is forced.
        return RequestError(str(error), "tools" if self.response_format is None else "response_format")

    def _fields(self, *, max_tokens: int | None, logprobs: int | None, **others: Any) -> dict[str, Any]:
        names = (
            "n", "seed", "stop", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids",
            "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words",
        )  # fmt: skip
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs}
        if self.logprob_token_ids:
            if logprobs is None:
                raise RequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
            fields |= {"logprobs": None, "logprob_token_ids": self.logprob_token_ids}
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs are not available when stream is true", "prompt_logprobs")
        structure = {} if self.response_format is None else self.response_format.sampling()
        if self.structured_outputs is not None:
            if structure:
                raise RequestError(
                    "response_format and structured_outputs exclude each other", "structured_outputs"
                )
            structure = self.structured_outputs.sampling()
        fields |= structure | others
        given = {name: value for name, value in fields.items() if value is not None}
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", "stream_options")
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise self.renamed(error) from None
        return given


class CompletionBody(_Sampled):
    """The body of POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one, in the order of the answer's choices."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt is an empty list; it must hold a prompt or token ids", "prompt")
        return [prompt] if isinstance(prompt[0], int) else prompt

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the body gives, for every prompt: what it leaves out (or gives as
        null) is the model's own. Raises RequestError for a value out of range."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of {self.best_of} is not served: every one of the n answers is returned", "best_of"
            )
        max_tokens, others = self.max_tokens, {}
        if self.echo and self.logprobs is not None:
            if self.stream and (self.n or 1) > 1:
                raise RequestError("echo with logprobs and n above 1 cannot be streamed", "echo")
            others["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.echo and max_tokens == 0 and self.logprob_token_ids:
            raise RequestError(
                "logprob_token_ids tell of the output, and max_tokens is 0", "logprob_token_ids"
            )
        if self.echo and max_tokens == 0:  # the engine makes one token, which is not told
            max_tokens = 1
            if self.min_tokens:
                raise RequestError(f"min_tokens {self.min_tokens} is more than max_tokens 0", "min_tokens")
        return self._fields(max_tokens=max_tokens, logprobs=self.logprobs, **others)

    def wanted(self) -> Wanted:
        """What the answer's shape depends on."""
        echo = bool(self.echo)
        return self._wanted(echo=echo, prompt_only=echo and self.max_tokens == 0, logprobs=self.logprobs)

    def beams(self, sampling: dict[str, Any]) -> BeamSearchParams | None:
        params = super().beams(sampling)
        if params is not None and self.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1 for a beam search, got 0", "max_tokens")
        return params


class _Chat(_Sampled, Conversation):
    """What the two endpoints of chats share."""

    max_completion_tokens: int | None = None
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self, *, form: CallForm | None) -> ToolUse | None:
        """The functions that the answer may call; None for none. `form`: see `tools.tool_use`."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls, form=form)

    def wanted(self, tools: ToolUse | None) -> Wanted:
        """What the answer's shape depends on."""
        return self._wanted(echo=bool(self.echo), logprobs=self._num_logprobs, tools=tools)

    @property
    def _num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling(self, tools: ToolUse | None = None) -> dict[str, Any]:
        """As `CompletionBody.sampling`, and what forces a call of one of the tools."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                f"max_tokens {self.max_tokens} disagrees with max_completion_tokens "
                f"{self.max_completion_tokens}",
                "max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}",
                "top_logprobs",
            )
        bound = self.structured_outputs is not None or (
            self.response_format is not None and self.response_format.type != "text"
        )
        if tools is not None and bound:
            name = "response_format" if self.structured_outputs is None else "structured_outputs"
            raise RequestError(f"tools and {name} exclude each other: either forms the whole answer", "tools")
        grammar = None if tools is None else tools.grammar()
        others = {} if grammar is None else {"grammar": grammar}
        return self._fields(
            max_tokens=limits.pop() if limits else None, logprobs=self._num_logprobs, **others
        )


class ChatBody(_Chat):
    """The body of POST /v1/chat/completions."""

    messages: Messages

    def echoes(self) -> list[str]:
        """What `echo` puts before the answer to each conversation."""
        return [_echoed(self.messages)]

    def beams(self, sampling: dict[str, Any]) -> BeamSearchParams | None:
        params = super().beams(sampling)
        if params is not None and self.tools:
            raise RequestError("tools have no place in a beam search", "tools")
        return params


class BatchChatBody(_Chat):
    """The body of POST /v1/chat/completions/batch (vLLM's): several conversations, one answer to each."""

    messages: Annotated[list[Messages], WrapValidator(in_pieces)]

    def echoes(self) -> list[str]:
        """As `ChatBody.echoes`."""
        return [_echoed(conversation) for conversation in self.messages]

    def check_batch(self) -> None:
        """Raise RequestError for what a batch does not serve."""
        if not self.messages:
            raise RequestError("messages is empty; it must hold at least one conversation", "messages")
        refused = {"stream": self.stream, "tools": self.tools, "use_beam_search": self.use_beam_search}
        for name, value in {**refused, "n": (self.n or 1) != 1}.items():
            if value:
                raise RequestError(f"a batch of conversations is served without {name}", name)
        self.tool_use(form=None)  # refuses a choice among no tools
        self.beams({})  # refuses a length_penalty without a search


def _echoed(messages: list[Message]) -> str:
    """vLLM's rule: the last message, if it is the assistant's."""
    last = messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "".join(part.text for part in last.content)


class TokenizeBody(Conversation):
    """The body of POST /tokenize (vLLM's): a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """The body of POST /detokenize (vLLM's)."""

    model: str | None = None
    tokens: list[int]


# ------------------------------------------------------------------------------------------- reading


def has_messages(raw: bytes) -> bool:
    """Whether a body is a chat's; what is no JSON object is none."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "messages" in value


def parse_body[Body: BaseModel](
    raw: bytes, model: type[Body], check: Callable[[dict[str, Any]], None] | None = None
) -> Body:
    """Read one JSON body strictly. Raises RequestError with the parameter at fault named. `check` sees the
    object before a look at each part of it, and may raise."""
    try:
        # From bytes, json.loads would guess UTF-16 and let encoded surrogates pass; and it reads NaN.
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {why}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}")
    if check is not None:
        check(value)
    if b"\\ud" in raw.lower():
        _refuse_lone_surrogates(value)
    _refuse_not_served(value, model)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _request_error(error, model) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _refuse_lone_surrogates(value: Any) -> None:
    """Half of a surrogate pair is a string in Python and no text: no tokenizer or answer could carry it."""
    waiting = [value]
    while waiting:  # not by json.dumps, which keeps the GIL
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str) and not one.isascii():
            try:
                one.encode("utf-8")
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                why = f"it holds a lone surrogate (\\u{ord(half):04x}), which is no text"
                raise RequestError(f"the body is not valid JSON: {why}") from None


def _refuse_not_served(body: dict[str, Any], model: type[BaseModel]) -> None:
    """Take out of `body` the keys that ask for nothing; raise for those that ask for what is not served."""
    for name in list(body):
        if name in model.model_fields:
            continue
        if name in NOT_SERVED:
            if not _asks_for_nothing(body[name], NOT_SERVED[name]):
                what = f"send {_INSTEAD[name]} instead" if name in _INSTEAD else "leave it out"
                raise RequestError(f"{name} is not supported by this server; {what}", name)
            del body[name]
        elif name in LABELS:
            if not isinstance(body[name], (LABELS[name], type(None))):
                kind = "an object" if LABELS[name] is dict else "a string"
                raise RequestError(f"{name} must be {kind}", name)
            del body[name]


def _asks_for_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    # False == 0 and True == 1 in Python, but not in JSON.
    return value is None or any(
        value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless
    )


MAX_FAULTS = 10_000
"""Faults of a body that are looked at to tell the one that says most."""

_UNION_MEMBERS = ("str", "int", "ContentPart", "NamedTool")


def _request_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    """One fault in OpenAI's words: `messages[0].content: Input should be a valid string`."""
    if error.error_count() > MAX_FAULTS:
        return RequestError(f"the body has {error.error_count()} faults, too many to look at")
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(errors, key=lambda e: len(e["loc"]))  # of a union, the member that got furthest
    where = ""
    for part in first["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif not where:
            where = part
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            where += f".{part}"
    name = str(first["loc"][-1]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(model.model_fields)) if len(first["loc"]) == 1 else ""
        return RequestError(f"unknown parameter {name!r}{known and '; known: ' + known}", where)
    if first["type"] == "missing":
        return RequestError(f"{where} is missing", where)
    if first["type"] == "none_required":
        return RequestError(f"{where} is not supported by this server; leave it out", where)
    return RequestError(f"{where}: {first['msg']}", where)
