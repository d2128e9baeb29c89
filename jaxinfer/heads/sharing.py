"""Cross-layer attention (2405.12981): layers that read the K/V of an earlier one, made of a checkpoint whose
layers have their own.

    view = Shared(open_checkpoint(path), SharePlan(share=2))       a Checkpoint: load it, or write it

A group of layers keeps one k_proj and v_proj, those of its first layer; the others project queries alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from checkpoints import Checkpoint, TokenizerSource
from jaxinfer.config import ModelConfig, shown_layers, with_shared_kv
from jaxinfer.core import ConfigError
from jaxinfer.heads.plan import HeadPlan
from jaxinfer.planner import ModelCosts

ShareMethod = Literal["first", "mean"]

NO_BUDGET = (
    "kv_budget gives each layer KV heads of its own, and layers that share K/V have the same; state kv_heads "
    "or groups"
)

UNKNOWN_ELSEWHERE = (
    "              config.json lists whose K/V each layer reads; other programs do not know of it"
)

_OF_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.([kv]_proj\.(?:weight|bias)|k_norm\.weight)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlan:
    """Which layers share K/V, and how the K/V that they share are made.

    One of these says which layers:
      `share`: runs of so many layers, from the first on; the last run may be shorter. 1 shares nothing.
      `groups`: the layers of each group; layers of no group keep their own.

    `method`: "first" keeps the projections of a group's first layer; "mean" takes the mean of those of all
    its layers, biases and (qk_norm) the norms of keys included.

    Raises ConfigError, by name, for what contradicts or means nothing.
    """

    share: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    method: ShareMethod = "first"

    def __post_init__(self) -> None:
        if self.method not in get_args(ShareMethod):
            allowed = ", ".join(get_args(ShareMethod))
            raise ConfigError(f"the method of share_kv must be one of {allowed}, got {self.method!r}")
        if (self.share is None) == (self.groups is None):
            raise ConfigError("share_kv: say how many layers share, or which; one of the two")
        if self.share is not None and (type(self.share) is not int or self.share < 1):
            raise ConfigError(f"share_kv must be 1 layer or more, got {self.share!r}")
        if self.groups is not None:
            _check_groups(self.groups)

    def check(self, config: ModelConfig, heads: HeadPlan | None = None) -> None:
        """Raises ConfigError where layers of this model cannot share so, or not with the KV heads that they
        are to have: before anything is worked out for them."""
        refuse_shared(config, "share_kv")
        owners = self.owners(config.num_layers)
        stated: Sequence[int] = [1] * config.num_layers  # which divides all: their own are not the question
        if heads is not None:
            if heads.kv_budget is not None:
                raise ConfigError(NO_BUDGET)
            if isinstance(heads.kv_heads, tuple) and len(heads.kv_heads) == config.num_layers:
                stated = heads.kv_heads
            if heads.groups is not None and len(heads.groups) == config.num_layers:
                stated = [len(groups) for groups in heads.groups]
        for index, owner in enumerate(owners):
            if owner is not None and stated[index] != stated[owner]:
                raise ConfigError(
                    f"share_kv: layer {index} is to have {stated[index]} KV heads, and layer {owner}, whose "
                    f"K/V it would read, {stated[owner]}"
                )
        layers = tuple(
            replace(layer, num_kv_heads=1, kv_from=owner)
            for layer, owner in zip(config.layers, owners, strict=True)
        )
        replace(config, layers=layers)

    def owners(self, layers: int) -> list[int | None]:
        """By layer of a model of so many, whose K/V it reads; None: its own. Raises ConfigError."""
        if self.share is not None:
            firsts = [index - index % self.share for index in range(layers)]
            return [None if first == index else first for index, first in enumerate(firsts)]
        assert self.groups is not None
        owners: list[int | None] = [None] * layers
        for group in self.groups:
            if max(group) >= layers:
                raise ConfigError(f"share_kv names layer {max(group)}; the model has 0 to {layers - 1}")
            for index in group:
                owners[index] = None if index == min(group) else min(group)
        return owners


class Shared:
    """A `Checkpoint` some of whose layers share K/V as `plan` says; projections that method "mean" makes are
    read in float32, whatever the source holds them in. `config`: the config.json to go by, in place of the
    source's own.

    Raises ConfigError naming the layers for a source some of whose layers share K/V already, and for layers
    that cannot (`ModelConfig`).
    """

    def __init__(self, source: Checkpoint, plan: SharePlan, config: Mapping[str, Any] | None = None):
        keys = source.config if config is None else config
        self._source = source
        self.path: Path = source.path
        self.generation_config: dict[str, Any] = source.generation_config
        self.before = ModelConfig.from_hf(keys)
        refuse_shared(self.before, "share_kv")
        owners = plan.owners(self.before.num_layers)
        self.config: dict[str, Any] = with_shared_kv(keys, owners)
        self.after = ModelConfig.from_hf(self.config)
        self._sharers = frozenset(self.after.sharing_layers)
        self._groups: dict[int, list[int]] = {}
        """Layers whose projections are averaged, by the layer that keeps the mean."""
        if plan.method == "mean":
            for index, owner in enumerate(owners):
                if owner is not None:
                    self._groups.setdefault(owner, [owner]).append(index)

    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self._source.names() if not self._is_gone(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._source.shape(name))

    def dtype(self, name: str) -> np.dtype:
        return self._source.dtype(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        assert not self._is_gone(name), f"{name} is shared away"
        match = _OF_KV.fullmatch(name)
        group = self._groups.get(int(match[1])) if match else None
        if match is None or group is None:
            return self._source.read(name, index)
        total: np.ndarray | None = None
        for layer in group:
            part = self._source.read(f"model.layers.{layer}.self_attn.{match[2]}", index).astype(np.float32)
            total = part if total is None else total + part
        assert total is not None
        return total / np.float32(len(group))

    def tokenizer_source(self) -> TokenizerSource:
        return self._source.tokenizer_source()

    def _is_gone(self, name: str) -> bool:
        match = _OF_KV.fullmatch(name)
        return match is not None and int(match[1]) in self._sharers

    def lines(self) -> list[str]:
        """For people: which layers share, and memory."""
        was, now = (ModelCosts(config).kv_bytes_per_token for config in (self.before, self.after))
        sharers = self.after.sharing_layers
        shown = (
            f"layers {shown_layers(sharers)} read those of an earlier one" if sharers else "nothing is shared"
        )
        return [
            f"shared K/V    {self.after.num_layers - len(sharers)} of {self.after.num_layers} layers have "
            f"their own; {shown}",
            f"KV memory     {was:.0f} -> {now:.0f} bytes a token in bfloat16"
            + (f" ({now / was:.1%})" if was else ""),
            *([UNKNOWN_ELSEWHERE] if sharers else []),
        ]


def refuse_shared(config: ModelConfig, name: str) -> None:
    """Raises ConfigError where layers share K/V: `name` is of models whose layers have their own."""
    if config.sharing_layers:
        raise ConfigError(
            f"{name}: layers {shown_layers(config.sharing_layers)} of this model read the K/V of earlier "
            "ones; convert the model that it was made from, all in one go"
        )


def _check_groups(groups: Any) -> None:
    if not isinstance(groups, tuple) or not groups or not all(isinstance(g, tuple) and g for g in groups):
        raise ConfigError(
            f"share_kv must name layers of each group, such as ((0, 1), (2, 3)); got {groups!r}"
        )
    layers = [layer for group in groups for layer in group]
    for layer in layers:
        if type(layer) is not int or layer < 0:
            raise ConfigError(f"share_kv must hold layers, numbers from 0 on; got {layer!r}")
        if layers.count(layer) > 1:
            raise ConfigError(f"share_kv names layer {layer} more than once")
