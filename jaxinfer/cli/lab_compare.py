"""`jaxinfer lab compare`: a grid of converted and uptrained models, as one report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxinfer.cli.terminal import text_argument


@dataclass(frozen=True)
class Compare:
    """Convert, uptrain and measure every model of a recipe's grid, and report on all of them.

    The report (report.md, results.json, pictures) goes to a folder, its tables to stdout. What is there
    already is not run again: a comparison that was broken off, or whose recipe has grown, goes on. Status 1
    where a cell failed; the others are run all the same. docs/lab.md explains recipes and figures.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE.toml")]
    output: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Where the report, finished cells and models go; NAME-report, of the recipe's name, if left out."""
    files: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Where the recipe's texts and questions lie; beside the recipe, if left out."""
    discard_models: bool = False
    """Remove each uptrained model once it is measured: a grid may need hundreds of gigabytes."""
    report_only: bool = False
    """Run nothing; report on what is there."""
    plots: bool = True
    """Pictures, which need the extra [plots]."""
    json: bool = False
    """results.json on stdout, in place of the tables."""

    def run(self) -> int:
        from jaxinfer.lab.compare import compare, read_recipe, report

        path = Path(text_argument(self.recipe))
        recipe = read_recipe(path)
        value = compare(
            recipe,
            Path(text_argument(self.output or f"{recipe.name}-report")),
            files=path.parent if self.files is None else Path(text_argument(self.files)),
            draw=self.plots,
            discard_models=self.discard_models,
            report_only=self.report_only,
        )
        print(json.dumps(value, allow_nan=False) if self.json else report.page(value))
        return 1 if any(cell["status"] == "failed" for cell in value["cells"]) else 0
