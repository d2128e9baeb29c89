"""jaxinfer as a model of EleutherAI's lm-evaluation-harness (lm_eval), whose tasks it then answers:

    pip install lm-eval
    python -m jaxinfer.lab.lm_eval_adapter run --model jaxinfer --model_args pretrained=smollm2-135m \\
        --tasks piqa

lm_eval finds no models in other packages by itself (its registry reads no entry points, as of 0.4.13), so
this module registers the model and then runs lm_eval's own command line, whose flags are all there. In
Python, `register()` before `lm_eval.simple_evaluate(model="jaxinfer", model_args={"pretrained": ...})`.
lm_eval is no dependency, and is imported by `register` alone.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from jaxinfer.core import ConfigError, RequestError, SamplingParams
from jaxinfer.lab.evaluate.scoring import (
    Scored,
    Span,
    continuation_span,
    prefix_token,
    require_tokenizer,
    score_spans,
    started,
)
from jaxinfer.llm import LLM

NAME = "jaxinfer"
LM_EVAL_DEVICE = "cuda:0"
"""What lm_eval's command line asks of every model unless told otherwise, on machines without a GPU too."""
KEPT_AFTER = 512
"""Requests after which answers go to lm_eval's cache (--use_cache), so that a run can be taken up again."""

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm_eval's names for the most tokens of an answer."""


