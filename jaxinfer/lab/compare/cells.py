"""The cells of a comparison: what each consists of, its name by content, and its file.

A cell's name is a hash of all that its figures depend on: the source's bytes, how heads are made, texts and
settings of the uptraining, seed, span, what is measured and how. So a cell that is there need not be run
again, whatever else of the recipe has changed; names of variants and paths are not in it. The revision of
this program is not either: it is kept beside the figures.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.core import RequestError
from jaxinfer.lab.compare.figures import step_tokens
from jaxinfer.lab.compare.recipe import FULL, Method, Recipe, TextPart, Variant
from jaxinfer.text.files import has_lines, lines_in, one_text, read_content, texts_in

logger = logging.getLogger(__name__)

Kind = Literal["quality", "speed", "similarity", "source"]
LETTERS = 16
"""Hexadecimal digits of a name: among a million cells, two of one name have odds of one in ten million."""


@dataclass(frozen=True, slots=True)
class Model:
    """The source (no variant), or what a method makes of it; learnt from `tokens` tokens in the order of
    `seed` (None where nothing is drawn), its queries seeing what `span` says."""

    variant: Variant | None = None
    method: Method | None = None
    tokens: int = 0
    seed: int | None = None
    span: str = FULL

    @property
    def role(self) -> str:
        """original; control: the original, trained as the variants are; converted; uptrained."""
        if self.variant is None:
            return "control" if self.tokens else "original"
        return "uptrained" if self.tokens else "converted"

    def __str__(self) -> str:
        words = [
            self.role if self.variant is None else f"{self.variant.name} {self.method and self.method.name}"
        ]
        words += [f"{self.tokens} tokens"] if self.tokens else []
        words += [f"under {self.span}"] if self.span != FULL else []
        return " ".join([*words, *([] if self.seed is None else [f"seed {self.seed}"])])


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. `config` is what its name is a hash of."""

    kind: Kind
    model: Model
    span: str
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return identity(self.config)

    def __str__(self) -> str:
        if self.kind == "similarity":
            return "similarity of the original's heads"
        return f"{self.kind} of {self.model}, span {self.span}"


def identity(value: Any) -> str:
    """The name of a JSON value by its content: equal for equal values, in whatever order their keys are."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]


# ---------------------------------------------------------------------------------------------- the grid


def models(recipe: Recipe) -> Iterator[Model]:
    """Every model of the grid once, those of a variant and method one after the other: what is trained comes
    after what it is made from. Seeds make a difference where tokens are learnt from, or heads are drawn."""
    yield Model()
    trained = [tokens for tokens in recipe.tokens if tokens]
    if recipe.control:
        for tokens in trained:
            for seed in recipe.seeds:
                for span in recipe.trained_spans():
                    yield Model(tokens=tokens, seed=seed, span=span)
    for variant, method in recipe.pairs():
        drawn = method.method == "random"
        for seed in recipe.seeds if drawn else (None,):
            yield Model(variant, method, 0, seed)
        for tokens in trained:
            for seed in recipe.seeds:
                for span in recipe.trained_spans():
                    yield Model(variant, method, tokens, seed, span)


def measured_spans(recipe: Recipe, model: Model) -> Iterator[str]:
    """Under which spans a model is measured: one that was trained under a span under that one alone."""
    for span in recipe.spans:
        own, full = span == model.span, model.span == FULL
        if (
            not model.tokens
            or (own and "own" in recipe.trained_under)
            or (full and FULL in recipe.trained_under)
        ):
            yield span


def shapes(recipe: Recipe) -> Iterator[Model]:
    """A model of each shape, to take the time of: the original, and the first method's of each variant. Where
    the method decides how many heads a layer gets, or how many query heads pad unequal groups, each method's
    own: several may come to one shape, whose time is taken once."""
    yield Model()
    for variant in recipe.variants:
        decided = variant.kv_budget is not None or variant.unequal_groups
        methods = recipe.methods_of(variant)
        for method in methods if decided else methods[:1]:
            seeds = recipe.seeds if decided else recipe.seeds[:1]
            for seed in seeds if method.method == "random" else (None,):
                yield Model(variant, method, 0, seed)


def model_config(recipe: Recipe, model: Model, source: str, texts: Texts) -> dict[str, Any]:
    """What the model's weights depend on."""
    heads = learnt = plan = sharing = None
    if model.variant is not None and model.method is not None:
        plan = recipe.head_plan(model.variant, model.method, model.seed or 0, None)
        sharing = recipe.share_plan(model.variant, model.method)
    if plan is not None:
        counts = list(plan.kv_heads) if isinstance(plan.kv_heads, tuple) else plan.kv_heads
        heads = {
            "kv_heads": counts, "kv_budget": plan.kv_budget, "unequal_groups": plan.unequal_groups,
            "method": plan.method, "grouping": plan.grouping, "measure": plan.measure, "seed": plan.seed,
            "calibration": calibration_config(recipe, texts) if plan.on_text else None,
        }  # fmt: skip
        if plan.groups is not None:  # others keep the names that they had before there were groups
            heads["groups"] = plan.groups
    if model.tokens:
        assert recipe.uptraining is not None, "the recipe was checked to have it"
        wanted = recipe.uptraining
        learnt = {
            "data": [texts.digest(part) for part in wanted.data], "distill": wanted.distill,
            "settings": wanted.settings, "tokens": model.tokens, "seed": model.seed,
        }  # fmt: skip
        if model.span != FULL:  # others keep the names that they had before models learnt under spans
            learnt |= {"attention_span": model.span, "page_size": recipe.page_size}
    found = {"source": source, "heads": heads, "uptraining": learnt}
    if sharing is not None:  # others keep the names that they had before layers shared K/V
        found["sharing"] = {"share": sharing.share, "groups": sharing.groups, "method": sharing.method}
    return found


