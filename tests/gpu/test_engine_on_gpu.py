"""The whole engine on the device: against the CPU, backend against backend, and with weights of few bits."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gpu.serving import serving
from runtime.driving import run, texts
from tiny import Tensors, engine_over, greedy, prompts, random_tensors, tiny_config

from jaxinfer import LLM, RequestOutput
from jaxinfer.config import invariant_ladder, shape_ladder
from jaxinfer.core import SamplingParams
from jaxinfer.model import weights
from jaxinfer.model.llama import Build
from jaxinfer.runtime import JaxRunner
from pallas_kernels import Backend, Device, Geometry, query_tiles

CONFIG = tiny_config(hidden_size=128, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=192)
LENGTHS = [3, 17, 40, 64, 5]
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Of a logprob. bfloat16 keeps 8 bits at each of some 20 roundings on the way, and logits reach 15: on CPU
its logprobs are up to 0.07 from those of float32."""


def geometry(dtype: str, kv_dtype: str = "") -> Geometry:
    kv_heads = CONFIG.layers[0].num_kv_heads
    return Geometry(CONFIG.num_heads, kv_heads, CONFIG.head_dim, 16, dtype, kv_dtype or dtype)


def runner_of(
    platform: str, backend: Backend, dtype: str, kv_dtype: str = "", ladder: str = "gpu"
) -> JaxRunner:
    """A runner over the same weights wherever it runs. `ladder`: of which platform, or "invariant"."""
    build = Build(jax.numpy.dtype(dtype), platform, backend)
    graph, state = weights.load_params(CONFIG, build, Tensors(random_tensors(CONFIG)))
    tiles = query_tiles(backend, geometry(dtype, kv_dtype))
    shapes = invariant_ladder(4, 32, tiles) if ladder == "invariant" else shape_ladder(4, 32, tiles, ladder)
    return JaxRunner(
        CONFIG, graph, state, shapes, num_pages=65, page_size=16, max_model_len=128,
        kv_dtype=kv_dtype or dtype, platform=platform,
    )  # fmt: skip


def engine(platform: str, backend: Backend, dtype: str, **options: Any) -> LLM:
    return engine_over(runner_of(platform, backend, dtype, **options))


def answers(llm: LLM) -> list[RequestOutput]:
    asked = dataclasses.replace(greedy(8), logprobs=2, prompt_logprobs=0)
    return llm.generate(prompts(LENGTHS, vocab_size=CONFIG.vocab_size), asked)


def assert_alike(got: list[RequestOutput], expected: list[RequestOutput], tolerance: float) -> None:
    """The same logprobs of the prompt's tokens, and the same greedy ids with theirs. Where an id is another,
    the two best must have been closer than the tolerance; what follows has another text before it."""
    compared = 0
    for mine, other in zip(got, expected, strict=True):
        assert mine.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for ours, theirs in zip(mine.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            ((token, one),), ((same, two),) = (ours or {}).items(), (theirs or {}).items()
            assert token == same
            assert abs(one.logprob - two.logprob) <= tolerance
            compared += 1
        (a,), (b,) = mine.outputs, other.outputs
        assert a.finish_reason == b.finish_reason == "length"
        for ours, theirs, first, second in zip(
            a.token_ids, b.token_ids, a.logprobs or (), b.logprobs or (), strict=True
        ):
            best = sorted((one.logprob for one in second.values()), reverse=True)
            if ours != theirs:
                assert best[0] - best[1] <= tolerance, f"{ours} is not {theirs}, with logprobs {best}"
                break
            assert abs(first[ours].logprob - second[ours].logprob) <= tolerance
            compared += 1
    assert compared > sum(LENGTHS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_backend_answers_as_the_cpu_does(device: Device, dtype: str) -> None:
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        expected = answers(engine("cpu", Backend("xla"), "float32", ladder="cpu"))
    backends = serving(device, geometry(dtype))
    assert "xla" in [backend.name for backend in backends]
    for backend in backends:
        with jax.default_matmul_precision("highest"):  # of float32 products: a GPU would use TF32
            got = answers(engine(device.platform, backend, dtype))
        assert_alike(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_narrow_pages_answer_nearly_so(device: Device, kv_dtype: str) -> None:
    """The same rounding of K and V in every backend: they differ by no more than with wide pages."""
    xla = answers(engine(device.platform, Backend("xla", device), "bfloat16", kv_dtype=kv_dtype))
    for backend in serving(device, geometry("bfloat16", kv_dtype)):
        got = answers(engine(device.platform, backend, "bfloat16", kv_dtype=kv_dtype))
        assert_alike(got, xla, 2 * TOLERANCE["bfloat16"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_runs_do_not_depend_on_the_chunks(device: Device, dtype: str) -> None:
    """Every backend, the whole engine's programs: each text alone in few chunks, and all together in small
    ones, give the same ids and logprobs to the last bit."""
    asked = [SamplingParams(temperature=t, logprobs=2) for t in (0, 0.8, 0, 1)]
    batch = prompts([5, 60, 17, 33], vocab_size=CONFIG.vocab_size)
    for backend in serving(device, geometry(dtype)):
        runner = runner_of(device.platform, backend, dtype, ladder="invariant")
        alone = texts(runner, batch, asked)
        for text in alone:
            run(runner, [text], 6)
        together, counts = texts(runner, batch, asked, seed=1), itertools.cycle((1, 7, 16, 3))
        run(runner, together, 6, chunk=lambda counts=counts: next(counts))
        for one, other in zip(together, alone, strict=True):
            assert one.sampled == other.sampled, f"{backend.name}: {one.uid}"


def random_model(folder: Path) -> str:
    """Of weights that the device draws for itself."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 512,
        "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return f"random:{folder}"


OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 65, "page_size": 16,
    "max_model_len": 128, "progress": False,
}  # fmt: skip


def test_a_random_model_runs_on_every_backend(device: Device, tmp_path: Path) -> None:
    """LLM("random:...") as a user says it, greedy: the ids of xla, or a tie."""
    model = random_model(tmp_path)
    expected = answers(LLM(model, attention_backend="xla", **OPTIONS))
    for backend in serving(device, Geometry(4, 2, 64, 16)):
        llm = LLM(model, attention_backend=backend.name, interpret_kernels=backend.interpret, **OPTIONS)
        assert_alike(answers(llm), expected, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_weights_run(device: Device, tmp_path: Path, quantization: str) -> None:
    """Logprobs stay near those of weights that are not; how near is tests/model's to say."""
    model = random_model(tmp_path)
    from pallas_kernels.matmul import matmul_unsupported

    if reason := matmul_unsupported(quantization, device):  # type: ignore[arg-type]
        pytest.skip(reason)
    got = answers(LLM(model, quantization=quantization, **OPTIONS))
    assert all(np.isfinite(output.outputs[0].cumulative_logprob or np.nan) for output in got)
    again = answers(LLM(model, quantization=quantization, **OPTIONS))
    assert [output.outputs[0].token_ids for output in got] == [
        output.outputs[0].token_ids for output in again
    ]


def test_the_step_updates_the_pool_in_place(device: Device) -> None:
    """After some steps the pages lie where they lay: nothing was copied, nothing allocated anew."""
    for backend in serving(device, geometry("bfloat16")):
        llm = engine(device.platform, backend, "bfloat16")
        runner: Any = llm.engine.runner
        before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(runner.kv)]
        answers(llm)
        assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(runner.kv)] == before, backend.name
