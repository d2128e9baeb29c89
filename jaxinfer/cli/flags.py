"""Flags that commands share: of the engine, of sampling, of the server; and the model they load."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from jaxinfer.cli import debug
from jaxinfer.cli.terminal import bias_argument, file_argument, text_argument
from jaxinfer.config import EngineConfig
from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.server.launch import ServerConfig

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

MODEL_HELP = "A pulled name, a Hugging Face or Orbax folder, a .gguf file, or random:CONFIG."
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

    def load(self, model: str) -> LLM:
        """The model, ready to run. Wrong options and names are told before anything heavy is imported."""
        options = self.checked()
        if not text_argument(model).startswith("random:"):
            from checkpoints import resolve

            resolve(model)
        from jaxinfer.llm import LLM

        llm = LLM(model, **options)
        debug.watch(llm.engine)
        return llm


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEngineFlags(EngineFlags):
    """How the model is run."""

    # Where prompts are sampled, --seed is SamplingParams.seed.
    seed: Annotated[int | None, arg(name="engine-seed")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags(ServerConfig):
    """How the endpoint is offered."""

    cors_origin: UseAppendAction[tuple[str, ...]] = ()
    """A web origin whose pages may use the API (* for all); may be given several times."""
    allowed_host: UseAppendAction[tuple[str, ...]] = ()
    """A name by which clients may call the server, besides localhost and the host (* for all); may be given
    several times. On an address that other machines reach, any name will do until one is given."""

    def __post_init__(self) -> None:
        """Nothing: see EngineFlags."""

    def checked(self) -> ServerConfig:
        """Raises ConfigError."""
        return ServerConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ServerConfig)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen and when an answer ends: fields of SamplingParams.

    A flag that is left out (None) takes the model's own value, from its generation_config.json, and where
    that names none the default of SamplingParams.
    """

    n: int | None = None
    """Answers per prompt; 1 when left out."""
    max_tokens: int | None = None
    """Most tokens of an answer; left out, it runs to the model's limit."""
    min_tokens: int | None = None
    """Tokens before which an answer may not end."""
    temperature: float | None = None
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens; 0 is off."""
    top_p: float | None = None
    """Draw from the most likely tokens that together hold this much probability."""
    min_p: float | None = None
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
    """Report log-probabilities: of the chosen token and the k most likely ones. Needs --json."""
    prompt_logprobs: int | None = None
    """Report log-probabilities of the prompt's own tokens, and of the k most likely ones. Needs --json."""
    repetition_penalty: float | None = None
    """Above 1, makes tokens of the prompt and the answer so far less likely; 1 is off."""
    presence_penalty: float | None = None
    """Subtracted once from the logit of every token that the answer holds so far."""
    frequency_penalty: float | None = None
    """Subtracted from the logit of a token for every time that the answer holds it so far."""
    logit_bias: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID:BIAS")] = ()
    """Added to the logit of a token, such as 504:-100; may be given several times."""
    allowed_token_ids: UseAppendAction[tuple[int, ...]] = ()
    """A token that may be chosen; may be given several times, and then no other is."""
    bad_words: UseAppendAction[tuple[str, ...]] = ()
    """A word that the answer never holds; may be given several times."""
    json_schema: Annotated[str | None, arg(metavar="JSON|@FILE")] = None
    """The answer is JSON that this schema allows."""
    regex: str | None = None
    """The answer as a whole matches this pattern."""
    choice: UseAppendAction[tuple[str, ...]] = ()
    """The answer is this text, or that of another --choice."""
    grammar: Annotated[str | None, arg(metavar="LARK|@FILE")] = None
    """The answer follows this grammar, in Lark's notation."""
    structured_outputs: Annotated[str | None, arg(metavar="JSON|@FILE")] = None
    """What the answer follows, as vLLM writes it: {"json": ...}, {"structural_tag": ...} and so on."""
    logprob_token_ids: UseAppendAction[tuple[int, ...]] = ()
    """Report the log-probability of this token in each place; may be given several times. Needs --json."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def given(self) -> dict[str, Any]:
        """The fields that were given, to lay over the model's own (`LLM.sampling`).

        Raises RequestError for a value out of range, and OSError for a file that cannot be read, before any
        model is loaded.
        """
        fields = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        given: dict[str, Any] = {n: value for n, (value, left_out) in fields.items() if value != left_out}
        if "logit_bias" in given:
            given["logit_bias"] = bias_argument(given["logit_bias"])
        for name in {"json_schema", "grammar"} & given.keys():
            given[name] = file_argument(given[name], name)
        if "structured_outputs" in given:
            text = file_argument(given["structured_outputs"], "structured_outputs")
            try:
                given["structured_outputs"] = json.loads(text)
            except ValueError as error:
                raise RequestError(
                    f"--structured-outputs is not JSON: {error}", "structured_outputs"
                ) from None
        for name in {"regex", "choice", "bad_words"} & given.keys():
            for text in [given[name]] if name == "regex" else given[name]:
                text_argument(text)
        SamplingParams(**given)
        return given
