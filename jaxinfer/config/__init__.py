"""What runs (ModelConfig) and how it is run (EngineConfig, StepShape). Frozen, complete, strict.

`ModelConfig.from_hf` (config/hugging_face.py) is the only place that reads Hugging Face config keys.
"""

from jaxinfer.config.engine import EngineConfig
from jaxinfer.config.favor import Favor
from jaxinfer.config.hugging_face import with_linear_attention, with_shared_kv
from jaxinfer.config.model import LayerConfig, ModelConfig, shown_layers
from jaxinfer.config.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from jaxinfer.config.spans import (
    AttentionSpan,
    PageSpan,
    TopPages,
    TopPagesSpan,
    WindowSpan,
    attention_span,
    no_scoring,
)
from jaxinfer.config.steps import (
    SampleShape,
    StepShape,
    cheapest_shape,
    choose_step_shape,
    invariant_ladder,
    is_invariant,
    most_emitting,
    sample_ladder,
    sampled_rows,
    shape_ladder,
)

__all__ = [
    "AttentionSpan",
    "DynamicRope",
    "EngineConfig",
    "Favor",
    "LayerConfig",
    "LinearRope",
    "Llama3Rope",
    "ModelConfig",
    "PageSpan",
    "Rope",
    "SampleShape",
    "StepShape",
    "TopPages",
    "TopPagesSpan",
    "WindowSpan",
    "YarnRope",
    "attention_span",
    "cheapest_shape",
    "choose_step_shape",
    "invariant_ladder",
    "is_invariant",
    "most_emitting",
    "no_scoring",
    "sample_ladder",
    "sampled_rows",
    "shape_ladder",
    "shown_layers",
    "with_linear_attention",
    "with_shared_kv",
]
