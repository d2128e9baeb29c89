"""What a comparison makes of its source: variants (how many KV heads, which layers share K/V) by methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, ShareMethod, SharePlan, stated_groups
from jaxinfer.heads.sharing import NO_BUDGET
from jaxinfer.lab.compare.table import Table


@dataclass(frozen=True, slots=True)
class Variant:
    """How many KV heads there shall be, or of which old ones each is made; which layers share K/V. Where both
    are stated, heads are made first."""

    name: str
    kv_heads: int | tuple[int, ...] | None = None
    kv_budget: float | None = None
    groups: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    unequal_groups: bool = False
    share_kv: int | tuple[tuple[int, ...], ...] | None = None

    @property
    def has_heads(self) -> bool:
        """Whether KV heads are made at all."""
        return any(each is not None for each in (self.kv_heads, self.kv_budget, self.groups))

    def is_made_by(self, method: Method) -> bool:
        """Where layers share K/V, by those methods alone that merge projections of layers, too; and where no
        heads are made, by nothing but their names."""
        if self.share_kv is None:
            return True
        plain = method.grouping is None and method.measure is None
        return method.method in get_args(ShareMethod) and (self.has_heads or plain)


@dataclass(frozen=True, slots=True)
class Method:
    """How they are made: heads of heads, and the projections that layers share of those of each."""

    name: str
    method: str
    grouping: str | None = None
    measure: str | None = None


def share_plan(stated: int | tuple[tuple[int, ...], ...], method: str = "first") -> SharePlan:
    """What `jaxinfer.heads` is asked for of layers. Raises ConfigError."""
    one, groups = (None, stated) if isinstance(stated, tuple) else (stated, None)
    return SharePlan(share=one, groups=groups, method=method)  # type: ignore[arg-type]


def read_variant(table: Table) -> Variant:
    """Of a table of `[[variant]]`; raises ConfigError."""
    counts = table.take("kv_heads", None)
    if isinstance(counts, list):
        counts = tuple(counts)
    if counts == ():
        raise ConfigError(f"{table.key('kv_heads')} has no layer: say a number for all, or one for each")
    budget = table.number("kv_budget", None)
    lists = table.take("groups", None)
    shared = _tuples(table.take("share_kv", None))
    default = "x".join(map(str, counts)) if isinstance(counts, tuple) else f"{counts}-heads"
    if budget is not None:
        default = f"budget-{budget:g}"
    if lists is not None:
        default = "groups"
    if shared is not None:
        heads = [] if counts is None and budget is None and lists is None else [default]
        default = "-".join([*heads, "shared" if isinstance(shared, tuple) else f"shared-{shared}"])
    name = table.text("name", default)
    unequal = table.flag("unequal_groups", False)
    table.close()
    try:
        groups = None if lists is None else stated_groups(lists)
        made = Variant(name, counts, budget, groups, unequal, shared)
        if shared is None or made.has_heads or unequal:
            HeadPlan(kv_heads=counts, kv_budget=budget, groups=groups, unequal_groups=unequal)
        if shared is not None:
            share_plan(shared)
            if budget is not None:
                raise ConfigError(NO_BUDGET)
    except ConfigError as error:
        raise ConfigError(f"{table.name}: {error}") from None
    return made


def _tuples(value: Any) -> Any:
    """Lists of TOML as tuples, however deep."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_method(value: Any, place: int) -> Method:
    """Of the entry `place` of grid.methods: a name, or a table; raises ConfigError."""
    if isinstance(value, str):
        return Method(value, value)
    if not isinstance(value, dict):
        raise ConfigError(f"grid.methods[{place}] must be a name or a table, got {value!r}")
    table = Table(value, f"grid.methods[{place}]")
    method = table.text("method")
    grouping, measure = table.text("grouping", None), table.text("measure", None)
    name = table.text("name", "-".join([method, *filter(None, (grouping, measure))]))
    table.close()
    return Method(name, method, grouping, measure)
