"""Conversion of a model's KV heads: MHA to GQA to MQA, to counts that differ by layer, and to more heads.

    checkpoint = open_checkpoint(path)
    change = decide(checkpoint, HeadPlan(kv_heads=1, method="align"))
    view = Regrouped(checkpoint, change)             a Checkpoint: load it, or write it with jaxinfer.convert

`plan` is what is asked for, `decide` what it comes to, `regrouped` the tensors; `groups`, `merge`,
`calibrate` and `budget` are the parts of deciding. `sharing` lets layers share K/V, whatever their heads are.
"""

from jaxinfer.heads.decide import HeadChange, LayerChange, decide
from jaxinfer.heads.groups import Group
from jaxinfer.heads.plan import HeadPlan, stated_groups
from jaxinfer.heads.regrouped import Regrouped
from jaxinfer.heads.report import kv_bytes, lines
from jaxinfer.heads.sharing import Shared, ShareMethod, SharePlan

__all__ = [
    "Group",
    "HeadChange",
    "HeadPlan",
    "LayerChange",
    "Regrouped",
    "ShareMethod",
    "SharePlan",
    "Shared",
    "decide",
    "kv_bytes",
    "lines",
    "stated_groups",
]