class Instance(Protocol):
    """What the adapter uses of an lm_eval request."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class CacheHook(Protocol):
    def add_partial(self, attr: str, req: Any, res: Any) -> None: ...


class Adapter:
    """lm_eval's three kinds of request, answered by the engine. `register` mixes in the `LM` of lm_eval.

    `pretrained` is a MODEL as everywhere; `engine_options` are the fields of EngineConfig. The engine packs
    all requests by itself, so `batch_size` can only be lm_eval's default of 1 or "auto": `max_num_seqs` and
    `max_num_batched_tokens` say how much runs together. JAX chooses the device (JAX_PLATFORMS): of `device`
    lm_eval's default and "cpu" are let pass, and neither moves anything. `prefix_token_id` stands before a
    text without context (None: BOS, or EOS where there is none). `max_gen_toks` is for tasks that name no
    limit. Raises ConfigError for an option that is none of these.
    """

    cache_hook: CacheHook

    def __init__(
        self,
        pretrained: str,
        *,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine_options: Any,
    ):
        if batch_size not in (None, 1, "1") and not str(batch_size).startswith("auto"):
            raise ConfigError(
                f"batch_size {batch_size}: the engine packs requests by itself; leave it out, and say "
                "max_num_seqs=N in model_args for how many run together"
            )
        if max_batch_size is not None:
            raise ConfigError(
                f"max_batch_size {max_batch_size}: the engine packs requests by itself; leave it out"
            )
        if device not in (None, "cpu", LM_EVAL_DEVICE):
            raise ConfigError(f"device {device!r}: leave it out; JAX_PLATFORMS chooses the device")
        self.set_up(LLM(pretrained, **engine_options), prefix_token_id, max_gen_toks)

    def set_up(self, llm: LLM, prefix_token_id: int | None = None, max_gen_toks: int = 256) -> None:
        """Answer with this model. Raises RequestError for one without a tokenizer."""
        require_tokenizer(llm)
        self.llm, self.max_gen_toks = llm, max_gen_toks
        self.prefix_token_id = prefix_token(llm) if prefix_token_id is None else prefix_token_id

    # ---------------------------------------------------------------------------------- likelihoods

    def loglikelihood(self, requests: Seq[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> (logprob of the continuation, whether greedy decoding would say it)."""
        spans = []
        for number, request in enumerate(requests, 1):
            context, continuation = request.args
            where = f"request {number}"
            spans.append(
                continuation_span(self.llm, context, continuation, where, prefix=self.prefix_token_id)
            )
        answers: list[tuple[float, bool]] = []
        for start, scores in self._scored(spans):
            for request, score in zip(requests[start : start + KEPT_AFTER], scores, strict=True):
                answers.append((math.fsum(score.logprobs), score.greedy))
                self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Seq[Instance], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> the logprob of all of its tokens, the first of which follows `prefix_token_id`.

        Each token is counted once, in windows of max_model_len - 1 tokens; a window begins with the last
        token of the one before, and the last window with as much as goes in. No other BOS is put before the
        text (lm_eval's own models run two where the tokenizer adds one).
        """
        spans: list[Span] = []
        owners = []
        for number, request in enumerate(requests, 1):
            ids = self.llm.encode(request.args[0], add_special_tokens=False)
            windows = rolling_spans(
                ids, self.prefix_token_id, self.llm.limits.max_model_len - 1, f"text {number}"
            )
            spans += windows
            owners += [number - 1] * len(windows)
        scores = [score for _, group in self._scored(spans) for score in group]
        sums: list[list[float]] = [[] for _ in requests]
        for owner, score in zip(owners, scores, strict=True):
            sums[owner] += score.logprobs
        answers = [math.fsum(values) for values in sums]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def _scored(self, spans: list[Span]) -> Iterator[tuple[int, list[Scored]]]:
        for start in range(0, len(spans), KEPT_AFTER):
            yield start, score_spans(self.llm, spans[start : start + KEPT_AFTER])

    # ----------------------------------------------------------------------------------- generation

    def generate_until(self, requests: Seq[Instance], disable_tqdm: bool = False) -> list[str]:
        """(context, options) -> the text that follows, up to a string of `until` or an end-of-text token.

        A context that is too long for it and the answer loses its beginning. Raises RequestError for an
        option that the engine does not know, and for a limit that leaves no room for a context.
        """
        prompts, samplings = [], []
        for request in requests:
            context, options = request.args
            sampling = self.sampling(options)
            room = self.llm.limits.max_model_len - (sampling.max_tokens or 0)
            if room < 1:
                raise RequestError(
                    f"max_gen_toks {sampling.max_tokens} leaves no room for a context: max_model_len is "
                    f"{self.llm.limits.max_model_len}",
                    "max_tokens",
                )
            ids = started(self.llm, self.llm.encode(context, add_special_tokens=False))
            prompts.append((ids or [self.prefix_token_id])[-room:])
            samplings.append(sampling)
        texts = []
        for start in range(0, len(prompts), KEPT_AFTER):
            part = slice(start, start + KEPT_AFTER)
            answers = self.llm.generate(prompts[part], samplings[part])
            for request, answer in zip(requests[part], answers, strict=True):
                ended = answer.outputs[0]
                if ended.finish_reason not in ("stop", "length"):
                    raise RequestError(
                        f"a context of {len(answer.prompt_token_ids)} tokens failed: {ended.error}"
                    )
                texts.append(ended.text)
                self.cache_hook.add_partial("generate_until", request.args, ended.text)
        return texts

    def sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        """lm_eval's generation_kwargs. Greedy unless do_sample is true or a temperature is given."""
        given = dict(options)
        limits = [given.pop(name) for name in MAX_TOKENS if given.get(name) is not None]
        if len(set(limits)) > 1:
            raise RequestError(f"{' and '.join(MAX_TOKENS)} are the same; give one of them", "max_tokens")
        until = given.pop("until", None) or []
        samples = given.pop("do_sample", None)
        given.setdefault("temperature", 1.0 if samples else 0.0)
        if samples is False:
            given["temperature"] = 0.0
        fields: dict[str, Any] = {
            **given,
            "max_tokens": int(limits[0]) if limits else self.max_gen_toks,
            "stop": tuple([until] if isinstance(until, str) else until),
        }
        known = SamplingParams.__dataclass_fields__
        for name in fields:
            if name not in known:
                raise RequestError(f"generation_kwargs: {name} is not known; known: {', '.join(known)}", name)
        return SamplingParams(**fields)

    # ---------------------------------------------------------------------------------------- chats

    @property
    def tokenizer_name(self) -> str:
        """What lm_eval tells its caches of requests apart by."""
        return self.llm.model_name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the model's chat template; None where chats are off. Raises RequestError for a template
        by name."""
        if isinstance(chat_template, str):
            raise RequestError(
                f"chat template {chat_template!r}: only the model's own is taken", "chat_template"
            )
        return self._template().source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; without a generation prompt its last message is left open."""
        return self._template().render_text(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _template(self) -> Any:
        template = self.llm.chat_template
        if template is None or not template.available:
            raise RequestError(f"{self.llm.model_name} has no chat template", "chat_template")
        return template


def rolling_spans(ids: Seq[int], prefix: int, room: int, where: str) -> list[Span]:
    """A text of any length in spans of at most `room` tokens that look at each of its tokens once, as
    lm_eval's get_rolling_token_windows with a context of one token cuts it."""
    run = [prefix, *ids]
    spans = []
    for first in range(1, len(run), room - 1):
        end = min(first + room - 1, len(run))
        start = max(0, min(first - 1, end - room))
        spans.append(Span(tuple(run[start:end]), first - start, where))
    return spans


def register() -> type:
    """Make `jaxinfer` a model of lm_eval, and return its class. Raises ImportError without lm_eval."""
    base = importlib.import_module("lm_eval.api.model").LM
    registry = importlib.import_module("lm_eval.api.registry")
    importlib.import_module("lm_eval.models")  # its own models register first
    if NAME in registry.model_registry:
        return registry.model_registry.get(NAME)

    class JaxInferLM(Adapter, base):
        """See Adapter."""

        def __init__(self, pretrained: str, **options: Any):
            base.__init__(self)
            Adapter.__init__(self, pretrained, **options)

    return registry.register_model(NAME)(JaxInferLM)


def main() -> int:
    """lm_eval's command line, with this model in it."""
    from jaxinfer.lab import lm_eval_adapter  # by its name, and not as __main__

    try:
        lm_eval_adapter.register()
    except ImportError as error:
        print(f"lm_eval is not installed here ({error}): pip install lm-eval", file=sys.stderr)
        return 1
    importlib.import_module("lm_eval.__main__").cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
