"""`jaxinfer chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxinfer.cli import terminal
from jaxinfer.cli.flags import Model, PromptEngineFlags, SamplingFlags
from jaxinfer.cli.terminal import say_error, text_argument
from jaxinfer.core import Request, RequestError

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


@dataclass(frozen=True)
class Chat:
    """Talk with a model. Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D ends."""

    model: Model
    system: str | None = None
    """A system message to begin with."""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: PromptEngineFlags = field(default_factory=PromptEngineFlags)

    def run(self) -> int:
        sampling = self.sampling.given()
        if sampling.get("n", 1) != 1:
            raise RequestError(f"n must be 1 in a chat, got {sampling['n']}", "n")
        for name in ("logprobs", "prompt_logprobs"):
            if name in sampling:
                raise RequestError(f"{name} are not shown in a chat; use generate --json", name)
        beginning = [] if self.system is None else [{"role": "system", "content": text_argument(self.system)}]
        with self.engine.load(self.model) as llm:
            return self._talk(llm, sampling, beginning)

    def _talk(self, llm: LLM, sampling: dict[str, Any], beginning: list[dict[str, str]]) -> int:
        history, failed = list(beginning), False
        for line in _turns():
            if line == "/clear":
                history = list(beginning)
                continue
            if line in ("/exit", "/quit"):
                break
            try:
                question = {"role": "user", "content": text_argument(line)}
                request = llm.prepare_chat([*history, question], sampling)
            except RequestError as error:  # say so and go on: the next turn may be fine
                say_error(f"{error} (/clear forgets the conversation)")
                failed = True
                continue
            answer, error = _answer(llm, request)
            if error is None:
                history += [question, {"role": "assistant", "content": answer}]
            else:
                say_error(error)
                failed = True
        return 1 if failed else 0


def _answer(llm: LLM, request: Request) -> tuple[str, str | None]:
    """Print an answer as it comes; its text, and the error that ended it, if any. Ctrl-C ends it early."""
    parts: list[str] = []
    with _interruption() as interrupted, contextlib.closing(llm.stream(request)) as events:
        for event in terminal.print_stream(events):
            parts.append(event.text)
            if event.finish_reason in ("error", "abort"):
                print(flush=True)
                return "".join(parts), event.error or f"the answer ended with {event.finish_reason}"
            if interrupted and event.finish_reason is None:
                print(" [stopped]", flush=True)
                break
    return "".join(parts), None


@contextlib.contextmanager
def _interruption() -> Generator[list[int]]:
    """Collects Ctrl-C instead of raising it: an exception amid a step would leave the engine half done.

    The second one raises, for an engine that does not come back.
    """
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def _turns() -> Iterator[str]:
    """What the user says, line by line: typed at a prompt, or piped in."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            print()
            return
        if not line and not interactive:
            return
        if line.strip():
            yield line.strip()
