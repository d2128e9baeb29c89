"""GPU kernels under the whole engine, in JAX's interpreter: the same ids as the XLA path gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from driving import run, texts
from tiny import GOLDEN, TINY, assert_idle, engine_over, greedy, prompts, tiny_config, tiny_runner, token_ids

import pallas_kernels
from jaxinfer import LLM
from jaxinfer.config import LayerConfig, ModelConfig, StepShape, invariant_ladder
from jaxinfer.core import ConfigError, RequestOutput, SamplingParams
from pallas_kernels import CPU, Backend, Geometry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

TRITON = Backend("pallas_triton", CPU, interpret=True)
LENGTHS = [5, 30, 17]
MIXED = tiny_config(layers=(LayerConfig(num_kv_heads=2), LayerConfig(num_kv_heads=4)))
"""Layers whose kernels want query tiles of other sizes, which one batch serves."""


def ladder(backend: Backend, config: ModelConfig, kv_dtype: str) -> tuple[StepShape, ...]:
    geometries = [
        Geometry(config.num_heads, layer.num_kv_heads, config.head_dim, 8, "float32", kv_dtype)
        for layer in config.layers
    ]
    tiles = pallas_kernels.query_tiles(backend, *geometries)
    return (StepShape(4, 4, 0, tiles=tiles), StepShape(36, 4, 4, tiles=tiles))


def answers(backend: Backend, config: ModelConfig, kv_dtype: str) -> list[RequestOutput]:
    runner = tiny_runner(config, ladder=ladder(backend, config, kv_dtype), backend=backend, kv_dtype=kv_dtype)
    llm = engine_over(runner)
    outputs = llm.generate(prompts(LENGTHS), greedy(6, logprobs=0, n=2))
    assert_idle(llm)
    return outputs


def chosen(outputs: list[RequestOutput]) -> np.ndarray:
    return np.asarray([part.cumulative_logprob for output in outputs for part in output.outputs])


@pytest.mark.parametrize(
    ("config", "kv_dtype"),
    [
        (TINY, "float32"),
        (tiny_config(window=12), "float32"),
        (MIXED, "float32"),
        (TINY, "int8"),
        (TINY, "float8_e4m3fn"),
    ],
    ids=["float32", "window", "mixed layers", "int8", "float8"],
)
def test_triton_gives_the_ids_of_xla(config: ModelConfig, kv_dtype: str) -> None:
    got, expected = answers(TRITON, config, kv_dtype), answers(Backend("xla"), config, kv_dtype)
    assert token_ids(got) == token_ids(expected)
    np.testing.assert_allclose(chosen(got), chosen(expected), atol=1e-3)


def tiles_of(backend: Backend, kv_heads: int) -> tuple[int, ...]:
    return pallas_kernels.query_tiles(backend, Geometry(8, kv_heads, 16, 8, "float32", "float32"))


def test_the_mixed_layers_want_other_tiles() -> None:
    assert tiles_of(TRITON, 2) != tiles_of(TRITON, 4)


@pytest.mark.parametrize("config", [TINY, MIXED, tiny_config(window=19)], ids=["plain", "mixed", "window"])
def test_triton_under_the_invariant_ladder(config: ModelConfig) -> None:
    """The same rows in two chunkings, alone and together: ids and logprobs are equal to the last bit."""
    ladder = invariant_ladder(4, 32, min(tiles_of(TRITON, 2), tiles_of(TRITON, 4)))
    runner = tiny_runner(config, ladder=ladder, backend=TRITON)
    batch = prompts([5, 44, 17])
    asked = [SamplingParams(temperature=t, logprobs=2) for t in (0, 0.8, 1)]
    alone = texts(runner, batch, asked)
    for text in alone:
        run(runner, [text], 6)
    together, counts = texts(runner, batch, asked, seed=1), itertools.cycle((1, 7, 16, 3))
    run(runner, together, 6, chunk=lambda: next(counts))
    for one, other in zip(together, alone, strict=True):
        assert len(one.sampled) == 6
        assert one.sampled == other.sampled, f"text {one.uid}"


def test_interpret_kernels_is_a_field_of_the_engine() -> None:
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 20}
    model = str(GOLDEN / "stories260k")
    ids = []
    for extra in ({}, {"attention_backend": "pallas_triton", "interpret_kernels": True}):
        llm = LLM(model, progress=False, **options, **extra)
        ids.append(token_ids(llm.generate([[1, 2, 3, 4, 5]], greedy(5))))
        llm.close()
    assert ids[0] == ids[1]


def test_a_backend_that_does_not_serve_this_machine_is_refused_with_its_reason() -> None:
    model = str(GOLDEN / "stories260k")
    for name in ("pallas_mosaic", "pallas_triton", "cudnn"):
        with pytest.raises(ConfigError, match=f"attention backend '{name}' does not serve cpu: "):
            LLM(model, attention_backend=name, progress=False)
    with pytest.raises(ConfigError, match=r"'xla' does not serve cpu: there is no kernel in it to interpret"):
        LLM(model, attention_backend="xla", interpret_kernels=True, progress=False)
