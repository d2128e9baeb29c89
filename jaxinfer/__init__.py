"""A JAX/XLA inference runtime for Llama-family models: paged KV and continuous batching.

from jaxinfer import LLM, SamplingParams
LLM("smollm2-135m").generate("Gravity is", SamplingParams(max_tokens=32))
"""

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.core import (
    CompletionOutput,
    ConfigError,
    JaxInferError,
    Logprob,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenEvent,
)
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
    "TokenEvent",
]
