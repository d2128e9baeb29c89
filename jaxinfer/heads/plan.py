"""What is asked of a conversion of heads. `jaxinfer.heads.decide` says what comes of it for one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jaxinfer.core import ConfigError
from jaxinfer.heads.groups import Members

Method = Literal["mean", "first", "random", "norm-weighted", "similarity", "align", "svd", "repeat"]
Grouping = Literal["neighbours", "alike"]
Measure = Literal["weights", "text"]
ON_TEXT = ("similarity", "align", "svd")
"""Methods that compare heads by what they do on the calibration text, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """Which KV heads a model shall have, and how they are made from its own.

    One of these says how many:
      `kv_heads`: K of all layers, or a K for each layer.
      `kv_budget`: a share of all KV heads, above 0 and up to 1; each layer gets the count with which all
          layers together lose least (`jaxinfer.heads.budget`).
      `groups`: for each layer, the old KV heads of each new one; of one entry, for every layer.

    `method`: how a group becomes one head. "mean" (2305.13245), "first" and "random" (one head of each group
    is kept, the first or one drawn with `seed`), "norm-weighted" (2408.08454), "similarity" (the mean of
    heads that are most alike), "align" (2412.20677), "svd" (2406.07056), see `jaxinfer.heads.merge`; "repeat"
    copies heads, to more of them, which changes no answer.
    `grouping`: "neighbours" takes runs of heads; "alike" those that lose least together (for align and svd:
    after turning). None is "alike" for similarity and "neighbours" otherwise.
    `unequal_groups`: groups of one layer may differ in size, and `kv_heads` need not divide the model's.
    Query heads of zeros then pad them (`jaxinfer.heads.groups`).
    `measure`: heads are compared by their "weights" alone, or by what they do on a "text". None is "text"
    for similarity, align, svd, a budget, and where a calibration is stated.
    `calibration`: a text file in UTF-8; None is a text of this project's own. Up to `calibration_tokens` of
    it (None: 2048) are run.

    Raises ConfigError, by name, for what contradicts or means nothing.
    """

    kv_heads: int | tuple[int, ...] | None = None
    kv_budget: float | None = None
    groups: tuple[Members, ...] | None = None
    method: Method = "mean"
    grouping: Grouping | None = None
    unequal_groups: bool = False
    measure: Measure | None = None
    calibration: Path | None = None
    calibration_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("method", Method), ("grouping", Grouping), ("measure", Measure)):
            got = getattr(self, name)
            if got not in get_args(allowed) and not (got is None and name != "method"):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(allowed))}, got {got!r}")
        stated = [name for name in ("kv_heads", "kv_budget", "groups") if getattr(self, name) is not None]
        if len(stated) != 1:
            raise ConfigError(
                f"one of kv_heads, kv_budget and groups says how many KV heads there shall be; got "
                f"{' and '.join(stated) or 'none'}"
            )
        for count in self.kv_heads if isinstance(self.kv_heads, tuple) else (self.kv_heads,):
            if count is not None and not _is_count(count):
                raise ConfigError(f"kv_heads must be 1 or more, got {count!r}")
        if self.kv_budget is not None and not 0 < self.kv_budget <= 1:
            raise ConfigError(f"kv_budget must be above 0 and at most 1, got {self.kv_budget!r}")
        if self.groups is not None:
            _check_groups(self.groups)
        self._check_choices()

    def _check_choices(self) -> None:
        def refuse(name: str, reason: str) -> None:
            raise ConfigError(f"{name} {getattr(self, name)!r} {reason}")

        if self.groups is not None and (self.grouping is not None or self.unequal_groups):
            raise ConfigError("groups are stated: grouping and unequal_groups have nothing to choose")
        if self.method == "repeat":
            for name in ("kv_budget", "groups", "grouping", "measure"):
                if getattr(self, name) is not None:
                    refuse(name, "means nothing to method 'repeat', which copies heads as they are")
        if self.method == "similarity" and (self.grouping == "neighbours" or self.groups is not None):
            raise ConfigError(
                "method 'similarity' chooses the groups itself; with groups of your own take 'mean'"
            )
        if self.kv_budget is not None and self.measure == "weights":
            refuse("measure", "cannot spread a kv_budget: what a layer loses is measured on a text")
        if self.seed is not None and self.method != "random":
            refuse("seed", f"is of method 'random' alone, and the method is {self.method!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < 2**63):
            refuse("seed", "must be an integer from 0 to 2^63 - 1")
        for name in ("calibration", "calibration_tokens"):
            if getattr(self, name) is not None and (self.measure == "weights" or self.method == "repeat"):
                refuse(name, "would not be read: heads are not compared on a text")
        if self.calibration_tokens is not None and not _is_count(self.calibration_tokens, 2):
            refuse("calibration_tokens", "must be 2 or more")

    @property
    def alike(self) -> bool:
        """Whether groups are chosen by likeness."""
        return self.grouping == "alike" or self.method == "similarity"

    @property
    def on_text(self) -> bool:
        """Whether heads are compared on a text."""
        if self.measure is not None:
            return self.measure == "text"
        stated = (self.kv_budget, self.calibration, self.calibration_tokens)
        return self.method in ON_TEXT or any(value is not None for value in stated)


def stated_groups(value: Any) -> tuple[Members, ...]:
    """`HeadPlan.groups` from lists, as JSON and TOML have them: [[0, 1], [2, 3]] for every layer, or a list
    of such lists, one for each. Raises ConfigError for what is neither."""
    layers = value
    if _nested(value, 1) and all(_is_count(head, 0) for heads in value for head in heads):
        layers = [value]
    if not _nested(layers, 2):
        text = repr(value)
        raise ConfigError(
            "groups must be lists of old heads such as [[0, 1], [2, 3]], for every layer or for each; got "
            + (text if len(text) <= 80 else text[:77] + "...")
        )
    return tuple(tuple(tuple(heads) for heads in layer) for layer in layers)


def _check_groups(layers: Any) -> None:
    """Raises ConfigError for what is not of the type of `HeadPlan.groups`; the heads of a model are not known
    here."""
    if not _nested(layers, 2, tuple):
        raise ConfigError(
            "groups must be tuples of old heads for each layer, or once for all, such as "
            f"(((0, 1), (2, 3)),); got {layers!r}"
        )
    for head in (head for layer in layers for heads in layer for head in heads):
        if not _is_count(head, 0):
            raise ConfigError(f"groups must hold heads, numbers from 0 on; got {head!r}")


def _nested(value: Any, depth: int, kind: type = list) -> bool:
    """Whether this is a list, of lists, ..., `depth` times; only the innermost may be empty."""
    if not isinstance(value, kind) or (depth and not value):
        return False
    return depth == 0 or all(_nested(each, depth - 1, kind) for each in value)


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
