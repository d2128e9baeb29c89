"""The flags of a conversion of KV heads, for every command that makes one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxinfer.cli.group_lists import read_groups
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.heads import HeadPlan


@dataclass(frozen=True, kw_only=True)
class HeadFlags:
    """Other KV heads: how many, and how they are made."""

    kv_heads: str | None = None
    """KV heads of every layer: a number, or one for each layer (4,4,2,1)."""
    kv_budget: float | None = None
    """Share of all KV heads to keep; each layer gets the count with which all together lose least."""
    groups: str | None = None
    """Which old heads make each new one: 0,1|2-3 for every layer, with ; between layers, or a .json or .toml
    file with lists of heads."""
    method: (
        Literal["mean", "first", "random", "norm-weighted", "similarity", "align", "svd", "repeat"] | None
    ) = None
    """How the heads of a group become one (mean, if left out); repeat makes more."""
    grouping: Literal["neighbours", "alike"] | None = None
    """Which heads are grouped: runs of them, or those that lose least together."""
    unequal_groups: bool = False
    """Groups may differ in size; query heads of zeros then pad them."""
    measure: Literal["weights", "text"] | None = None
    """What heads are compared by; text runs the model over the calibration text."""
    calibration: str | None = None
    """A text file, in place of a built-in text."""
    calibration_tokens: int | None = None
    """How much of it is run, at most; 2048 by default."""
    head_seed: int | None = None
    """Of --method random."""

    def plan(self) -> HeadPlan | None:
        """What is asked for; None where nothing is. Raises UsageError, or ConfigError, by name."""
        stated = {name: value for name, value in vars(self).items() if value not in (None, False)}
        if not stated:
            return None
        if self.kv_heads is None and self.kv_budget is None and self.groups is None:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in stated)
            raise UsageError(
                f"{names} needs --kv-heads, --kv-budget or --groups, which say how many KV heads to make"
            )
        from jaxinfer.heads import HeadPlan

        return HeadPlan(
            kv_heads=None if self.kv_heads is None else _counts(self.kv_heads),
            kv_budget=self.kv_budget,
            groups=None if self.groups is None else read_groups(self.groups),
            method=self.method or "mean",
            grouping=self.grouping,
            unequal_groups=self.unequal_groups,
            measure=self.measure,
            calibration=None if self.calibration is None else Path(self.calibration),
            calibration_tokens=self.calibration_tokens,
            seed=self.head_seed,
        )


def _counts(argument: str) -> int | tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in argument.split(","))
    except ValueError:
        raise UsageError(
            f"--kv-heads is a number, or one for each layer such as 4,4,2,1; got {argument!r}"
        ) from None
    return counts if "," in argument else counts[0]
