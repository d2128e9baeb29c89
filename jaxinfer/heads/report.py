"""A conversion of heads in a few lines: counts, KV memory, and what merging lost."""

from __future__ import annotations

from collections.abc import Sequence

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
        f"KV memory     {was:.0f} -> {now:.0f} bytes a token in bfloat16 ({now / was:.1%})",
    ]
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
    if change.plan.method == "repeat":
        return ["error         none: heads are copied"]
    layers = change.layers
    on = "on the calibration text" if change.plan.on_text else "of the weights"
    kinds = {"keys": [x.key_error for x in layers], "values": [x.value_error for x in layers]}
    attention = [x.attention_error for x in layers if x.attention_error is not None]
    if attention:
        kinds["attention"] = attention
    found = []
    for kind, errors in kinds.items():
        worst = max(range(len(errors)), key=errors.__getitem__)
        mean = sum(errors) / len(errors)
        found.append(
            f"error         {kind:9} {mean:.3f} on average, most {errors[worst]:.3f} in layer {worst}"
        )
    return [*found, f"              relative, {on}"]


def _counts(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))