def calibration_config(recipe: Recipe, texts: Texts) -> dict[str, Any]:
    text = recipe.calibration.text
    return {"text": None if text is None else texts.digest(text), "tokens": recipe.calibration.tokens}


def cells(recipe: Recipe, source: str, texts: Texts) -> list[Cell]:
    """All cells of a recipe, in the order in which they are run. `source` names the original by content."""
    evaluation = recipe.evaluation
    measured = {
        "perplexity": [texts.digest(part) for part in evaluation.perplexity],
        "window": evaluation.windowing.window, "stride": evaluation.windowing.stride,
        "windows": evaluation.windowing.limit, "questions": evaluation.questions,
        "multiple_choice": [texts.digest_of_questions(file) for file in evaluation.multiple_choice],
        "agreement": evaluation.agreement,
    }  # fmt: skip

    def cell(kind: Kind, model: Model, span: str, **more: Any) -> Cell:
        config = {"kind": kind, "model": model_config(recipe, model, source, texts), "span": span, **more}
        return Cell(kind, model, span, config)

    similarity = calibration_config(recipe, texts)
    found = [Cell("similarity", Model(), FULL, {"kind": "similarity", "source": source, **similarity})]
    found += [
        cell("quality", model, span, evaluate=measured, engine=recipe.engine)
        for model in models(recipe)
        for span in measured_spans(recipe, model)
    ]
    if recipe.speed is not None:
        speed = {
            "device": recipe.speed.device, "contexts": list(recipe.speed.contexts),
            "batch": recipe.speed.batch, "output": recipe.speed.output,
            "measured_contexts": list(recipe.speed.measured_contexts),
            "measured_output": recipe.speed.measured_output, "repeats": recipe.speed.repeats,
            "step_tokens": step_tokens(recipe.speed, recipe.engine),
        }  # fmt: skip
        found += [
            cell("speed", model, span, speed=speed, engine=recipe.engine)
            for model in shapes(recipe)
            for span in recipe.spans
        ]
    return found


# --------------------------------------------------------------------------------------------- the texts


class Texts:
    """The texts of a recipe: their content's digests, and files that have just the part that is wanted."""

    def __init__(self, files: Path, kept: Path):
        self.files, self._kept = files, kept
        self._contents: dict[TextPart, str] = {}
        self._digests: dict[str, str] = {}

    def content(self, part: TextPart) -> str:
        """What a file has of the part: characters, or whole lines of a .jsonl file. Raises OSError, and
        RequestError for what is no UTF-8, no text, or nothing at all."""
        if part not in self._contents:
            path = self.files / part.file
            whole = read_content(path)
            texts_in(whole, path)  # a line that is no text is told by its number in the file
            units = lines_in(whole) if has_lines(path) else whole
            cut = "".join(units[round(part.start * len(units)) : round(part.end * len(units))])
            if not one_text(texts_in(cut, path)).strip():
                raise RequestError(f"{path}: no text from {part.start:g} to {part.end:g} of it", "file")
            self._contents[part] = cut
        return self._contents[part]

    def text(self, part: TextPart) -> str:
        """The part as one text, as `lab evaluate` reads a file."""
        return one_text(texts_in(self.content(part), self.files / part.file))

    def digest(self, part: TextPart) -> str:
        """Of the part and of how it is read."""
        kind = "texts" if has_lines(Path(part.file)) else False
        return hashlib.sha256(f"{kind}:{self.content(part)}".encode()).hexdigest()

    def path(self, part: TextPart) -> Path:
        """A file with the part alone, to learn from."""
        return self._file(self.digest(part)[:LETTERS] + Path(part.file).suffix, self.content(part))

    def text_path(self, part: TextPart) -> Path:
        """A file with the part as one text."""
        return self._file(self.digest(part)[:LETTERS] + ".txt", self.text(part))

    def _file(self, name: str, content: str) -> Path:
        path = self._kept / name
        if not path.exists():
            self._kept.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text(content, encoding="utf-8", newline="")
            partial.rename(path)
        return path

    def digest_of_questions(self, file: str) -> str:
        """Of a file of questions, with the labels that lie beside it."""
        if file not in self._digests:
            path = self.files / file
            labels = path.with_name(path.stem + "-labels.lst")
            whole = path.read_bytes() + (b"\0" + labels.read_bytes() if labels.exists() else b"")
            self._digests[file] = hashlib.sha256(whole).hexdigest()
        return self._digests[file]


def label(part: TextPart) -> str:
    """What a text is called in tables."""
    whole = part.start == 0 and part.end == 1
    return part.file if whole else f"{part.file} {part.start:g} to {part.end:g}"


# --------------------------------------------------------------------------------------------- the files


class CellFolder:
    """Finished cells, each a file NAME.json with the sha256 of its own content."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, cell: Cell, record: dict[str, Any]) -> None:
        """Keep what came of a cell; it is there complete, or as it was."""
        self.path.mkdir(parents=True, exist_ok=True)
        body = {"config": cell.config, **record}
        value = {"sha256": _digest(body), **body}
        partial = self.path / f".{cell.name}.partial"
        partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.rename(self.path / f"{cell.name}.json")

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What came of a cell; None where nothing did, or the file is torn, changed or of another cell."""
        path = self.path / f"{cell.name}.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            stated = value.pop("sha256", None)
            if stated == _digest(value) and value.get("config") == json.loads(json.dumps(cell.config)):
                return {key: each for key, each in value.items() if key != "config"}
        logger.warning("%s is damaged; the cell is run again", path.name)
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
