"""The flags that let layers share K/V, for every command that converts a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxinfer.cli.group_lists import numbers_of
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.heads import SharePlan


@dataclass(frozen=True, kw_only=True)
class ShareFlags:
    """Cross-layer attention: layers that read the K/V of an earlier one."""

    share_kv: str | None = None
    """How many layers in a row share the K/V of their first, such as 2; or which layers do: 0-1|2,3|5-7."""
    share_method: Literal["first", "mean"] | None = None
    """The projections that a group shares: those of its first layer (if left out), or the mean of all."""

    def plan(self) -> SharePlan | None:
        """What is asked for; None where nothing is. Raises UsageError, or ConfigError, by name."""
        if self.share_kv is None:
            if self.share_method is not None:
                raise UsageError("--share-method needs --share-kv, which says which layers share")
            return None
        from jaxinfer.heads import SharePlan

        method = self.share_method or "first"
        if re.fullmatch(r"[0-9]{1,4}", self.share_kv):
            return SharePlan(share=int(self.share_kv), method=method)
        groups = tuple(tuple(self._layers(part)) for part in self.share_kv.split("|"))
        return SharePlan(groups=groups, method=method)

    def _layers(self, part: str) -> list[int]:
        layers = numbers_of(part)
        if layers is None:
            raise UsageError(
                f"--share-kv is a number of layers, or groups of them such as 0-1|2,3; got {self.share_kv!r}"
            )
        return layers
