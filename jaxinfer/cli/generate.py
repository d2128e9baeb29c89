"""`jaxinfer generate`: continue prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from jaxinfer.cli.flags import Model, PromptEngineFlags, SamplingFlags
from jaxinfer.cli.terminal import UsageError, print_stream, say_error, text_argument, token_id_argument
from jaxinfer.core import Logprob, Request

if TYPE_CHECKING:
    from jaxinfer.core import RequestOutput
    from jaxinfer.llm import LLM


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
        sampling = self.sampling.given()
        for name in ("logprobs", "prompt_logprobs"):
            if name in sampling and not self.json:
                raise UsageError(f"--{name.replace('_', '-')} needs --json")
        prompts = [token_id_argument(p) if self.token_ids else text_argument(p) for p in self.prompts]
        with self.engine.load(self.model) as llm:
            return self._generate(llm, prompts, sampling)

    def _generate(self, llm: LLM, prompts: list[str | list[int]], sampling: dict[str, Any]) -> int:
        has_text = llm.tokenizer is not None
        if len(prompts) == 1 and sampling.get("n", 1) == 1 and not self.json and has_text:
            return self._stream(llm, llm.prepare(prompts[0], sampling))
        outputs = llm.generate(prompts, sampling)
        for number, output in enumerate(outputs):
            if self.json:
                print(json.dumps(output_json(output), ensure_ascii=False, allow_nan=False))
                continue
            for choice in output.outputs:
                if number or choice.index:
                    print("-" * 40)
                print(choice.text if has_text else ",".join(map(str, choice.token_ids)))
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


def output_json(output: RequestOutput) -> dict[str, Any]:
    """One prompt's result as `generate --json` prints it."""
    known = output.prompt_logprobs
    asked = {} if known is None else {"prompt_logprobs": [p and _logprobs_json(p) for p in known]}
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        **asked,
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
