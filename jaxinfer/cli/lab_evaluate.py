"""`jaxinfer lab evaluate`: perplexity, last words, multiple choice, and agreement with an original."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from jaxinfer.cli.flags import EngineFlags, Model
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.lab.evaluate import ModelResults, Passages, Questions, Report, Text, Windowing
    from jaxinfer.llm import LLM

Files = Annotated[tuple[str, ...], arg(metavar="FILE...")]


@dataclass(frozen=True)
class Evaluate:
    """Measure a model, and how far it does as its original does.

    A table goes to stdout (--json: one JSON object). Figures come from the engine's own scoring path.
    """

    model: Model
    perplexity: Files = ()
    """Texts, each in a file (.jsonl: the "text" of each line, a blank line between two): perplexity per
    token, word and byte."""
    last_word: Files = ()
    """Passages, one a line (.jsonl: objects with a "text"): is the last word what the model would say?"""
    multiple_choice: Files = ()
    """JSON lines of PIQA (labels in NAME-labels.lst beside it), BLiMP, HellaSwag, or {"context", "choices",
    "answer"}: is the right choice the most likely one?"""
    against: Annotated[str | None, arg(metavar="MODEL")] = None
    """The original: it is measured alike, and compared token by token over the texts of --agreement."""
    agreement: Files = ()
    """Texts to compare the two models over; those of --perplexity, if left out."""
    limit: int | None = None
    """Only the first N questions, passages, and windows of each file."""
    window: int | None = None
    """Tokens that are run at a time, for perplexity and agreement; if left out 1024, or as many as go."""
    stride: int | None = None
    """Tokens from one window to the next; half a window, if left out. As large as --window: disjoint windows,
    the first token of which is not counted."""
    bos: Literal["first", "every", "none"] = "first"
    """BOS before the text, where the tokenizer puts it there; in every window; or nowhere."""
    exact_kl: bool = True
    """KL over whole distributions, by dense passes over both models' weights; off: the bound alone."""
    greedy_prompt: int = 32
    """With --against: tokens of each window that are continued greedily by both models."""
    greedy_tokens: int = 64
    """With --against: how many tokens each of them adds; 0: none."""
    json: bool = False
    """One JSON object in place of the table."""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """Keep the JSON object in this file too."""
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        from jaxinfer.lab.evaluate import Report, read_passages, read_questions, read_text

        self._check()
        texts = [read_text(file) for file in self.perplexity]
        passages = [read_passages(file, self.limit) for file in self.last_word]
        questions = [read_questions(file, self.limit) for file in self.multiple_choice]
        compared = [read_text(file) for file in self.agreement] or texts
        if self.output is not None:
            Path(self.output).touch()  # a path that cannot be written is told before the work
        tasks = (texts, passages, questions)
        if self.against is None:
            with self.engine.load(self.model) as llm:
                report = Report(results=self._measured(llm, self._windowing(llm), *tasks))
        else:
            report = self._compared(self.against, compared, *tasks)
        value = json.dumps(report.as_json(), ensure_ascii=False, allow_nan=False)
        if self.output is not None:
            Path(self.output).write_text(value + "\n", encoding="utf-8")
        print(value if self.json else report.as_table())
        return 0

    def _check(self) -> None:
        """Raises UsageError for flags that do not go together, ConfigError for a span that is none."""
        from jaxinfer.config import TopPagesSpan, no_scoring

        if not (self.perplexity or self.last_word or self.multiple_choice or self.agreement):
            raise UsageError(
                "nothing to evaluate: give --perplexity, --last-word, --multiple-choice or --agreement"
            )
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit}: at least one example of each file is run")
        if self.greedy_prompt < 1 or self.greedy_tokens < 0:
            raise UsageError("--greedy-prompt takes 1 token at least, and --greedy-tokens 0")
        span = self.engine.span()
        if reason := no_scoring(span, self.window if self.perplexity or self.agreement else None):
            raise UsageError(f"--attention-span {self.engine.attention_span}: {reason}")
        if self.against is not None and self.exact_kl and isinstance(span, TopPagesSpan):
            raise UsageError(
                f"--attention-span {self.engine.attention_span}: exact KL is of dense passes, and where "
                "queries choose pages there is none; leave it out with --no-exact-kl, and the bound remains"
            )
        if self.against is None:
            for name in ("agreement", "exact_kl", "greedy_prompt", "greedy_tokens"):
                default = next(f.default for f in dataclasses.fields(self) if f.name == name)
                if getattr(self, name) != default:
                    raise UsageError(
                        f"--{name.replace('_', '-')} compares with an original: it needs --against"
                    )

    def _compared(self, against: str, compared: list[Text], *tasks: Any) -> Report:
        from jaxinfer.lab.evaluate import Report, evaluate_agreement

        with self._first_of_two().load(against) as original, self.engine.load(self.model) as variant:
            windowing = self._windowing(original, variant)
            mine, other = (self._measured(llm, windowing, *tasks) for llm in (variant, original))
            began = time.perf_counter()
            found = tuple(
                evaluate_agreement(
                    original, variant, text, windowing, exact_kl=self.exact_kl,
                    prompt_tokens=self.greedy_prompt, greedy_tokens=self.greedy_tokens,
                )
                for text in compared
            )  # fmt: skip
            seconds = time.perf_counter() - began
        return Report(results=mine, original=other, agreement=found, agreement_seconds=seconds)

    def _windowing(self, *models: LLM) -> Windowing:
        """Windows that every one of the models can run, so that they are measured over the same."""
        from jaxinfer.lab.evaluate import Windowing

        shortest = min(models, key=lambda llm: llm.limits.max_model_len)
        return Windowing.fitting(shortest, self.window, self.stride, self.bos, self.limit)

    def _first_of_two(self) -> EngineFlags:
        """The engine of the model that is loaded first: its pool leaves the other one as much."""
        if self.engine.num_pages is not None:
            return self.engine
        return dataclasses.replace(self.engine, memory_utilization=self.engine.memory_utilization / 2)

    def _measured(
        self,
        llm: LLM,
        windowing: Windowing,
        texts: list[Text],
        passages: list[Passages],
        questions: list[Questions],
    ) -> ModelResults:
        from jaxinfer.lab.evaluate import (
            ModelResults,
            evaluate_choices,
            evaluate_last_word,
            evaluate_perplexity,
        )

        began = time.perf_counter()
        perplexity = evaluate_perplexity(llm, texts, windowing)
        last_word = tuple(evaluate_last_word(llm, task) for task in passages)
        choices = tuple(evaluate_choices(llm, questions)) if questions else ()
        return ModelResults(
            model=llm.model_name,
            parameters_dtype=str(llm.engine_config.quantization or llm.engine_config.dtype),
            kv_cache_dtype=str(llm.engine_config.kv_cache_dtype),
            perplexity=tuple(perplexity),
            last_word=last_word,
            choices=choices,
            seconds=time.perf_counter() - began,
        )
