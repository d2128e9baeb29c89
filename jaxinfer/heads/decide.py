"""From a HeadPlan to what it does to one model: counts, groups and the maps that make new heads.

Layers are looked at one after the other; of the weights two tensors are in memory at a time. Where heads are
compared on a text, the activations of all layers are (`jaxinfer.heads.calibrate`), until all is decided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from checkpoints import Checkpoint
from jaxinfer.config import Favor, LayerConfig, ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.heads import attention, budget, calibrate, groups, merge
from jaxinfer.heads.groups import HeadMap, Members
from jaxinfer.heads.merge import Fold, Freedom
from jaxinfer.heads.plan import HeadPlan
from jaxinfer.heads.sharing import refuse_shared
from jaxinfer.progress import phase

PRIOR = 1e-3
"""Share of the weights' own moments in what is decided from a text: a text that leaves directions of a head
untouched says nothing of them, and the weights do."""
Choice = tuple[int, int]
"""KV heads of a layer, and the most old heads that one of them may have."""
BUDGET_PIECES = 2
"""Pieces of the calibration text on which a budget is spread: the model is run for each layer and count."""
TOKENS = 2048
"""Tokens of calibration where the plan does not say."""


@dataclass(frozen=True, slots=True)
class LayerChange:
    """Of one layer: the head map, the folds of each of its groups, and what they lose.

    `key_error`, `value_error`: |merged - old| / |old| over all heads, on the text or, without one, of the
    weights. `attention_error`: the same of what attention adds to the residual stream, on the text alone, by
    the kind of attention that the layer had and the kind that it gets.
    """

    groups: HeadMap
    keys: tuple[Fold, ...]
    values: tuple[Fold, ...]
    key_error: float
    value_error: float
    attention_error: float | None = None


@dataclass(frozen=True, slots=True)
class HeadChange:
    """A plan applied to a model. `after` has each layer's new count, the query heads with zeros, and what
    attention each layer shall have."""

    plan: HeadPlan
    before: ModelConfig
    after: ModelConfig
    layers: tuple[LayerChange, ...]


def decide(
    checkpoint: Checkpoint,
    plan: HeadPlan,
    *,
    favors: Sequence[Favor | None] | None = None,
    progress: bool = True,
) -> HeadChange:
    """What `plan` comes to. `favors`: which layers shall have linear attention afterwards, None: those that
    have it. Layers of linear attention have no pages, so that a budget leaves them the heads that they have.

    Raises ConfigError for counts that the plan's groups cannot have, or a text that cannot be run."""
    config = ModelConfig.from_hf(checkpoint.config)
    refuse_shared(config, "other KV heads")
    wanted = [
        replace(layer, favor=favor)
        for layer, favor in zip(config.layers, favors or [x.favor for x in config.layers], strict=True)
    ]
    old = [layer.num_kv_heads for layer in config.layers]
    if plan.groups is not None and len(plan.groups) == 1:
        plan = replace(plan, groups=plan.groups * config.num_layers)
    _check_layers(config, plan)
    if plan.method == "repeat":
        return _repeat(config, plan, wanted)
    if plan.kv_budget is not None:
        _budget_total(plan.kv_budget, wanted)  # told before a model is run
    stated = None if plan.kv_budget is not None else _counts(config, plan)
    choices = None if stated is None else _limits(config, plan, old, stated)
    measured: Sequence[calibrate.Activations | None] = [None] * len(old)
    model, pieces = None, np.zeros((0, 0), np.int32)
    if plan.on_text:
        most_tokens = plan.calibration_tokens or TOKENS
        pieces = calibrate.calibration_pieces(checkpoint, plan.calibration, most_tokens)
        model = calibrate.loaded(checkpoint, progress=progress)
        measured = calibrate.activations(model, pieces, progress=progress)

    def layer(index: int) -> _Layer:
        return _Layer(config, plan, checkpoint, index, measured[index], wanted[index])

    if choices is None:
        assert model is not None, "a budget is spread on a text"
        divergence = calibrate.Divergence(model, pieces[:BUDGET_PIECES])
        choices = _within_budget(config, plan, layer, wanted, divergence, progress)
        del divergence
    del model  # before a second one is put together
    changes = []
    for index, (count, most) in enumerate(choices):
        each = layer(index)  # made anew, and let go of, for each: moments of all layers would be large
        changes.append(each.change(plan.groups[index] if plan.groups else each.members(count, most)))
    return _changed(config, plan, changes, wanted)


