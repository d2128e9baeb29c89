"""The recipe of a comparison: a TOML file, read strictly. docs/lab.md has one with every key explained.

    source x variants x methods x tokens of uptraining x seeds x attention spans = the grid

Every fault is a ConfigError that names the key. Texts are named relative to a folder that the caller states,
so that a recipe says nothing of the machine it was written on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig, ModelConfig, attention_span, no_scoring
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, stated_groups
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
class TextPart:
    """A file, and which part of its characters: shares from 0 to 1."""

    file: str
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class Variant:
    """How many KV heads there shall be, or of which old ones each is made."""

    name: str
    kv_heads: int | tuple[int, ...] | None = None
    kv_budget: float | None = None
    groups: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    unequal_groups: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """How they are made."""

    name: str
    method: str
    grouping: str | None = None
    measure: str | None = None


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
        return itertools.product(self.variants, self.methods)

    def head_plan(self, variant: Variant, method: Method, seed: int, calibration: Path | None) -> HeadPlan:
        """What `jaxinfer.heads` is asked for. Raises ConfigError."""
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
    table = _Table(value, "")
    grid = table.table("grid")
    tokens = grid.ints("tokens", least=0, default=(0,))
    recipe = Recipe(
        name=table.text("name", name),
        source=_source(table.table("source")),
        variants=tuple(_variant(each) for each in table.tables("variant")),
        methods=tuple(_method(each, place) for place, each in enumerate(grid.items("methods"))),
        tokens=tokens,
        seeds=grid.ints("seeds", least=0, default=(0,)),
        spans=tuple(grid.texts("spans", (FULL,))),
        trained_under=tuple(grid.texts("trained_under", (FULL,))),
        control=grid.flag("control", True),
        calibration=_calibration(table.table("calibration", optional=True)),
        uptraining=_uptraining(table.table("uptrain", optional=max(tokens) == 0)),
        evaluation=_evaluation(table.table("evaluate")),
        speed=_speed(table.table("speed", optional=True)),
        engine=table.table("engine", optional=True).rest(),
    )
    grid.close()
    table.close()
    _check(recipe)
    return recipe


def _source(table: _Table) -> str | Pretraining:
    if "model" in table.value:
        model = table.text("model")
        table.close()
        return model
    data = table.parts("data")
    config = table.table("config").rest()
    vocabulary = table.ints("vocabulary", least=257, single=True)[0]
    settings = table.table("train").rest()
    table.close()
    if "tokens" not in settings:
        raise ConfigError("source.train.tokens is missing: how many tokens the model learns from")
    for key in ("distill", "eval_file", "devices", "steps", "train"):
        if key in settings:
            raise ConfigError(f"source.train.{key} has no place here")
    _settings(settings, "source.train")
    try:
        ModelConfig.from_hf({**config, "vocab_size": vocabulary})
    except ConfigError as error:
        raise ConfigError(f"source.config: {error}") from None
    return Pretraining(config, vocabulary, data, settings)


def _variant(table: _Table) -> Variant:
    counts = table.take("kv_heads", None)
    if isinstance(counts, list):
        counts = tuple(counts)
    budget = table.take("kv_budget", None)
    lists = table.take("groups", None)
    default = "x".join(map(str, counts)) if isinstance(counts, tuple) else f"{counts}-heads"
    if budget is not None:
        default = f"budget-{budget:g}"
    name = table.text("name", default if lists is None else "groups")
    unequal = table.flag("unequal_groups", False)
    table.close()
    try:
        groups = None if lists is None else stated_groups(lists)
        HeadPlan(kv_heads=counts, kv_budget=budget, groups=groups, unequal_groups=unequal)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{table.name}: {error}") from None
    return Variant(name, counts, budget, groups, unequal)


def _method(value: Any, place: int) -> Method:
    if isinstance(value, str):
        return Method(value, value)
    if not isinstance(value, dict):
        raise ConfigError(f"grid.methods[{place}] must be a name or a table, got {value!r}")
    table = _Table(value, f"grid.methods[{place}]")
    method = table.text("method")
    grouping, measure = table.take("grouping", None), table.take("measure", None)
    name = table.text("name", "-".join([method, *filter(None, (grouping, measure))]))
    table.close()
    return Method(name, method, grouping, measure)


def _calibration(table: _Table) -> Calibration:
    tokens = table.ints("tokens", least=2, single=True)[0] if "tokens" in table.value else None
    text = table.parts("text", single=True)[0] if "text" in table.value else None
    table.close()
    return Calibration(text, tokens)


def _uptraining(table: _Table) -> Uptraining | None:
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


def _settings(values: dict[str, Any], where: str) -> None:
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := [key for key in values if key not in known]:
        raise ConfigError(f"{where}.{unknown[0]} is not known; there are {', '.join(sorted(known))}")
    try:
        Settings(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _evaluation(table: _Table) -> Evaluation:
    window = table.ints("window", least=2, default=(256,), single=True)[0]
    stride = table.ints("stride", least=1, default=(window,), single=True)[0]
    limit = table.ints("windows", least=1, single=True)[0] if "windows" in table.value else None
    questions = table.ints("questions", least=1, single=True)[0] if "questions" in table.value else None
    try:
        windowing = Windowing(window=window, stride=stride, limit=limit)
    except ConfigError as error:
        raise ConfigError(f"evaluate: {error}") from None
    result = Evaluation(
        perplexity=table.parts("perplexity"), multiple_choice=tuple(table.texts("multiple_choice", ())),
        questions=questions, windowing=windowing, agreement=table.flag("agreement", False),
    )  # fmt: skip
    table.close()
    return result


def _speed(table: _Table) -> Speed | None:
    if not table.value:
        return None
    result = Speed(
        device=table.text("device", "h200"),
        contexts=table.ints("contexts", least=1),
        batch=table.ints("batch", least=1, default=(8,), single=True)[0],
        output=table.ints("output", least=2, default=(256,), single=True)[0],
        measured_contexts=table.ints("measured_contexts", least=1, default=()),
        measured_output=table.ints("measured_output", least=2, default=(16,), single=True)[0],
        repeats=table.ints("repeats", least=1, default=(3,), single=True)[0],
    )
    table.close()
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
    for variant, method in recipe.pairs():
        try:
            recipe.head_plan(variant, method, 0, None)
        except ConfigError as error:
            raise ConfigError(f"variant {variant.name!r} with method {method.name!r}: {error}") from None
    if unknown := [key for key in recipe.engine if key not in ENGINE_KEYS]:
        raise ConfigError(f"engine.{unknown[0]} is not known; there are {', '.join(ENGINE_KEYS)}")
    try:
        page_size = EngineConfig(**recipe.engine).page_size
        for span in recipe.spans:
            window = recipe.evaluation.windowing.window
            if span != FULL and (reason := no_scoring(attention_span(span, page_size), window)):
                raise ConfigError(f"{span!r}: {reason}")
    except ConfigError as error:
        raise ConfigError(f"engine, grid.spans: {error}") from None
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


class _Table:
    """A table of the recipe whose keys are taken one by one; what is left over at the end is a fault."""

    def __init__(self, value: dict[str, Any], name: str):
        self.value, self.name, self._taken = value, name, set[str]()

    def key(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def take(self, name: str, *default: Any) -> Any:
        self._taken.add(name)
        if name in self.value:
            return self.value[name]
        if not default:
            raise ConfigError(f"{self.key(name)} is missing")
        return default[0]

    def text(self, name: str, *default: str) -> str:
        value = self.take(name, *default)
        if not isinstance(value, str) or not re.fullmatch(r"[^\x00-\x1f]+", value):
            raise ConfigError(f"{self.key(name)} must be a text of one line, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.key(name)} must be true or false, got {value!r}")
        return value

    def items(self, name: str, *default: Any) -> list[Any]:
        value = self.take(name, *default)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{self.key(name)} must be a list, got {value!r}")
        return list(value)

    def texts(self, name: str, *default: Any) -> list[str]:
        values = self.items(name, *default)
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise ConfigError(f"{self.key(name)} must be texts, got {wrong[0]!r}")
        return values

    def ints(self, name: str, *, least: int, default: Any = None, single: bool = False) -> tuple[int, ...]:
        value = self.take(name, *(() if default is None else (list(default),)))
        values = [value] if single and not isinstance(value, list) else value
        right = isinstance(values, list) and (not single or len(values) == 1)
        if not right or any(type(each) is not int or each < least for each in values):
            what = "an integer" if single else "a list of integers"
            raise ConfigError(f"{self.key(name)} must be {what} of {least} or more, got {value!r}")
        return tuple(values)

    def parts(self, name: str, single: bool = False) -> tuple[TextPart, ...]:
        """Texts: file names, or tables {file, start, end} of a part of one."""
        value = self.take(name)
        found = []
        for place, each in enumerate([value] if single else value if isinstance(value, list) else [value]):
            if isinstance(each, str):
                found.append(TextPart(each))
                continue
            if not isinstance(each, dict):
                raise ConfigError(f"{self.key(name)}: a text is a file name or a table, got {each!r}")
            table = _Table(each, f"{self.key(name)}[{place}]")
            ends = table.take("start", 0.0), table.take("end", 1.0)
            if not all(type(x) in (int, float) and math.isfinite(x) for x in ends) or not (
                0 <= ends[0] < ends[1] <= 1
            ):
                raise ConfigError(f"{table.name}: start and end go from 0 to 1, the first first; got {ends}")
            found.append(TextPart(table.text("file"), float(ends[0]), float(ends[1])))
            table.close()
        if not found:
            raise ConfigError(f"{self.key(name)} names no text")
        return tuple(found)

    def table(self, name: str, *, optional: bool = False) -> _Table:
        value = self.take(name, *([{}] if optional else []))
        if not isinstance(value, dict):
            raise ConfigError(f"{self.key(name)} must be a table, got {value!r}")
        return _Table(value, self.key(name))

    def tables(self, name: str) -> list[_Table]:
        values = self.items(name)
        if wrong := [value for value in values if not isinstance(value, dict)]:
            raise ConfigError(f"{self.key(name)} must be tables, [[{name}]]; got {wrong[0]!r}")
        return [_Table(value, f"{self.key(name)}[{place}]") for place, value in enumerate(values)]

    def rest(self) -> dict[str, Any]:
        """All keys that were not taken, which are then."""
        left = {key: value for key, value in self.value.items() if key not in self._taken}
        self._taken |= left.keys()
        return left

    def close(self) -> None:
        """Raises ConfigError for a key that nobody asked for."""
        for key in self.value:
            if key not in self._taken:
                raise ConfigError(f"{self.key(key)} is not known; there are {', '.join(sorted(self._taken))}")
