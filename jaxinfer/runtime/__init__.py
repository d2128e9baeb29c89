"""The device side: owns jit, the buckets and the transfer of each step."""

from jaxinfer.runtime.loading import Loaded, load
from jaxinfer.runtime.runner import JaxRunner

__all__ = ["JaxRunner", "Loaded", "load"]
