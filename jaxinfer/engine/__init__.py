"""The loop, in pure Python: decides each step, runs it through a `Runner`, records what came of it.

Imports no jax: the device is whatever implements `core.Runner`.
"""

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import TextStream, Tokenizer
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.scheduler import Outcome, Scheduler
from jaxinfer.engine.validate import check_length, validate

__all__ = [
    "Engine",
    "Outcome",
    "PagePool",
    "Scheduler",
    "TextStream",
    "Tokenizer",
    "check_length",
    "validate",
]