def _changed(
    config: ModelConfig, plan: HeadPlan, changes: Sequence[LayerChange], wanted: Sequence[LayerConfig]
) -> HeadChange:
    maps = [change.groups for change in changes]
    layers = tuple(replace(layer, num_kv_heads=len(each)) for layer, each in zip(wanted, maps, strict=True))
    heads = groups.query_heads(maps, config.num_heads)
    return HeadChange(plan, config, replace(config, layers=layers, num_heads=heads), tuple(changes))


def _check_layers(config: ModelConfig, plan: HeadPlan) -> None:
    for name in ("kv_heads", "groups"):
        stated = getattr(plan, name)
        if isinstance(stated, tuple) and len(stated) != config.num_layers:
            one = " or 1 for all" if name == "groups" else ""
            raise ConfigError(
                f"{name} has {len(stated)} entries for the model's {config.num_layers} layers; give "
                f"{config.num_layers}{one}"
            )
    maps = []
    for index, members in enumerate(plan.groups or ()):
        groups.check_members(members, config.layers[index].num_kv_heads, index)
        maps.append(groups.merged(members, config.num_heads // config.layers[index].num_kv_heads))
    if maps:
        groups.query_heads(maps, config.num_heads)


def _counts(config: ModelConfig, plan: HeadPlan) -> list[int]:
    """The KV heads of each layer, as the plan states them."""
    if plan.groups is not None:
        return [len(members) for members in plan.groups]
    stated = plan.kv_heads
    assert stated is not None
    counts = list(stated) if isinstance(stated, tuple) else [stated] * config.num_layers
    for index, (layer, count) in enumerate(zip(config.layers, counts, strict=True)):
        old = layer.num_kv_heads
        if count > old:
            raise ConfigError(
                f"kv_heads {count} is more than the {old} of layer {index}; method 'repeat' makes more"
            )
        if old % count and not plan.unequal_groups:
            divisors = ", ".join(str(k) for k in range(1, old + 1) if old % k == 0)
            raise ConfigError(
                f"kv_heads {count} does not divide the {old} KV heads of layer {index}; allowed: {divisors}, "
                "or any count with unequal_groups"
            )
    return counts


def _limits(config: ModelConfig, plan: HeadPlan, old: list[int], counts: list[int]) -> list[Choice]:
    """The counts, each with the most old heads in a new one."""
    if plan.groups is not None:
        most = old
    elif plan.unequal_groups:
        most = groups.most_members(old, counts, config.num_heads)
    else:
        most = [a // b for a, b in zip(old, counts, strict=True)]
    return list(zip(counts, most, strict=True))


def _repeat(config: ModelConfig, plan: HeadPlan, wanted: Sequence[LayerConfig]) -> HeadChange:
    stated, h = plan.kv_heads, config.head_dim
    assert stated is not None
    counts = stated if isinstance(stated, tuple) else (stated,) * config.num_layers
    changes = []
    for index, (layer, count) in enumerate(zip(config.layers, counts, strict=True)):
        old = layer.num_kv_heads
        if (count % old or config.num_heads % count) and old <= count and not plan.unequal_groups:
            raise ConfigError(
                f"kv_heads {count} is no multiple of the {old} KV heads of layer {index} that divides its "
                f"{config.num_heads} query heads; with unequal_groups any count up to these can be had"
            )
        copies = groups.repeated(config.num_heads, old, count)
        same = (merge.mean(1, h),) * count
        changes.append(LayerChange(copies, same, same, 0.0, 0.0))
    return _changed(config, plan, changes, wanted)


class _Layer:
    """What is known of the heads of one layer, and what merging them comes to."""

    def __init__(
        self,
        config: ModelConfig,
        plan: HeadPlan,
        checkpoint: Checkpoint,
        index: int,
        measured: calibrate.Activations | None,
        becomes: LayerConfig,
    ):
        self.config, self.plan, self.checkpoint, self.index = config, plan, checkpoint, index
        self.measured, self.becomes = measured, becomes
        self.layer = config.layers[index]

    def members(self, count: int, most: int) -> Members:
        """`count` groups of at most `most` heads."""
        heads = self.layer.num_kv_heads
        if not self.plan.alike or count in (1, heads):
            return groups.neighbours(heads, count)
        least = 1 if self.plan.unequal_groups else heads // count
        return groups.alike(self._likeness, count, least=least, most=most)

    def change(self, members: Members) -> LayerChange:
        """These groups made one head each."""
        keys, values = self._folds(members)
        key_error, value_error = (
            _relative(self._measured_moments[which], members, folds)
            for which, folds in enumerate((keys, values))
        )
        moved = None
        if self.measured is not None:
            layers = self.layer, self.becomes
            moved = (
                attention.attention_loss(self.measured, members, (keys, values), self._output, layers) ** 0.5
            )
        merged = groups.merged(members, self.config.num_heads // self.layer.num_kv_heads)
        return LayerChange(merged, keys, values, key_error, value_error, moved)

    def rows(self, members: Members) -> np.ndarray:
        """k_proj and v_proj of a layer whose heads are what these groups' new heads stand for: the layer
        after merging, in the shapes of before. [2 K H, D], with a column for biases where there are any."""
        folded = zip(self._weights, self._folds(members), strict=True)
        rebuilt = [_rebuilt(heads.transpose(2, 0, 1)[None], members, folds)[0] for heads, folds in folded]
        return np.concatenate([x.transpose(1, 2, 0).reshape(-1, len(x)) for x in rebuilt])

    def _folds(self, members: Members) -> tuple[tuple[Fold, ...], tuple[Fold, ...]]:
        """Of keys and of values, for each group."""
        numbered = list(enumerate(members))
        keys, values = (tuple(self._fold(which, each, n) for n, each in numbered) for which in (0, 1))
        return keys, values

    def _fold(self, which: int, heads: tuple[int, ...], number: int) -> Fold:
        """Of keys (0) or values (1) of one group."""
        count, width, plan = len(heads), self.config.head_dim, self.plan
        if count == 1:
            return merge.mean(1, width)
        if plan.method in ("mean", "similarity"):
            return merge.mean(count, width)
        if plan.method == "first":
            return merge.picked(count, width, 0)
        if plan.method == "random":  # the same head for keys and for values
            draw = np.random.default_rng((plan.seed or 0, self.index, number))
            return merge.picked(count, width, int(draw.integers(count)))
        here = list(heads)
        if plan.method == "norm-weighted":
            return merge.norm_weighted(self._measured_moments[which][here][:, :, here])
        moments = self._moments[which][here][:, :, here]
        fold = merge.aligned if plan.method == "align" else merge.factorised
        return fold(moments, self._freedom(which))

    def _freedom(self, which: int) -> Freedom:
        """What maps may stand between the heads' keys (0) or values (1)."""
        if which == 1:
            return "any"
        if self.config.qk_norm:
            return "pair signs" if self.layer.rotary else "signs"
        return "pairs" if self.layer.rotary else "any"

    @functools.cached_property
    def _likeness(self) -> np.ndarray:
        """Inner products [K, K] of keys and of values, each as shares of the whole."""
        turned = self.plan.method in ("align", "svd")
        grams = [
            merge.likeness(self._moments[which], self._freedom(which) if turned else None) for which in (0, 1)
        ]
        return np.sum([gram / max(np.trace(gram), 1e-30) for gram in grams], axis=0)

    @property
    def _moments(self) -> list[np.ndarray]:
        """Second moments of keys and values, float64 [K, H, K, H], that decisions are made from."""
        if self.measured is None:
            return self._measured_moments
        pairs = zip(self._measured_moments, self._weight_moments, strict=True)
        return [_share(text) + PRIOR * _share(own) for text, own in pairs]

    @functools.cached_property
    def _measured_moments(self) -> list[np.ndarray]:
        """The same of the text alone, or of the weights where there is none."""
        if self.measured is None:
            return self._weight_moments
        k, v = self.measured.k, self.measured.v
        return [merge.moments_of(x.reshape(-1, *x.shape[2:])) for x in (k, v)]

    @functools.cached_property
    def _weight_moments(self) -> list[np.ndarray]:
        """Those of inputs that are 1 in one place and 0 elsewhere, and of the bias."""
        return [merge.moments_of(heads.transpose(2, 0, 1)) for heads in self._weights]

    @property
    def _weights(self) -> list[np.ndarray]:
        """k_proj and v_proj by head, [K, H, D], with a column more for biases where there are any."""
        found = []
        for projection in ("k_proj", "v_proj"):
            name = f"model.layers.{self.index}.self_attn.{projection}"
            rows = self.checkpoint.read(f"{name}.weight").astype(np.float32)
            if self.config.qkv_bias:
                bias = self.checkpoint.read(f"{name}.bias").astype(np.float32)
                rows = np.concatenate([rows, bias[:, None]], axis=1)
            found.append(rows.reshape(self.layer.num_kv_heads, self.config.head_dim, -1))
        return found

    @functools.cached_property
    def _output(self) -> np.ndarray:
        return self.checkpoint.read(f"model.layers.{self.index}.self_attn.o_proj.weight").astype(np.float32)


def _share(moments: np.ndarray) -> np.ndarray:
    total = np.einsum("jaja->", moments)
    return moments / total if total > 0 else moments


def _relative(moments: np.ndarray, members: Members, folds: Sequence[Fold]) -> float:
    """|merged - old| / |old| over all heads of a layer."""
    lost = sum(
        fold.lost(moments[list(heads)][:, :, list(heads)]) for heads, fold in zip(members, folds, strict=True)
    )
    total = float(np.einsum("jaja->", moments))
    return (lost / total) ** 0.5 if total > 0 else 0.0


def _rebuilt(heads: np.ndarray, members: Members, folds: Sequence[Fold]) -> np.ndarray:
    """What stands for heads [texts, S, K, H] after merging, seen from their own query heads."""
    result = np.empty_like(heads)
    for each, fold in zip(members, folds, strict=True):
        part = heads[:, :, list(each)]
        result[:, :, list(each)] = fold.rebuilt(part.reshape(-1, *part.shape[2:])).reshape(part.shape)
    return result


def _budget_total(share: float, wanted: Sequence[LayerConfig]) -> int:
    """The most KV heads of all layers together, those of linear attention as they are: a budget is of what
    pages hold, and these have none. `wanted`: the layers with their old heads."""
    paged = [layer.num_kv_heads for layer in wanted if layer.favor is None]
    if not paged:
        raise ConfigError(
            "kv_budget: every layer has linear attention, which holds no K/V; kv_heads makes their states "
            "smaller"
        )
    kept = sum(layer.num_kv_heads for layer in wanted if layer.favor is not None)
    return kept + budget.total_of(share, paged)


def _within_budget(
    config: ModelConfig,
    plan: HeadPlan,
    layer: Callable[[int], _Layer],
    wanted: Sequence[LayerConfig],
    divergence: calibrate.Divergence,
    progress: bool,
) -> list[Choice]:
    """The choices that lose least together under the plan's budget.

    Where groups may differ in size, every number of query heads N' that padding may come to is tried, with
    the counts that divide it.
    """
    assert plan.kv_budget is not None
    total, n = _budget_total(plan.kv_budget, wanted), config.num_heads
    old = [layer.num_kv_heads for layer in wanted]
    sets = [[{k // most: most for most in range(1, k + 1) if k % most == 0} for k in old]]  # count -> most
    if plan.unequal_groups:
        sets = [
            [_unequal_choices(k, n // k, heads) for k in old]
            for heads in range(n, groups.MOST_PADDING * n + 1)
        ]
    sets = [list(map(_own_heads_if_linear, wanted, each)) for each in sets]
    sets = [each for each in sets if all(each)]
    asked = [sorted({c for each in sets for c in each[index].items()}) for index in range(len(old))]
    known: list[dict[Choice, float]] = []
    with phase("measuring layers", total=sum(map(len, asked)), wanted=progress) as advance:
        for index, choices in enumerate(asked):
            here = layer(index)
            known.append({})
            for choice in choices:
                same = choice[0] == old[index]
                moved = 0.0 if same else divergence.of(index, here.rows(here.members(*choice)))
                known[index][choice] = moved
                advance(1)
    best: tuple[float, list[Choice]] | None = None
    for each in sets:
        losses = [
            {count: known[index][count, most] for count, most in choices.items()}
            for index, choices in enumerate(each)
        ]
        found = budget.best_counts(losses, total)
        if found is not None and (best is None or found[1] < best[0]):
            best = found[1], [(count, each[index][count]) for index, count in enumerate(found[0])]
    assert best is not None, f"one KV head a layer is within {total} and divides everything"
    return best[1]


def _own_heads_if_linear(layer: LayerConfig, choices: dict[int, int]) -> dict[int, int]:
    """Of these counts, those that a budget may choose for the layer."""
    return choices if layer.favor is None else {k: v for k, v in choices.items() if k == layer.num_kv_heads}


def _unequal_choices(kv_heads: int, group_size: int, heads: int) -> dict[int, int]:
    """Counts that `heads` N' query heads allow a layer of K KV heads -> the most old heads in a new one."""
    return {
        count: min(heads // count // group_size, kv_heads - count + 1)
        for count in range(1, kv_heads + 1)
        if heads % count == 0 and heads // count >= group_size * -(-kv_heads // count)
    }
