"""The nouns that every room shares, and the contract between the engine and the device.

Standard library only: the engine, the runtime, the server and the tests all import these pages, so they must
cost nothing to import and know nothing of arrays.

Progress of a sequence is one number, `computed`: `tokens[:computed]` have their K/V in pages. A step
runs `tokens[start : start + count]` of each chosen sequence, with `start == computed`:

    prompt of 5, budget 3      step 1: start 0 count 3   (a prefill chunk; nothing is sampled)
                               step 2: start 3 count 2   (reaches the end: samples token 5)
                               step 3: start 5 count 1   (decode: samples token 6)

There is no prefill flag anywhere; preemption is `computed = 0` and the pages given back.
"""

from jaxinfer.core.errors import ConfigError, EngineDeadError, JaxInferError, RequestError
from jaxinfer.core.requests import Limits, Request, Sequence, Status
from jaxinfer.core.results import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenEvent,
)
from jaxinfer.core.sampling import MAX_LOGPROBS, MIN_TEMPERATURE, SamplingParams
from jaxinfer.core.steps import Draw, LogitChanges, Runner, Sampled, Slice, StepPlan, StepResult
from jaxinfer.core.structured import STRUCTURES, Structure, StructuredOutputsParams

__all__ = [
    "MAX_LOGPROBS",
    "MIN_TEMPERATURE",
    "STRUCTURES",
    "CompletionOutput",
    "ConfigError",
    "Draw",
    "EngineDeadError",
    "FinishReason",
    "JaxInferError",
    "Limits",
    "LogitChanges",
    "Logprob",
    "Request",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "Runner",
    "Sampled",
    "SamplingParams",
    "Sequence",
    "Slice",
    "Status",
    "StepPlan",
    "StepResult",
    "Structure",
    "StructuredOutputsParams",
    "TokenEvent",
]
