"""Makes what a recipe asks for and is not there yet: models, then figures, then the report.

OUTPUT/results.json, report.md, *.png    the report
OUTPUT/cells/NAME.json                   finished cells: what makes a comparison go on where it stopped
OUTPUT/source/NAME.json                  what the report says of a source that was trained here
OUTPUT/.lock                             held by the comparison that is writing here
OUTPUT/work/models, OUTPUT/work/texts    models by content, parts of texts; may be removed
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError, JaxInferError
from jaxinfer.heads import HeadChange
from jaxinfer.lab.checkpoint import LOCK, held
from jaxinfer.lab.compare import cells as grid
from jaxinfer.lab.compare import figures, plots, report, source
from jaxinfer.lab.compare.cells import Cell, CellFolder, Model, Texts, identity, model_config
from jaxinfer.lab.compare.recipe import Pretraining, Recipe
from jaxinfer.lab.evaluate import Text
from jaxinfer.lab.uptrain import uptrain

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    print(f"jaxinfer: {line}", file=sys.stderr, flush=True)


def compare(
    recipe: Recipe,
    output: Path,
    *,
    files: Path,
    draw: bool = True,
    discard_models: bool = False,
    report_only: bool = False,
    say: Say = say_on_stderr,
) -> dict[str, Any]:
    """Run the cells of `recipe` that `output` does not have, write the report, and return results.json's
    value. `files`: the folder to which the recipe's texts are relative. `draw`: plots, too. `report_only`:
    run nothing, and report on what is there, be it of a comparison that is running.

    A cell that fails is kept with its error, does not stop the others, and is run again the next time.
    Raises OSError, ConfigError, RequestError or CheckpointError for texts, a source or an output folder that
    cannot be used at all, for a folder to which another comparison is writing, and for plots without
    matplotlib.
    """
    if draw:
        plots.check()
    output.mkdir(parents=True, exist_ok=True)
    refusal = f"another comparison is writing to {output}; wait for its end, or take another folder"
    with contextlib.nullcontext() if report_only else held(output / LOCK, refusal):
        comparison = _Comparison(recipe, output.absolute(), files, say)
        comparison.prepare()
        rows = comparison.rows() if report_only else comparison.run(discard_models)
        value = report.results(recipe, rows, comparison.source_figures())
        report.write(value, output)
        if draw:
            plots.draw(value, output)
    return value


class _Comparison:
    def __init__(self, recipe: Recipe, output: Path, files: Path, say: Say):
        self.recipe, self.output, self.say = recipe, output, say
        self.folder, self.sources = CellFolder(output / "cells"), CellFolder(output / "source")
        self.texts = Texts(files, output / "work" / "texts")
        self.models = output / "work" / "models"
        self._failed: dict[str, str] = {}
        self._source: Path | None = None
        self.source_name = ""
        self.cells: list[Cell] = []

    def prepare(self) -> None:
        """Look at everything that the recipe names, before anything takes long."""
        wanted = self.recipe.source
        if isinstance(wanted, Pretraining):
            self.source_name = identity(
                {
                    "config": wanted.config, "vocabulary": wanted.vocabulary, "settings": wanted.settings,
                    "data": [self.texts.digest(part) for part in wanted.data],
                }
            )  # fmt: skip
        else:
            self._source = checkpoints.resolve(wanted)
            checkpoints.open_checkpoint(self._source)
            self.source_name = _digest_of(self._source)
        self.cells = grid.cells(self.recipe, self.source_name, self.texts)

    @property
    def _source_path(self) -> Path:
        """Of a source that is trained here."""
        return self.models / f"source-{self.source_name}"

    def source(self) -> Path:
        """The original, which is trained here if it is to be and is not there yet."""
        if self._source is None:
            wanted = self.recipe.source
            assert isinstance(wanted, Pretraining)
            path = self._source_path
            if not source.is_made(path):
                self.say(f"training the source {path.name} from random weights")
                source.pretrain(wanted, [self.texts.path(part) for part in wanted.data], path)
            self._source = path
        return self._source

    def source_figures(self) -> dict[str, Any]:
        """What the report says of the original. Of one that was trained here it is kept, for when the model
        is there no longer."""
        wanted = self.recipe.source
        if not isinstance(wanted, Pretraining):
            shape = figures.shape_of(self.source())
            return {"name": self.source_name, "shape": shape, "model": wanted, "training": None}
        kept = self.sources.read(self._source_cell)
        if kept is None:
            path = self.source()
            kept = {"shape": figures.shape_of(path), "model": "trained here", "training": _training(path)}
            self.sources.write(self._source_cell, kept)
        return {"name": self.source_name, **kept}

    @property
    def _source_cell(self) -> Cell:
        return Cell("source", Model(), grid.FULL, {"kind": "source", "source": self.source_name})

    def rows(self) -> list[dict[str, Any]]:
        """What there is of all cells, in order. Raises ConfigError where not even the source is there."""
        if isinstance(self.recipe.source, Pretraining) and not (
            self.sources.read(self._source_cell) or source.is_whole(self._source_path)
        ):
            raise ConfigError(f"nothing to report: {self.output} has no source, and no cell, of this recipe")
        return [_row(cell, self.folder.read(cell)) for cell in self.cells]

    def run(self, discard_models: bool) -> list[dict[str, Any]]:
        """The rows of all cells, in order, after those that are not there were run."""
        found = {cell.name: self.folder.read(cell) for cell in self.cells}
        todo = [cell for cell in self.cells if (found[cell.name] or {}).get("status") != "done"]
        self.say(f"compare {self.recipe.name}: {len(self.cells)} cells, {len(todo)} to run")
        if todo:
            self.source()
            self.source_figures()  # kept from now on
        for number, cell in enumerate(todo, 1):
            began = time.perf_counter()
            self.say(f"cell {number}/{len(todo)}: {cell}")
            record = self._record(cell)
            record["seconds"] = round(time.perf_counter() - began, 2)
            self.folder.write(cell, record)
            found[cell.name] = record
            shown = record["error"] if record["status"] == "failed" else report.in_short(record)
            self.say(f"cell {number}/{len(todo)}: {record['status']} in {record['seconds']:.1f} s, {shown}")
            gc.collect()
            if discard_models:
                self._discard(todo[number:])
        return [_row(cell, found[cell.name]) for cell in self.cells]

    def _record(self, cell: Cell) -> dict[str, Any]:
        base = {"versions": report.versions(), "revision": report.revision(), "error": None, "figures": None}
        try:
            found = self._figures(cell)
            json.dumps(found, allow_nan=False)  # what cannot be kept is this cell's fault, and no other's
            return {**base, "status": "done", "figures": found}
        except Exception as error:  # whatever it is: the other cells can still be run
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return {**base, "status": "failed", "error": text.replace(str(self.output), ".")[:500]}

    # ------------------------------------------------------------------------------------- one cell

    def _figures(self, cell: Cell) -> dict[str, Any]:
        recipe = self.recipe
        if cell.kind == "similarity":
            text = recipe.calibration.text
            path = None if text is None else self.texts.text_path(text)
            return figures.similarity(self.source(), path, recipe.calibration.tokens)
        model = self._made(cell.model)
        if cell.kind == "speed":
            assert recipe.speed is not None
            known = self._timed(figures.shape_of(model), cell.span)
            return known or figures.speed(model, cell.span, recipe.speed, recipe.engine)
        evaluation = recipe.evaluation
        texts = [Text(name=grid.label(part), content=self.texts.text(part)) for part in evaluation.perplexity]
        questions = [self.texts.files / file for file in evaluation.multiple_choice]
        original = None if cell.model.role == "original" and cell.span == grid.FULL else self.source()
        found = figures.quality(model, original, cell.span, evaluation, texts, questions, recipe.engine)
        found["conversion"] = _read(self._heads_file(cell.model)) if cell.model.variant else None
        found["training"] = _training(model) if cell.model.tokens else None
        return found

    def _timed(self, shape: dict[str, Any], span: str) -> dict[str, Any] | None:
        """The times of a model of this shape, if they were taken for another method's."""
        for cell in self.cells:
            if cell.kind == "speed" and cell.span == span:
                record = self.folder.read(cell)
                if record is not None and record["status"] == "done" and record["figures"]["shape"] == shape:
                    return record["figures"]
        return None

    def _path(self, model: Model) -> Path:
        config = model_config(self.recipe, model, self.source_name, self.texts)
        return self.models / identity(config)

    def _converted(self, model: Model) -> Model:
        """What a model is before it is uptrained."""
        if model.method is None:
            return Model()
        return Model(model.variant, model.method, 0, model.seed if model.method.method == "random" else None)

    def _heads_file(self, model: Model) -> Path:
        path = self._path(self._converted(model))
        return path.with_name(path.name + ".heads.json")

    def _made(self, model: Model) -> Path:
        """The model's folder, made if it is not there. Raises JaxInferError at once for one that failed."""
        if model.role == "original":
            return self.source()
        path = self._path(model)
        if path.name in self._failed:
            raise JaxInferError(self._failed[path.name])
        if source.is_made(path):
            return path
        try:
            if model.tokens:
                self._uptrain(self._made(self._converted(model)), model, path)
            else:
                self._convert(model, path)
        except Exception as error:
            self._failed[path.name] = f"{model} could not be made: {error}"
            raise
        return path

    def _convert(self, model: Model, path: Path) -> None:
        assert model.variant is not None
        assert model.method is not None
        text = self.recipe.calibration.text
        calibration = None if text is None else self.texts.text_path(text)
        plan = self.recipe.head_plan(model.variant, model.method, model.seed or 0, calibration)
        sharing = self.recipe.share_plan(model.variant, model.method)

        def keep(change: HeadChange) -> None:  # before the model is there: who finds that has this, too
            self.models.mkdir(parents=True, exist_ok=True)
            self._heads_file(model).write_text(json.dumps(_errors(change)) + "\n", encoding="utf-8")

        convert(
            self.source(), path, to="safetensors", dtype="float32", heads=plan, on_heads=keep,
            sharing=sharing, progress=False,
        )  # fmt: skip

    def _uptrain(self, before: Path, model: Model, path: Path) -> None:
        wanted = self.recipe.uptraining
        assert wanted is not None
        assert model.seed is not None
        settings = wanted.for_run(
            model.tokens, model.seed, str(self.source()) if wanted.distill else None, model.span,
            self.recipe.page_size,
        )  # fmt: skip
        data = [self.texts.path(part) for part in wanted.data]
        resume = source.broken_off(path)
        try:
            uptrain(before, path, data, settings, resume=resume)
        except ConfigError:
            if not resume:
                raise
            shutil.rmtree(path.with_name(path.name + ".training"))  # of another version: from the beginning
            uptrain(before, path, data, settings)

    def _discard(self, todo: list[Cell]) -> None:
        """Remove the uptrained models that no cell of `todo` needs."""
        kept = {self._path(cell.model).name for cell in todo if cell.kind != "similarity"}
        for cell in self.cells:
            path = self._path(cell.model) if cell.model.tokens else None
            if path is not None and path.name not in kept and path.exists():
                shutil.rmtree(path)


