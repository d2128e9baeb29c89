"""A grid of converted and uptrained models, measured alike, as one report.

    compare(read_recipe("recipe.toml"), Path("report"), files=Path("texts"))

`recipe` reads what is wanted (`table` holds it to types), `cells` says of what the grid consists, `run` makes
what is not there yet, `figures` measures, `report` and `plots` show; `derive` has what is computed from the
figures.
"""

from jaxinfer.lab.compare.recipe import Recipe, parse_recipe, read_recipe
from jaxinfer.lab.compare.run import compare

__all__ = ["Recipe", "compare", "parse_recipe", "read_recipe"]
