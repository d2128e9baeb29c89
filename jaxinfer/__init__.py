"""A JAX/XLA inference runtime for Llama-family models: paged KV and continuous batching.

from jaxinfer import LLM, SamplingParams
LLM("smollm2-135m").generate("Gravity is", SamplingParams(max_tokens=32))
"""

from typing import TYPE_CHECKING, Any

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.core import (
    CompletionOutput,
    ConfigError,
    JaxInferError,
    Logprob,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokenEvent,
)

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.llm.beams import BeamSearchParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "JaxInferError",
    "Logprob",
    "ModelConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenEvent",
]


def __getattr__(name: str) -> Any:
    """LLM and what belongs to it when they are asked for: the rooms below can be imported without them."""
    if name == "LLM":
        from jaxinfer.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from jaxinfer.llm.beams import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
