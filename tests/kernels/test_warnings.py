"""What JAX is about to remove reaches no user, but for the one backend that is built on it and says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tiny import GOLDEN

ATTEND = """
import warnings
import jax, jax.numpy as jnp, numpy as np
import pallas_kernels
from pallas_kernels import Backend, Device, cases

h200 = Device("gpu", (9, 0), "NVIDIA H200", 132)
backend = Backend({backend!r}, h200)
case = cases.StepCase(8, 2, 64, 16, 4, decode_rows=2, chunk_tokens=32, chunk_rows=1, dtype="bfloat16")
tiles = pallas_kernels.query_tiles(backend, case.geometry)
step = cases.build(case, (20, 33), ((0, 20),), tiles=tiles)
attend = jax.jit(lambda q, k, v, batch: pallas_kernels.paged_attention(
    q, k, v, batch, decode_rows=2, rule=case.rule, backend=backend))
device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    attend.trace(*step[:4]).lower(lowering_platforms=("cuda",))
print("lowered")
"""
SERVE = """
from jaxinfer import LLM, SamplingParams
llm = LLM({model!r}, progress=False, max_model_len=64, num_pages=20, max_num_seqs=2, kv_cache_dtype="int8",
          quantization="int8")
print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids and "served")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        capture_output=True, text=True, timeout=300, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["xla", "pallas_mosaic"])
def test_attention_for_a_gpu_is_lowered_without_a_warning(backend: str) -> None:
    done = run(ATTEND.format(backend=backend))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "lowered\n"


def test_triton_says_that_it_will_be_removed() -> None:
    done = run(ATTEND.format(backend="pallas_triton"))
    assert done.returncode != 0
    assert "DeprecationWarning: The Pallas Triton backend is deprecated" in done.stderr, done.stderr[-2000:]


def test_an_engine_serves_without_a_warning() -> None:
    done = run(SERVE.format(model=str(GOLDEN / "stories260k")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "served\n"
