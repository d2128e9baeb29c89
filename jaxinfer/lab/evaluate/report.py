"""All that was measured of a model, beside its original where there is one: as JSON and as a table."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxinfer.lab.evaluate.agreement import Agreement
from jaxinfer.lab.evaluate.choices import Choices
from jaxinfer.lab.evaluate.estimate import Estimate
from jaxinfer.lab.evaluate.last_word import LastWord
from jaxinfer.lab.evaluate.perplexity import Perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResults:
    """What was measured of one model."""

    model: str
    parameters_dtype: str
    kv_cache_dtype: str
    perplexity: tuple[Perplexity, ...] = ()
    last_word: tuple[LastWord, ...] = ()
    choices: tuple[Choices, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A model, and where it was asked for its original and how far the two agree."""

    results: ModelResults
    original: ModelResults | None = None
    agreement: tuple[Agreement, ...] = ()
    agreement_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and objects; an Estimate is {"value", "stderr"}. Of every figure that both
        models have, `differences` has model - original, paired by example or window."""
        value: dict[str, Any] = {"model": _plain(self.results)}
        if self.original is not None:
            value["original"] = _plain(self.original)
            value["differences"] = [
                {"task": row.task, "metric": row.metric, **_plain(difference)}
                for row in self._rows()
                if (difference := row.difference) is not None
            ]
            value["agreement"] = _plain(self.agreement)
            value["agreement_seconds"] = self.agreement_seconds
        return value

    def as_table(self) -> str:
        """For a terminal: a line a figure, with its standard error behind ±."""
        rows, sized = self._rows(), self.original is not None
        heading = ("task", "figure", self.results.model)
        if self.original is not None:
            heading = (*heading, self.original.model, "difference")
        table: list[tuple[str, ...]] = [heading]
        for row in rows:
            cells = row.task, row.metric, _cell(row.mine)
            table.append((*cells, _cell(row.other), _cell(row.difference, signed=True)) if sized else cells)
        text = _aligned(table) if rows else []
        for one in self.agreement:
            text += ["", *_agreement_lines(one, self.original.model if self.original else "")]
        return "\n".join([*text, "", *self._notes()]).strip("\n")

    def _rows(self) -> list[_Row]:
        mine = _figures(self.results)
        other = {} if self.original is None else _figures(self.original)
        return [
            _Row(task, metric, value, other.get((task, metric))) for (task, metric), value in mine.items()
        ]

    def _notes(self) -> list[str]:
        """How the figures came about."""
        notes = []
        for one in self.results.perplexity[:1]:
            notes.append(f"perplexity: {_windows(one.windowing)}; words are separated by white space")
        for one in self.results.perplexity:
            notes.append(
                f"  {one.name}: {one.counted} of {one.tokens} tokens counted in {one.windows} windows, "
                f"{one.words} words, {one.bytes} bytes"
            )
        if self.results.choices:
            notes.append(
                "choices: acc by the sum of logprobs, acc_norm by that per character, acc_bytes per byte"
            )
        for one in self.results.choices:
            cut = f", {one.shortened} with a shortened context" if one.shortened else ""
            notes.append(f"  {one.format} {one.name}: {one.count} questions{cut}")
        for one in self.results.last_word:
            notes.append(f"  {one.name}: {one.count} passages")
        seconds = (
            self.results.seconds + (self.original.seconds if self.original else 0) + self.agreement_seconds
        )
        notes.append(
            f"weights {self.results.parameters_dtype}, K/V {self.results.kv_cache_dtype}; {seconds:.1f} s; "
            "± is one standard error"
        )
        return notes


class _Row(NamedTuple):
    task: str
    metric: str
    mine: Estimate
    other: Estimate | None

    @property
    def difference(self) -> Estimate | None:
        return None if self.other is None else self.mine.minus(self.other)


def _figures(results: ModelResults) -> dict[tuple[str, str], Estimate]:
    found: dict[tuple[str, str], Estimate] = {}
    for text in results.perplexity:
        for name in ("per_token", "per_word", "per_byte", "bits_per_byte"):
            metric = name if name == "bits_per_byte" else f"perplexity {name}"
            found[(f"perplexity {text.name}", metric)] = getattr(text, name)
    for task in results.last_word:
        for name in ("acc", "perplexity"):
            found[(f"last word {task.name}", name)] = getattr(task, name)
    for task in results.choices:
        for name in ("acc", "acc_norm", "acc_bytes"):
            found[(f"{task.format} {task.name}", name)] = getattr(task, name)
    return found


def _agreement_lines(one: Agreement, original: str) -> list[str]:
    rows = [("share of equal next tokens", one.same_next)]
    if one.kl is not None:
        rows.append(("KL(original || model), nats a token", one.kl))
    rows.append((f"  by the engine's top {one.top_logprobs}, at least", one.kl_bound))
    if one.same_prefix is not None and one.same_throughout is not None:
        rows.append((f"equal greedy tokens, of {one.greedy_tokens}", one.same_prefix))
        rows.append((f"share of {one.greedy_tokens} that are all equal", one.same_throughout))
    heading = (
        f"against {original} over {one.name}: {one.counted} tokens, {one.windows} windows, "
        f"{_windows(one.windowing)}"
    )
    return [heading, *_aligned([("  " + name, _cell(value)) for name, value in rows])]


def _windows(windowing: Any) -> str:
    return f"windows of {windowing.window} tokens, stride {windowing.stride}, bos {windowing.bos}"


def _cell(estimate: Estimate | None, *, signed: bool = False) -> str:
    if estimate is None:
        return ""
    value = f"{estimate.value:+.4f}" if signed else f"{estimate.value:.4f}"
    return value if estimate.stderr is None else f"{value} ± {estimate.stderr:.4f}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _plain(value: Any) -> Any:
    """A result as JSON has it; what is not finite is null."""
    if isinstance(value, Estimate):
        return {"value": _plain(value.value), "stderr": value.stderr}  # finite, or None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
