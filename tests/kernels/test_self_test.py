"""What a backend must compute before a model is served by it on a GPU, and what happens when it does not."""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp
import pytest
from tiny import GOLDEN

import pallas_kernels
from jaxinfer import LLM
from jaxinfer.core import ConfigError
from pallas_kernels import CPU, Backend, Device, Geometry, self_test, xla

pytestmark = pytest.mark.usefixtures("compile_cache")

SMALL = Geometry(4, 2, 16, 8, "float32", "float32")
NUMBER = iter(range(100))


def fresh() -> Backend:
    """An xla backend that no compiled program knows."""
    return Backend("xla", dataclasses.replace(CPU, kind=f"cpu {next(NUMBER)}"))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_a_right_backend_passes(kv_dtype: str) -> None:
    geometry = dataclasses.replace(SMALL, kv_dtype=kv_dtype)
    assert self_test.failures(fresh(), [geometry], [None, 9]) == ""


def test_page_sizes_of_any_kind() -> None:
    for page_size in (1, 4, 128):
        assert self_test.failure(fresh(), dataclasses.replace(SMALL, page_size=page_size)) == ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda out: out * 1.1, "is off by"),
        (lambda out: out.at[0].set(jnp.nan), "not finite"),
        (lambda out: out.at[2].set(1.0), "where padding is"),
    ],
)
def test_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch, fault, told: str) -> None:
    right = xla.paged_attention
    monkeypatch.setattr(xla, "paged_attention", lambda *args, **options: fault(right(*args, **options)))
    assert told in self_test.failure(fresh(), SMALL)


def test_a_kernel_that_crashes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args, **options):
        raise RuntimeError("ptxas died\nof something")

    monkeypatch.setattr(xla, "paged_attention", crash)
    assert self_test.failure(fresh(), SMALL) == "does not run: RuntimeError: ptxas died"


def test_auto_passes_over_what_fails_on_this_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU where no Pallas kernel runs: each is tried, told of, and xla serves."""
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, _: cls("gpu", (9, 0), "NVIDIA Fake", 132)))
    options = {"max_model_len": 64, "max_num_seqs": 2, "num_pages": 20, "progress": False}
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(GOLDEN / "stories260k"), **options)
    geometry = Geometry(8, 4, 8, 16, "float32", "float32")
    tried = [
        name
        for name in pallas_kernels.BACKENDS[: pallas_kernels.BACKENDS.index("xla")]
        if not pallas_kernels.backends(Device("gpu", (9, 0), "NVIDIA Fake", 132), geometry)[name]
    ]
    told = [record.getMessage() for record in caplog.records if "fails its test" in record.getMessage()]
    assert [message.split("'")[1] for message in told] == tried
    assert len(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0
    llm.close()
    if tried:
        with pytest.raises(ConfigError, match=f"'{tried[0]}' fails its test on NVIDIA Fake: it does not run"):
            LLM(str(GOLDEN / "stories260k"), attention_backend=tried[0], **options)
