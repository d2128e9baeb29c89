"""Quantised models: layers compute with what the rounded weights stand for, and nothing else changes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from dense import chunk_logits, dense_logits, paged_logits
from tiny import GOLDEN, TINY, Tensors, greedy, prompts, random_tensors, tiny_build, tiny_config

from jaxinfer import LLM
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model import weights
from jaxinfer.model.llama import Build
from jaxinfer.model.quantized import Quantization
from pallas_kernels import FORMATS, Backend, Device, Format, QuantizedWeight, dequantize, quantize

pytestmark = pytest.mark.usefixtures("compile_cache")

TOKENS = prompts([41])[0]
BIASED = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, num_layers=1)
BUILDS = {
    "blocks": Backend("xla"),
    "rows": Backend("xla", Device("gpu", (9, 0))),
    "kernel": Backend("pallas_triton", Device("cpu"), interpret=True),
}
"""The layout of a CPU and that of a GPU, and the kernel of the latter."""


def build(format: Format, name: str = "blocks") -> Build:
    platform = "cpu" if name == "blocks" else "gpu"
    plain = tiny_build(platform=platform)
    return Build(plain.dtype, platform, plain.attention_backend, Quantization(format, BUILDS[name]))


def is_rounded(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def rounded(tensors: dict[str, np.ndarray], format: Format) -> dict[str, np.ndarray]:
    """The checkpoint with the layers' products replaced by what their quantised weights stand for."""
    return {
        name: np.asarray(dequantize(quantize(tensor, format))) if is_rounded(name) else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("format", "name"), [*((f, n) for f in FORMATS for n in ("blocks", "rows")), ("int4", "kernel")]
)
def test_logits_are_those_of_the_dequantised_weights(format: Format, name: str) -> None:
    """And not those of the weights before: rounding shows, and everything else is as it was."""
    tensors = random_tensors(BIASED)
    graph, state = weights.load_params(BIASED, build(format, name), Tensors(tensors))
    expected = dense_logits(BIASED, rounded(tensors, format), TOKENS)
    got = chunk_logits(BIASED, graph, state, TOKENS)
    assert np.abs(got - expected).max() < 2e-4
    assert np.abs(got - dense_logits(BIASED, tensors, TOKENS)).max() > 20 * 2e-4
    if name == "blocks" and format == "int4":
        got = paged_logits(BIASED, graph, state, TOKENS, [16, 1, 7, 1, 1, 15])
        assert np.abs(got - expected).max() < 2e-4


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_any_size_give_the_same_parameters(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Tensors(random_tensors(BIASED))
    whole = weights.load_params(BIASED, build(format), source)[1]
    random = weights.random_params(BIASED, build(format), 3)[1]
    monkeypatch.setattr(weights, "READ_BYTES", 3000)
    jax.tree.map(np.testing.assert_array_equal, whole, weights.load_params(BIASED, build(format), source)[1])
    jax.tree.map(np.testing.assert_array_equal, random, weights.random_params(BIASED, build(format), 3)[1])


def test_random_weights_are_the_unquantised_ones_rounded() -> None:
    """On CPU, where both come from the host's generator."""
    plain = dict(jax.tree.leaves_with_path(weights.random_params(TINY, tiny_build(), 3)[1]))
    quantised = dict(jax.tree.leaves_with_path(weights.random_params(TINY, build("int8"), 3)[1]))
    compared = 0
    for path, value in quantised.items():
        if value.dtype == np.int8:
            (scales,) = (v for p, v in quantised.items() if "scales" in str(p) and p[:-2] == path[:-2])
            held = dequantize(QuantizedWeight(value, scales))
            rows = np.asarray(plain[path]).transpose(0, 2, 1).reshape(held.shape)  # out of its blocks
            np.testing.assert_array_equal(held, dequantize(quantize(rows, "int8")))
            compared += 1
        elif path in plain:
            np.testing.assert_array_equal(value, plain[path])
    assert compared == 4 * TINY.num_layers


def test_weights_over_several_devices_are_refused_by_name() -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ConfigError, match="quantization 'int8' of weights that lie on several devices"):
        weights.load_params(TINY, build("int8"), Tensors(random_tensors(TINY)), sharding=lambda p: one)


def config_file(folder: Path, **changes: Any) -> str:
    """random:CONFIG of a small model, with keys of config.json changed."""
    config = json.loads((GOLDEN / "grid" / "llama_gqa" / "config.json").read_text())
    path = folder / "config.json"
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    path.write_text(json.dumps({**config, **shape, "num_key_value_heads": 2, **changes}))
    return f"random:{path}"


def llm(model: str, quantization: Format | None, **options: Any) -> LLM:
    return LLM(
        model, quantization=quantization, attention_backend="xla", max_num_seqs=1, num_pages=80,
        progress=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_through_the_front_door(format: Format, tmp_path: Path) -> None:
    """Random weights, text in and text out; the parameters take what the format says."""
    model = config_file(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    front_door = llm(model, format, max_num_batched_tokens=16)
    output = front_door.generate([[1, 2, 3, 4, 5]], greedy(4))[0]
    assert len(output.outputs[0].token_ids) == 4
    held = quantised = 0
    for parameter in weights.parameters(config):
        size = parameter.outputs * math.prod(parameter.shapes[0][1:])
        if not parameter.quantizable:
            held += 4 * size
        elif format == "int4":
            quantised += size // 2 + 4 * size // 64
        else:
            quantised += size + 4 * parameter.outputs
    assert front_door.stats()["param_bytes"] == held + quantised


def test_what_int4_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    model = config_file(tmp_path, intermediate_size=200)
    with pytest.raises(
        ConfigError, match=r"'int4' needs weights whose inputs are a multiple of 32.*200 inputs"
    ):
        llm(model, "int4")
    llm(model, "int8")


LICENSE = Path(__file__).parent.parent.parent / "LICENSE"
BOUNDS: dict[Format, float] = {"int8": 1.01, "int4": 1.4}
"""Of the perplexity relative to float32. 4 bits cost this much on a model of 135M whose file holds numbers of
4 bits on another grid (Q4_1) already; docs/log.md has the figures, those of fp8 too."""


@pytest.mark.slow
@pytest.mark.model
def test_perplexity_of_the_real_model(smollm2_path: Path) -> None:
    """The same text by each: 8 bits are all but free."""
    text = LICENSE.read_text()[500:1400]
    options = {"max_num_batched_tokens": 128, "max_model_len": 512}
    plain = llm(str(smollm2_path), None, **options)
    expected, size = plain.score(text)[0].perplexity, plain.stats()["param_bytes"]
    for format, bound in BOUNDS.items():
        quantised = llm(str(smollm2_path), format, **options)
        perplexity = quantised.score(text)[0].perplexity
        print(f"\n{format}: {perplexity:.3f} against {expected:.3f}, {perplexity / expected - 1:+.2%}")
        assert expected / 1.02 < perplexity < bound * expected, format
        assert quantised.stats()["param_bytes"] < 0.42 * size