# ------------------------------------------------------------------------------------------------ records


MISSING = {
    "status": "missing", "error": None, "figures": None, "versions": {}, "revision": None, "seconds": 0.0,
}  # fmt: skip


def _row(cell: Cell, record: dict[str, Any] | None) -> dict[str, Any]:
    """A cell as results.json has it."""
    model = cell.model
    described = {
        "id": cell.name, "kind": cell.kind, "role": model.role,
        "variant": model.variant and model.variant.name, "method": model.method and model.method.name,
        "tokens": model.tokens, "seed": model.seed, "span": cell.span, "trained_span": model.span,
        "config": cell.config,
    }  # fmt: skip
    return {**described, **(MISSING if record is None else record)}


def _errors(change: HeadChange) -> dict[str, float | None]:
    """Means over layers of what merging lost, as `jaxinfer convert` prints them."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return {
        name: mean([getattr(layer, name) for layer in change.layers])
        for name in ("key_error", "value_error", "attention_error")
    }


def _training(model: Path) -> dict[str, Any] | None:
    """Of a model that was trained here: its report, without paths."""
    found = _read(model.with_name(model.name + ".training") / "report.json")
    names = (
        "train",
        "trained_parameters",
        "steps",
        "tokens",
        "first_loss",
        "last_loss",
        "tokens_per_s",
        "seconds",
    )
    return None if found is None else {name: found[name] for name in names}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _digest_of(path: Path) -> str:
    """Of a model on disk: what is in its files, whatever they are called above it."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            part = hashlib.file_digest(opened, "sha256").hexdigest()
        found.update(f"{file.relative_to(path) if file != path else ''}:{part}\n".encode())
    return found.hexdigest()[: grid.LETTERS]
