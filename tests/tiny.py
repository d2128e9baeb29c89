"""Tiny random models that run in milliseconds, and the engines around them.

Weights are drawn at a scale where every part matters: logits have a standard deviation of some 3, attention
is neither flat nor one-hot, norms and biases are not neutral. A test that compares tokens of the 0.02-scale
weights of `random:CONFIG` would pass with half of the model missing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import checkpoints
from checkpoints.writing import PendingTensor, write_safetensors
from jaxinfer.config import (
    EngineConfig,
    LayerConfig,
    ModelConfig,
    Rope,
    StepShape,
    most_emitting,
    shape_ladder,
)
from jaxinfer.core import Limits, RequestOutput, SamplingParams
from jaxinfer.model import weights
from jaxinfer.model.llama import Build
from jaxinfer.runtime import JaxRunner
from pallas_kernels import Backend

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

GOLDEN = Path(__file__).parent / "golden"
"""Answers of other implementations."""

TINY = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_heads=8,
    head_dim=16,  # and not 64 / 8
    layers=(LayerConfig(num_kv_heads=2),) * 2,
    max_position=512,
    rms_norm_eps=1e-5,
    rope=Rope(),
    tie_word_embeddings=False,
)
"""8 query and 2 KV heads; some of its weights lie in blocks on CPU (outputs % 64 == 0), some do not."""


PLENTY = 2053
"""Pages of a pool larger than any weight or scratch of TINY: in a compiled program its size says what it is.
Modules that take this number and the default limits share their programs through the compile cache."""


def tiny_config(**changes: Any) -> ModelConfig:
    """TINY with fields changed. `num_layers`, `num_kv_heads`, `window` and `rotary` are for all layers."""
    layer = dataclasses.replace(
        TINY.layers[0],
        **{name: changes.pop(name) for name in ("num_kv_heads", "window", "rotary") if name in changes},
    )
    layers = (layer,) * changes.pop("num_layers", TINY.num_layers)
    return dataclasses.replace(TINY, **{"layers": layers, **changes})


class Tensors:
    """A `weights.Source` over arrays in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    path = Path("tensors")

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self.tensors[name][index]


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint of `config`, by Hugging Face name, at the scale the module tells of."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for parameter in weights.parameters(config):
        for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
            drawn = generator.standard_normal(shape)
            if "norm" in name:
                value = 1.0 + 0.2 * drawn
            elif name.endswith(".bias"):
                value = 0.2 * drawn
            elif "embed_tokens" in name and not config.tie_word_embeddings:
                value = drawn
            else:
                gain = 1.7 if "q_proj" in name or "k_proj" in name else 3.0 if "lm_head" in name else 1.0
                value = gain * drawn / np.sqrt(shape[1])
            tensors[name] = value.astype(np.float32)
    return tensors


def first_layers(source: Path, folder: Path, count: int = 1) -> Path:
    """The first layers of a model of safetensors as a model of its own, with its tokenizer: weights that were
    trained, and less to compile."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    held = checkpoints.open_checkpoint(source)
    kept = [
        name
        for name in held.names()
        if (match := re.match(r"model\.layers\.(\d+)\.", name)) is None or int(match[1]) < count
    ]
    tensors = [
        PendingTensor(name, held.shape(name), held.dtype(name), lambda name=name: held.read(name))
        for name in kept
    ]
    write_safetensors(folder, tensors)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "num_hidden_layers": count}))
    return folder


def tiny_build(dtype: str = "float32", backend: str | Backend = "xla", platform: str = "cpu") -> Build:
    return Build(jnp.dtype(dtype), platform, Backend(backend) if isinstance(backend, str) else backend)


TRAINED = dataclasses.replace(tiny_build(), row_major=True)
"""As models are trained, and run over whole texts: weights are [out, in]."""


def tiny_params(
    config: ModelConfig = TINY, tensors: dict[str, np.ndarray] | None = None, build: Build | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    source = Tensors(random_tensors(config) if tensors is None else tensors)
    return weights.load_params(config, build or tiny_build(), source)


def tiny_runner(
    config: ModelConfig = TINY,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    num_pages: int = 65,
    page_size: int = 8,
    max_model_len: int = 128,
    ladder: tuple[StepShape, ...] | None = None,
    dtype: str = "float32",
    kv_dtype: str = "",
    backend: str | Backend = "xla",
    strict: bool = False,
) -> JaxRunner:
    """A runner of random weights. `ladder` stands in for the one of the two limits, to compile less;
    `kv_dtype` "" is `dtype`."""
    build = tiny_build(dtype, backend)
    graph, state = tiny_params(config, tensors, build)
    return JaxRunner(
        config, graph, state, ladder or shape_ladder(max_num_seqs, max_num_batched_tokens),
        num_pages=num_pages, page_size=page_size, max_model_len=max_model_len,
        kv_dtype=kv_dtype or build.dtype, platform=build.platform, strict=strict,
    )  # fmt: skip


def engine_over(runner: JaxRunner, options: dict[str, Any] | None = None, **changes: Any) -> LLM:
    """A fresh LLM without a tokenizer over a runner that may have served others before.

    `options` are fields of EngineConfig for the engine alone (prefix cache, steps ahead, policy), `changes`
    fields of Limits. A pool, a budget or a number of sequences below the runner's own runs
    on the programs that the runner has already compiled.
    """
    from jaxinfer.llm import LLM

    limits = {
        "num_pages": runner.num_pages,
        "page_size": runner.page_size,
        "max_num_seqs": most_emitting(runner.ladder),
        "max_num_batched_tokens": max(shape.chunk_tokens for shape in runner.ladder),
        "max_model_len": runner.table_width * runner.page_size,
        "vocab_size": runner.config.vocab_size,
        "eos_token_ids": frozenset(runner.config.eos_token_ids),
        "stateful": bool(runner.config.linear_layers),
    }
    return LLM.from_parts(
        runner,
        Limits(**{**limits, **changes}),
        model_config=runner.config,
        engine_config=EngineConfig(seed=7, **(options or {})),
    )


def tiny_llm(config: ModelConfig = TINY, **options: Any) -> LLM:
    """`engine_over` a `tiny_runner` with these options."""
    return engine_over(tiny_runner(config, **options))


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    """Greedy, to the length asked for: no token of a random model means the end."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def prompts(lengths: list[int], seed: int = 0, vocab_size: int = TINY.vocab_size) -> list[list[int]]:
    """Random token ids, one prompt per length; equal lengths get different ids."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def token_ids(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    """The ids of every continuation of every request."""
    return [[part.token_ids for part in output.outputs] for output in outputs]


def alone(llm: LLM, batch: list[list[int]], sampling: list[SamplingParams]) -> list[RequestOutput]:
    """The same requests, one after the other."""
    return [llm.generate(p, s)[0] for p, s in zip(batch, sampling, strict=True)]


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, every page is free or only remembered, and the books agree."""
    stats = llm.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], stats
    assert stats["running"] == stats["waiting"] == stats["pages_live"] == 0
    assert llm.engine.check() == []
    assert stats.get("invariant_failures", 0) == 0
