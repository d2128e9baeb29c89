"""What one body may cost before anything of it runs, and the log-probabilities of all of them. Elsewhere:
`read_body` (bytes and time of the body), SamplingParams (n, logprobs, stops, biases), `engine.validate`
(tokens and pages), `text.grammar` (time and memory of a structure), `EngineWorker` (sequences that run and
wait, and news that nobody reads)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.core import Limits, Request, RequestError
from jaxinfer.engine.validate import TOO_LONG
from jaxinfer.server.tickets import MAX_UNREAD
from jaxinfer.server.worker import OverloadedError

CHARACTERS_PER_TOKEN = 128
"""No vocabulary in use has a longer token (128 spaces), so a text of more than this many characters for each
token of max_model_len is refused without tokenising it, which takes a second a megabyte."""

FEW = 4096
"""Entries that any list or object of a body may have."""

MAX_LOGPROB_ENTRIES = 1_000_000
"""Most log-probabilities that one answer may come to hold, at some 250 bytes and 3.5 us of JSON each: one
continuation of 47k tokens with all of 20 each passes."""

MAX_LOGPROBS_HELD = 4_000_000
"""Most log-probabilities that all answers in progress may come to hold together: a gigabyte."""


def check_texts(texts: Iterable[object], limits: Limits, param: str) -> None:
    """Raise RequestError when texts that make one prompt are too long for the model, whatever their tokens;
    what is no text (token ids) is counted elsewhere."""
    most = CHARACTERS_PER_TOKEN * limits.max_model_len
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if characters > most:
        raise RequestError(
            f"the prompt has {characters} characters, which is too long for the limit of "
            f"{limits.max_model_len} tokens of prompt and output together (max_model_len); "
            f"at most {most} characters are looked at",
            param,
        )


def check_counts(body: Mapping[str, Any], limits: Limits) -> None:
    """Raise RequestError for more messages, parts or token ids than could fit into the model, and for other
    lists and objects of more entries than there are tokens: before a look at each of them, which takes a
    second a million. `body` is as it was sent, of any shape."""
    most = limits.max_model_len
    for where, got in _messages_in(body.get("messages")):
        if got > most:
            raise RequestError(f"{where} are {got}; at most {most} (max_model_len) are looked at", "messages")
    tokens = body.get("tokens")
    if isinstance(tokens, list) and len(tokens) > most:
        raise RequestError(
            f"tokens has {len(tokens)} token ids; at most {most} (max_model_len) are looked at", "tokens"
        )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and body.get("truncate_prompt_tokens") is None:
        prompts = [prompt] if isinstance(prompt[0], int) else prompt
        longest = max((len(one) for one in prompts if isinstance(one, list)), default=0)
        if longest > most:
            raise RequestError(
                f"the prompt has {longest} tokens, and this model's maximum context length is {most} tokens "
                f"of prompt and output together (max_model_len); shorten the prompt to at most {most - 1}",
                "prompt",
                TOO_LONG,
            )
    entries = max(most, limits.vocab_size, FEW)
    for name, value in body.items():
        inner = value.items() if isinstance(value, dict) and len(value) <= FEW else ()
        for where, item in [(name, value), *((f"{name}.{key}", item) for key, item in inner)]:
            if isinstance(item, (list, dict)) and len(item) > entries and where not in ("prompt", "tokens"):
                raise RequestError(f"{where} has {len(item)} entries; at most {entries} are looked at", where)


def _messages_in(messages: Any) -> Iterator[tuple[str, int]]:
    """The numbers of messages, or of conversations, and of what lies in the messages of each."""
    if not isinstance(messages, list):
        return
    yield "messages", len(messages)
    for i, conversation in enumerate(messages if messages and isinstance(messages[0], list) else [messages]):
        if not isinstance(conversation, list):
            continue
        where = "messages" if conversation is messages else f"messages[{i}]"
        yield where, len(conversation)
        maps = [message for message in conversation if isinstance(message, dict)]
        for name in ("content", "tool_calls"):
            lists = (message.get(name) for message in maps)
            yield f"the parts of {where}, {name},", sum(len(part) for part in lists if isinstance(part, list))
        yield f"the members of a message of {where}", max(map(len, maps), default=0)


def texts_of(messages: Iterable[Mapping[str, Any]]) -> Iterable[object]:
    """Every text of a conversation as chat templates take it, however deep: contents, parts, names, calls."""
    waiting: list[Any] = list(messages)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            yield value


def logprob_entries(requests: Sequence[Request], limits: Limits, *, stream: bool = False) -> int:
    """The log-probabilities that an answer may come to hold at a time: all that are asked for, and of a
    `stream` those of the prompts, and of the rest what may lie unread. Raises RequestError when all that are
    asked for are more than MAX_LOGPROB_ENTRIES."""
    of_prompts = of_answers = sequences = 0
    for request in requests:
        sampling, prompt = request.sampling, len(request.prompt_token_ids)
        if sampling.prompt_logprobs is not None:
            of_prompts += prompt * (sampling.prompt_logprobs + 1)
        told = len(sampling.logprob_token_ids) if sampling.logprob_token_ids else sampling.logprobs
        if told is not None:
            tokens = sampling.max_tokens or limits.max_model_len - prompt
            of_answers += sampling.n * tokens * (told + 1)
            sequences += sampling.n
    entries = of_prompts + of_answers
    if entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"the answer could hold {entries} log-probabilities (prompts x n x tokens x (logprobs + 1)); at "
            f"most {MAX_LOGPROB_ENTRIES} are served at once: lower max_tokens, n or logprobs",
            "logprobs",
        )
    return of_prompts + min(of_answers, sequences * MAX_UNREAD) if stream else entries


class LogprobRoom:
    """The log-probabilities that answers in progress may come to hold, of at most MAX_LOGPROBS_HELD."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, entries: int) -> Callable[[], None]:
        """Take room for so many; what is returned gives it back, once. Raises OverloadedError."""
        if entries and self.taken + entries > MAX_LOGPROBS_HELD:
            raise OverloadedError(
                f"the answers in progress may come to hold {self.taken} log-probabilities and this one "
                f"{entries}; the server keeps {MAX_LOGPROBS_HELD}: try again later, or lower max_tokens, n "
                "or logprobs"
            )
        self.taken += entries
        mine = [entries]

        def give_back() -> None:
            self.taken -= mine.pop() if mine else 0

        return give_back
