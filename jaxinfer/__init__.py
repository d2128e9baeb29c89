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

__all__ = [
    "LLM",
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
    """LLM when it is asked for: the rooms below it can be imported without it."""
    if name == "LLM":
        from jaxinfer.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
