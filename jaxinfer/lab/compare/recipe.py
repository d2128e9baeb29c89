"""The recipe of a comparison: a TOML file, read strictly. docs/lab.md has one with every key explained.

    source x variants x methods x tokens of uptraining x seeds x attention spans = the grid

Every fault is a ConfigError that names the key. Texts are named relative to a folder that the caller states,
so that a recipe says nothing of the machine it was written on.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jaxinfer.config import EngineConfig, ModelConfig, attention_span, no_scoring
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, ShareMethod, SharePlan
from jaxinfer.lab.compare.table import Table, TextPart
from jaxinfer.lab.compare.variants import Method, Variant, read_method, read_variant, share_plan
from jaxinfer.lab.evaluate import Windowing
from jaxinfer.lab.settings import Settings
from jaxinfer.planner import device_sheet

FULL = "full"
"""The attention span of a model as it is."""

TRAINED_UNDER = (FULL, "own")
"""What models learn under: all of their attention, or the span that they are measured with."""

OF_THE_GRID = ("steps", "tokens", "seed", "distill", "eval_file", "devices", "attention_span", "page_size")
"""Settings of an uptraining that the grid, or the machine, says."""
ENGINE_KEYS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "page_size",
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What heads are compared on, by methods that compare on a text. None: the built-in text."""

    text: TextPart | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Pretraining:
    """A model that is trained here, from random weights: config.json's keys, a tokenizer of `vocabulary`
    tokens made from the texts, and the settings of `jaxinfer lab uptrain`."""

    config: dict[str, Any]
    vocabulary: int
    data: tuple[TextPart, ...]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Uptraining:
    data: tuple[TextPart, ...]
    distill: bool
    settings: dict[str, Any]

    def for_run(
        self, tokens: int, seed: int, distill: str | None, span: str = FULL, page_size: int | None = None
    ) -> Settings:
        """The settings of one run, `page_size` that of the span; raises ConfigError."""
        seen = {} if span == FULL else {"attention_span": span, "page_size": page_size}
        return Settings(tokens=tokens, seed=seed, distill=distill, **self.settings, **seen)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`questions`: how many of each file of multiple choice. `agreement`: KL and equal next tokens against
    the original, over the first text of `perplexity`."""

    perplexity: tuple[TextPart, ...]
    multiple_choice: tuple[str, ...] = ()
    questions: int | None = None
    windowing: Windowing = dataclasses.field(default_factory=Windowing)
    agreement: bool = False


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted for `device` at `batch` requests of each of `contexts` tokens and `output` new ones; measured
    here, one request at a time, at `measured_contexts` (none: nothing is measured)."""

    device: str
    contexts: tuple[int, ...]
    batch: int
    output: int
    measured_contexts: tuple[int, ...] = ()
    measured_output: int = 16
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    source: str | Pretraining
    variants: tuple[Variant, ...]
    methods: tuple[Method, ...]
    tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    spans: tuple[str, ...]
    trained_under: tuple[str, ...]
    control: bool
    calibration: Calibration
    uptraining: Uptraining | None
    evaluation: Evaluation
    speed: Speed | None
    engine: dict[str, Any]

    def trained_spans(self) -> tuple[str, ...]:
        """Under which spans models are trained, each once."""
        full = (FULL,) if FULL in self.trained_under else ()
        own = self.spans if "own" in self.trained_under else ()
        return tuple(dict.fromkeys((*full, *own)))

    @property
    def page_size(self) -> int:
        """Tokens of a page, which some spans count."""
        return EngineConfig(**self.engine).page_size

    def pairs(self) -> Iterator[tuple[Variant, Method]]:
        return ((variant, method) for variant in self.variants for method in self.methods_of(variant))

    def methods_of(self, variant: Variant) -> tuple[Method, ...]:
        """By which methods a variant is made."""
        return tuple(method for method in self.methods if variant.is_made_by(method))

    def share_plan(self, variant: Variant, method: Method) -> SharePlan | None:
        """Which layers share K/V; None: none does. Raises ConfigError."""
        if variant.share_kv is None:
            return None
        return share_plan(variant.share_kv, method.method)

    def head_plan(
        self, variant: Variant, method: Method, seed: int, calibration: Path | None
    ) -> HeadPlan | None:
        """What `jaxinfer.heads` is asked for of heads; None: they stay as they are. Raises ConfigError."""
        if not variant.has_heads:
            return None
        plan = HeadPlan(
            kv_heads=variant.kv_heads, kv_budget=variant.kv_budget, groups=variant.groups,
            unequal_groups=variant.unequal_groups,
            method=method.method, grouping=method.grouping, measure=method.measure,  # type: ignore[arg-type]
            seed=seed if method.method == "random" else None,
        )  # fmt: skip
        if not plan.on_text:
            return plan
        return dataclasses.replace(plan, calibration=calibration, calibration_tokens=self.calibration.tokens)


