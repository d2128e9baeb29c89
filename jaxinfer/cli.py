"""The command `jaxinfer`: results on stdout, everything else on stderr.

Status 0: all was done. 1: it could not be, and one line on stderr says why. 2: the command line itself is
wrong. 130: interrupted. JAXINFER_DEBUG=1 shows the traceback behind the line. Heavy modules are imported by
the command that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, UseAppendAction, arg, subcommand

from jaxinfer import progress
from jaxinfer.config import EngineConfig
from jaxinfer.core import JaxInferError, Logprob, Request, RequestError, SamplingParams, TokenEvent
from jaxinfer.server.launch import ServerConfig

if TYPE_CHECKING:
    from jaxinfer.core import RequestOutput
    from jaxinfer.llm import LLM

MODEL_HELP = "A pulled name, a Hugging Face folder, a .gguf file, or random:CONFIG."
Model = Annotated[Positional[str], arg(metavar="MODEL", help=MODEL_HELP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags(EngineConfig):
    """How the model is run."""

    def __post_init__(self) -> None:
        """Nothing: `checked` validates, where its error is reported as one line and not as tyro's."""

    def checked(self) -> dict[str, Any]:
        """The keywords of LLM. Raises ConfigError."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(EngineConfig)}
        EngineConfig(**values)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEngineFlags(EngineFlags):
    """How the model is run."""

    # Where prompts are sampled, --seed is SamplingParams.seed.
    seed: Annotated[int | None, arg(name="engine-seed")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags(ServerConfig):
    """How the endpoint is offered."""

    def __post_init__(self) -> None:
        """Nothing: see EngineFlags."""

    def checked(self) -> ServerConfig:
        """Raises ConfigError."""
        return ServerConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ServerConfig)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen and when an answer ends. Names and meaning are those of SamplingParams."""

    n: int = 1
    """Answers per prompt."""
    max_tokens: int | None = None
    """Most tokens of an answer; None runs to the model's limit."""
    min_tokens: int = 0
    """Tokens before which an answer may not end."""
    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_k: int = 0
    """Draw from the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together hold this much probability."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Fixes the draws of every prompt."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """A string that ends an answer; may be given several times."""
    stop_token_ids: UseAppendAction[tuple[int, ...]] = ()
    """A token that ends an answer; may be given several times."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""
    logprobs: int | None = None
    """Report log-probabilities: of the chosen token and the k most likely ones."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def params(self) -> SamplingParams:
        """Raises RequestError for a value out of range."""
        return SamplingParams(**dataclasses.asdict(self))


# ------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True)
class Pull:
    """Download a model into the cache folder."""

    name: Annotated[
        Positional[str], arg(metavar="NAME", help="smollm2-135m, or ORG/NAME on the Hugging Face hub.")
    ]

    def run(self) -> int:
        import checkpoints

        print(checkpoints.pull(self.name, progress=True))
        return 0


@dataclass(frozen=True)
class Generate:
    """Continue prompts."""

    model: Model
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT...", help="Texts to continue.")]
    json: bool = False
    """One JSON object per prompt and line."""
    token_ids: bool = False
    """The prompts are token ids: "504,3575,314"."""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: PromptEngineFlags = field(default_factory=PromptEngineFlags)

    def run(self) -> int:
        if not self.prompts:
            raise UsageError("generate needs at least one PROMPT")
        params = self.sampling.params()
        prompts = [_token_ids(p) if self.token_ids else _text(p) for p in self.prompts]
        llm = load_llm(self.model, self.engine)
        if len(prompts) == 1 and params.n == 1 and not self.json:
            return self._stream(llm, llm.prepare(prompts[0], params))
        outputs = llm.generate(prompts, params)
        for number, output in enumerate(outputs):
            if self.json:
                print(json.dumps(output_json(output), ensure_ascii=False, allow_nan=False))
                continue
            for choice in output.outputs:
                if number or choice.index:
                    print("-" * 40)
                print(choice.text)
        failed = [c for o in outputs for c in o.outputs if c.finish_reason in ("error", "abort")]
        for choice in failed:
            say_error(choice.error or f"a prompt ended with {choice.finish_reason}")
        return 1 if failed else 0

    def _stream(self, llm: LLM, request: Request) -> int:
        events = list(print_stream(llm.stream(request)))
        last = events[-1]
        if last.finish_reason in ("error", "abort"):
            say_error(last.error or f"the prompt ended with {last.finish_reason}")
            return 1
        return 0


@dataclass(frozen=True)
class Chat:
    """Talk with a model. Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D ends."""

    model: Model
    system: str | None = None
    """A system message to begin with."""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: PromptEngineFlags = field(default_factory=PromptEngineFlags)

    def run(self) -> int:
        params = self.sampling.params()
        if params.n != 1:
            raise RequestError(f"n must be 1 in a chat, got {params.n}", "n")
        beginning = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        llm = load_llm(self.model, self.engine)
        history, failed = list(beginning), False
        for line in _turns():
            if line == "/clear":
                history = list(beginning)
                continue
            if line in ("/exit", "/quit"):
                break
            try:
                question = {"role": "user", "content": _text(line)}
                request = llm.prepare_chat([*history, question], params)
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


@dataclass(frozen=True)
class Serve:
    """Offer a model over HTTP, in OpenAI's shapes."""

    model: Model
    server: ServerFlags = field(default_factory=ServerFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        from jaxinfer.server.launch import serve

        serve(lambda: load_llm(self.model, self.engine), self.server.checked())
        return 0


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices, attention backends, the cache folder and import paths."""

    json: bool = False
    """As one JSON object."""

    def run(self) -> int:
        from jaxinfer.doctor import doctor

        print(doctor(as_json=self.json))
        return 0


Command = (
    Annotated[Pull, subcommand("pull")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Doctor, subcommand("doctor")]
)


class UsageError(Exception):
    """The command line is wrong in a way that its grammar cannot say."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command: Any = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="jaxinfer",
        description="Inference for Llama-family models in JAX.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    # A terminal that cannot show a character, or input that is no UTF-8, is no reason to break off.
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        return _run(command)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `jaxinfer ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: Any) -> int:
    try:
        status = command.run()
        sys.stdout.flush()
        return status
    except UsageError as error:
        say_error(str(error))
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if os.environ.get("JAXINFER_DEBUG") == "1":
            raise
        say_error(_one_line(error))
        return 1


def _one_line(error: Exception) -> str:
    """What to tell of an error. One that is not meant for the caller is named, since it is ours."""
    from checkpoints import CheckpointError, PullError
    from jaxinfer.text.errors import ChatTemplateError, TokenizerError

    text = " ".join(str(error).split())
    told = (JaxInferError, CheckpointError, PullError, TokenizerError, ChatTemplateError, OSError)
    if isinstance(error, told):
        return text
    return f"unexpected {type(error).__name__}: {text[:500]} (JAXINFER_DEBUG=1 shows where)"


def say_error(message: str) -> None:
    """One line on stderr."""
    print(f"jaxinfer: error: {message}", file=sys.stderr, flush=True)


def load_llm(model: str, engine: EngineFlags) -> LLM:
    """The model, ready to run. Wrong options and names are told before anything heavy is imported."""
    options = engine.checked()
    if not _text(model).startswith("random:"):
        from checkpoints import resolve

        resolve(model)
    from jaxinfer.llm import LLM

    return LLM(model, **options)


# ------------------------------------------------------------------------------------ in and out


def _text(argument: str) -> str:
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the text is not valid UTF-8", "prompt") from None
    return argument


def _token_ids(argument: str) -> list[int]:
    try:
        return [int(part) for part in argument.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"with --token-ids a prompt looks like 504,3575,314; got {argument!r}", "prompt"
        ) from None


def print_stream(events: Iterable[TokenEvent]) -> Iterator[TokenEvent]:
    """Pass events on and print their text as it comes, with a line end after the last.

    From the first text on no progress is shown beside it; what compiles before is.
    """
    quiet = False
    with contextlib.ExitStack() as stack:
        for event in events:
            if event.text and not quiet:
                stack.enter_context(progress.silenced())
                quiet = True
            print(event.text, end="", flush=True)
            yield event
        print(flush=True)


def _answer(llm: LLM, request: Request) -> tuple[str, str | None]:
    """Print an answer as it comes; its text, and the error that ended it, if any. Ctrl-C ends it early."""
    parts: list[str] = []
    with _interruption() as interrupted, contextlib.closing(llm.stream(request)) as events:
        for event in print_stream(events):
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


def output_json(output: RequestOutput) -> dict[str, Any]:
    """One prompt's result as `generate --json` prints it."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [
            {
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
                "logprobs": None if choice.logprobs is None else [_logprobs_json(p) for p in choice.logprobs],
                "cumulative_logprob": choice.cumulative_logprob,
            }
            for choice in output.outputs
        ],
        "metrics": {name: getattr(output.metrics, name) for name in ("ttft_s", "tpot_s", "cached_tokens")},
    }


def _logprobs_json(known: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "text": entry.text}
        for token_id, entry in known.items()
    }
