"""A conversion of heads in a few lines: counts, KV memory, and what merging lost."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.config import shown_layers
from jaxinfer.heads.decide import HeadChange
from jaxinfer.planner import ModelCosts


def kv_bytes(change: HeadChange, kv_dtype: str = "bfloat16") -> tuple[float, float]:
    """KV bytes of one token, before and after, in pages of `kv_dtype`."""
    before, after = (
        ModelCosts(config, kv_dtype=kv_dtype).kv_bytes_per_token for config in (change.before, change.after)
    )
    return before, after


def lines(change: HeadChange) -> list[str]:
    """For people: a line each on heads, memory and errors."""
    plan, before, after = change.plan, change.before, change.after
    old, new = ([layer.num_kv_heads for layer in config.layers] for config in (before, after))
    was, now = kv_bytes(change)
    total = f"{sum(old)} -> {sum(new)} in {len(old)} layers"
    found = [
        f"KV heads      {_counts(old)} -> {_counts(new)} ({total}), method {plan.method}",
        f"KV memory     {was:.0f} -> {now:.0f} bytes a token in bfloat16"
        + (f" ({now / was:.1%})" if was else ""),
    ]
    if before.linear_layers or after.linear_layers:
        where = f"layers {shown_layers(after.linear_layers)}" if after.linear_layers else "no layer any more"
        found.append(
            f"states        {before.state_bytes} -> {after.state_bytes} bytes a sequence; "
            f"linear attention in {where}"
        )
    if after.num_heads != before.num_heads:
        found.append(
            f"query heads   {before.num_heads} -> {after.num_heads}: zeros, so that groups are of one size"
        )
        if after.hidden_size % after.num_heads:
            found.append(
                f"              transformers 5 refuses such a Llama: hidden_size {after.hidden_size} is no "
                f"multiple of {after.num_heads}"
            )
    if len(set(new)) > 1:
        found.append(
            "              config.json lists the KV heads of each layer, which transformers does not read"
        )
    found += _errors(change)
    return found


def _errors(change: HeadChange) -> list[str]:
    """Of keys, values and attention; apart from it of linear attention, whose features are drawn for the
    heads that there are: it is not as it was where merged keys still have their products with queries."""
    if change.plan.method == "repeat":
        return ["error         none: heads are copied"]
    on = "on the calibration text" if change.plan.on_text else "of the weights"
    kinds: dict[str, dict[int, float]] = {"keys": {}, "values": {}, "attention": {}, "linear": {}}
    for index, (each, layer) in enumerate(zip(change.layers, change.after.layers, strict=True)):
        kinds["keys"][index], kinds["values"][index] = each.key_error, each.value_error
        if each.attention_error is not None:
            kinds["attention" if layer.favor is None else "linear"][index] = each.attention_error
    found = []
    for kind, errors in kinds.items():
        if not errors:
            continue
        worst = max(errors, key=errors.__getitem__)
        mean = sum(errors.values()) / len(errors)
        found.append(
            f"error         {kind:9} {mean:.3f} on average, most {errors[worst]:.3f} in layer {worst}"
        )
    return [*found, f"              relative, {on}"]


def _counts(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))
