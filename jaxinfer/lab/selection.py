"""Which parameters are trained: all of them, attention's, or the K and V projections alone.

What is frozen never meets the optimiser: a stacked weight is cut into its frozen and its trained rows, so
that gradients, moments and weight decay of frozen rows do not exist, rather than being masked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import ModelConfig
from jaxinfer.lab.settings import Train
from jaxinfer.model.weights import Parameter, parameters

Arrays = dict[str, jax.Array]
"""Parameters, or their trained or frozen rows, by name: the path in the module, with dots."""


def name_of(parameter: Parameter) -> str:
    return ".".join(map(str, parameter.path))


def first_trained_row(config: ModelConfig, parameter: Parameter, train: Train) -> int | None:
    """Rows (outputs) of the parameter from here on are trained; None: none is.

    "kv" trains the K and V rows of `qkv`, weight and bias, of which Q's come first. "attention" trains all
    that is of attention: its four projections and, of models that have them, the norms of its heads.
    """
    if train == "all":
        return 0
    if "attention" not in parameter.path:
        return None
    if train == "attention":
        return 0
    queries = config.num_heads * config.head_dim
    return queries if "qkv" in parameter.path and queries < parameter.outputs else None


def split(config: ModelConfig, state: nnx.State, train: Train) -> tuple[Arrays, Arrays]:
    """The trained and the frozen rows of every parameter of `state`, row-major [out, in] or [out]."""
    flat = dict(nnx.to_flat_state(state))
    trained: Arrays = {}
    frozen: Arrays = {}
    for parameter in parameters(config):
        name, value = name_of(parameter), flat[parameter.path][...]
        start = first_trained_row(config, parameter, train)
        if start is None:
            frozen[name] = value
        elif start == 0:
            trained[name] = value
        else:
            frozen[name], trained[name] = value[:start], value[start:]
    return trained, frozen


def join(template: nnx.State, trained: Arrays, frozen: Arrays) -> nnx.State:
    """What `split` has split, in one dtype: float32 where any of it is. `template` has the structure."""
    filled = {}
    for path, variable in nnx.to_flat_state(template):
        name = ".".join(map(str, path))
        parts = [part[name] for part in (frozen, trained) if name in part]
        filled[path] = variable.replace(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
    return nnx.from_flat_state(filled)


def count(arrays: Arrays) -> int:
    """Numbers in all arrays together."""
    return sum(array.size for array in arrays.values())