def read_recipe(file: str | Path) -> Recipe:
    """Raises OSError, and ConfigError for what is no recipe."""
    path = Path(file)
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        return parse_recipe(value, name=path.parent.resolve().name if path.stem == "recipe" else path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_recipe(value: dict[str, Any], name: str = "comparison") -> Recipe:
    """A recipe from what its TOML says. `name` is its name where it does not say one."""
    table = Table(value, "")
    grid = table.table("grid")
    tokens = grid.ints("tokens", least=0, default=(0,))
    unread, reason = not any(tokens), "nothing is learnt: grid.tokens has no number above 0"
    _refuse_unread(grid, unread, reason, "control", "trained_under")
    _refuse_unread(table, unread, reason, "uptrain")
    recipe = Recipe(
        name=table.text("name", name),
        source=_source(table.table("source")),
        variants=tuple(read_variant(each) for each in table.tables("variant")),
        methods=tuple(read_method(each, place) for place, each in enumerate(grid.items("methods"))),
        tokens=tokens,
        seeds=grid.ints("seeds", least=0, default=(0,)),
        spans=tuple(grid.texts("spans", (FULL,))),
        trained_under=tuple(grid.texts("trained_under", (FULL,))),
        control=grid.flag("control", True),
        calibration=_calibration(table.table("calibration", optional=True)),
        uptraining=_uptraining(table.table("uptrain", optional=not any(tokens))),
        evaluation=_evaluation(table.table("evaluate")),
        speed=_speed(table.table("speed", optional=True)),
        engine=table.table("engine", optional=True).rest(),
    )
    grid.close()
    table.close()
    _check(recipe)
    return recipe


def _refuse_unread(table: Table, unread: bool, reason: str, *names: str) -> None:
    """Raises ConfigError for a key that is stated and that nothing reads."""
    for name in names:
        if unread and name in table.value:
            raise ConfigError(f"{table.key(name)} would not be read: {reason}")


def _source(table: Table) -> str | Pretraining:
    if "model" in table.value:
        model = table.text("model")
        table.close()
        return model
    data = table.parts("data")
    config = table.table("config").rest()
    vocabulary = table.integer("vocabulary", least=257)
    settings = table.table("train").rest()
    table.close()
    if "tokens" not in settings:
        raise ConfigError("source.train.tokens is missing: how many tokens the model learns from")
    for key in ("distill", "eval_file", "devices", "steps", "train"):
        if key in settings:
            raise ConfigError(f"source.train.{key} has no place here")
    length = _settings(settings, "source.train").sequence_length
    try:
        longest = ModelConfig.from_hf({**config, "vocab_size": vocabulary}).longest_position
    except (ConfigError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        # from_hf reads what has been published; a value of another type fails wherever it is used
        raise ConfigError(f"source.config: {error}; values are those of a config.json") from None
    if length > longest:
        raise ConfigError(
            f"source.train: sequence_length {length} is more than the model's own limit of {longest}"
        )
    return Pretraining(config, vocabulary, data, settings)


def _calibration(table: Table) -> Calibration:
    tokens = table.integer("tokens", None, least=2)
    text = table.parts("text", single=True)[0] if "text" in table.value else None
    table.close()
    return Calibration(text, tokens)


def _uptraining(table: Table) -> Uptraining | None:
    if not table.value:
        return None
    data, distill = table.parts("data"), table.flag("distill", False)
    settings = table.rest()
    for key in OF_THE_GRID:
        if key in settings:
            raise ConfigError(f"uptrain.{key} is not said here: it is of the grid, or of the machine")
    _settings(
        {**settings, "tokens": 1, "distill": "original" if distill else None, "warmup": None}, "uptrain"
    )
    return Uptraining(data, distill, settings)


def _settings(values: dict[str, Any], where: str) -> Settings:
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := [key for key in values if key not in known]:
        raise ConfigError(f"{where}.{unknown[0]} is not known; there are {', '.join(sorted(known))}")
    try:
        return Settings(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _evaluation(table: Table) -> Evaluation:
    window = table.integer("window", 256, least=2)
    assert window is not None
    stride, limit = table.integer("stride", window, least=1), table.integer("windows", None, least=1)
    choices, questions = tuple(table.texts("multiple_choice", ())), table.integer("questions", None, least=1)
    _refuse_unread(table, not choices, "evaluate.multiple_choice names no file", "questions")
    try:
        windowing = Windowing(window=window, stride=stride, limit=limit)
    except ConfigError as error:
        raise ConfigError(f"evaluate: {error}") from None
    result = Evaluation(
        perplexity=table.parts("perplexity"), multiple_choice=choices,
        questions=questions, windowing=windowing, agreement=table.flag("agreement", False),
    )  # fmt: skip
    table.close()
    return result


def _speed(table: Table) -> Speed | None:
    if not table.value:
        return None
    result = Speed(
        device=table.text("device", "h200"),
        contexts=table.ints("contexts", least=1),
        batch=table.integer("batch", 8, least=1),
        output=table.integer("output", 256, least=2),
        measured_contexts=table.ints("measured_contexts", least=1, default=()),
        measured_output=table.integer("measured_output", 16, least=2),
        repeats=table.integer("repeats", 3, least=1),
    )
    table.close()
    if not result.contexts:
        raise ConfigError("speed.contexts is empty: there is no length to predict the times of")
    for name in ("contexts", "measured_contexts"):
        lengths = getattr(result, name)
        if any(a >= b for a, b in itertools.pairwise(lengths)):
            raise ConfigError(
                f"speed.{name} must rise, each once: the last is the longest; got {list(lengths)}"
            )
    unread = "nothing is measured: speed.measured_contexts is empty"
    _refuse_unread(table, not result.measured_contexts, unread, "measured_output", "repeats")
    try:
        device_sheet(result.device)
    except ConfigError as error:
        raise ConfigError(f"speed.device: {error}") from None
    return result


def _check(recipe: Recipe) -> None:
    """What several tables say together."""
    for kind, names in (
        ("variant.name", [each.name for each in recipe.variants]),
        ("grid.methods", [each.name for each in recipe.methods]),
        ("grid.tokens", recipe.tokens), ("grid.seeds", recipe.seeds), ("grid.spans", recipe.spans),
        ("grid.trained_under", recipe.trained_under),
    ):  # fmt: skip
        repeated = [name for name in names if list(names).count(name) > 1]
        if not names or repeated:
            problem = f"has {repeated[0]!r} twice" if repeated else "is empty: there is nothing to compare"
            raise ConfigError(f"{kind} {problem}")
    _refuse_same("variant", {each.name: dataclasses.replace(each, name="") for each in recipe.variants})
    if len(recipe.seeds) > 1 and not any(recipe.tokens) and all(m.method != "random" for m in recipe.methods):
        raise ConfigError(
            f"grid.seeds {list(recipe.seeds)} would not be read: nothing is learnt, and no method draws heads"
        )
    for variant, method in recipe.pairs():
        try:
            recipe.head_plan(variant, method, 0, None)
            recipe.share_plan(variant, method)
        except ConfigError as error:
            raise ConfigError(f"variant {variant.name!r} with method {method.name!r}: {error}") from None
    for variant in recipe.variants:
        if not recipe.methods_of(variant):
            raise ConfigError(
                f"variant {variant.name!r}: share_kv is of methods {', '.join(get_args(ShareMethod))} "
                "(without grouping and measure, unless heads are made, too), of which grid.methods has none"
            )
    _refuse_same("grid.methods", {each.name: _meaning(recipe, each) for each in recipe.methods})
    if unknown := [key for key in recipe.engine if key not in ENGINE_KEYS]:
        raise ConfigError(f"engine.{unknown[0]} is not known; there are {', '.join(ENGINE_KEYS)}")
    try:
        page_size = EngineConfig(**recipe.engine).page_size
        seen = {span: attention_span(span, page_size) for span in recipe.spans if span != FULL}
        for span, meaning in seen.items():
            if reason := no_scoring(meaning, recipe.evaluation.windowing.window):
                raise ConfigError(f"{span!r}: {reason}")
    except ConfigError as error:
        raise ConfigError(f"engine, grid.spans: {error}") from None
    _refuse_same("grid.spans", seen)
    if unknown := [kind for kind in recipe.trained_under if kind not in TRAINED_UNDER]:
        raise ConfigError(f"grid.trained_under has {unknown[0]!r}; there are {', '.join(TRAINED_UNDER)}")
    if (wanted := recipe.uptraining) is not None:
        try:
            for span in recipe.trained_spans():
                distill = "original" if wanted.distill else None
                dataclasses.replace(wanted, settings={**wanted.settings, "warmup": None}).for_run(
                    1, 0, distill, span, page_size
                )
        except ConfigError as error:
            raise ConfigError(f"grid.trained_under 'own': {error}") from None
        _check_budgets(recipe, wanted)


def _meaning(recipe: Recipe, method: Method) -> list[tuple[Any, ...] | None]:
    """What a method makes of each variant; None of those that it does not make."""
    found: list[tuple[Any, ...] | None] = []
    for variant in recipe.variants:
        if not variant.is_made_by(method):
            found.append(None)
            continue
        plan = recipe.head_plan(variant, method, 0, None)
        found.append((method.method, None if plan is None else (plan.alike, plan.on_text)))
    if not any(found):
        raise ConfigError(f"grid.methods has {method.name!r}, by which no variant is made")
    return found


def _refuse_same(kind: str, meanings: dict[str, Any]) -> None:
    """Raises ConfigError for two names of one meaning: their cells would be the same."""
    for one, other in itertools.combinations(meanings, 2):
        if meanings[one] == meanings[other]:
            raise ConfigError(f"{kind} has {one!r} and {other!r}, which mean the same; leave one out")


def _check_budgets(recipe: Recipe, wanted: Uptraining) -> None:
    """The schedule of each number of tokens, and that no two of them come to the same steps."""
    found: dict[int, int] = {}
    for tokens in filter(None, recipe.tokens):
        try:
            made = wanted.for_run(tokens, 0, "original" if wanted.distill else None)
        except ConfigError as error:
            raise ConfigError(f"uptrain, of grid.tokens {tokens}: {error}") from None
        if made.num_steps in found:
            raise ConfigError(
                f"grid.tokens has {found[made.num_steps]} and {tokens}, which are both rounded up to "
                f"{made.num_steps} steps of {made.step_tokens} tokens; leave one out"
            )
        found[made.num_steps] = tokens
