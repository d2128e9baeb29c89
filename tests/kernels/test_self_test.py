"""What a backend must compute before a model is served by it on a GPU, and what happens when it does not."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp
import pytest
from tiny import GOLDEN, TINY

import pallas_kernels
from jaxinfer import LLM
from jaxinfer.config import EngineConfig
from jaxinfer.core import ConfigError
from jaxinfer.runtime.backends import choose_quantization
from pallas_kernels import CPU, FORMATS, Backend, Device, Geometry, matmul, self_test, xla
from pallas_kernels.quantized import Format

pytestmark = [
    pytest.mark.usefixtures("compile_cache"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

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
    for page_size in (1, 128):
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


def _lost_page(batch: Any) -> Any:
    """Page 100 of the row of 2048 keys in pages of 16, 128 of them."""
    return dataclasses.replace(batch, page_table=batch.page_table.at[1, 100].set(0))


def _wrong_page(batch: Any) -> Any:
    return dataclasses.replace(batch, page_table=batch.page_table.at[1, 100].set(batch.page_table[4, 100]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fault", [_lost_page, _wrong_page])
def test_one_page_of_many_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Any, dtype: str) -> None:
    geometry, whole = Geometry(4, 2, 64, 16, dtype, dtype), xla.paged_attention
    monkeypatch.setattr(
        xla, "paged_attention", lambda q, k, v, batch, **options: whole(q, k, v, fault(batch), **options)
    )
    assert "is off by" in self_test.failure(fresh(), geometry)


def test_a_window_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 4096 too, although the rows have no more than 2048 keys."""
    whole = xla.paged_attention

    def blind(*step: Any, rule: Any, **options: Any) -> Any:
        return whole(*step, rule=dataclasses.replace(rule, window=2 * rule.window), **options)

    monkeypatch.setattr(xla, "paged_attention", blind)
    assert "is off by" in self_test.failure(fresh(), SMALL, 4096)


def test_parts_of_a_row_and_their_merge_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter of a GPU with 8 multiprocessors: a kernel of four parts a row, each of several
    blocks, passes; one that loses a block late in a part, or merges wrongly, does not."""
    pytest.importorskip("pallas_kernels.pallas_triton")
    from pallas_kernels.pallas_triton import common, decode

    def backend() -> Backend:
        return Backend("pallas_triton", Device("cpu", kind=f"cpu {next(NUMBER)}", num_cores=8), True)

    geometry, shapes, merge, find = (
        Geometry(4, 2, 16, 16, "float32", "float32"),
        [],
        decode._merge,
        common.find,
    )

    def watched(out: Any, largest: Any, total: Any) -> Any:
        shapes.append(out.shape)
        return merge(out, largest, total)

    monkeypatch.setattr(decode, "_merge", watched)
    assert self_test.failure(backend(), geometry) == ""
    assert shapes == [(5, 4, 4, 16)]
    monkeypatch.setattr(decode, "_merge", lambda out, largest, total: merge(out, 0 * largest, total))
    assert "is off by" in self_test.failure(backend(), geometry)
    monkeypatch.setattr(decode, "_merge", merge)

    def lossy(table_ref: Any, row: Any, keys: Any, wanted: Any, page_size: int) -> Any:
        return find(table_ref, row, keys, wanted & (keys // 16 != 31), page_size)

    monkeypatch.setattr(common, "find", lossy)
    assert "is off by" in self_test.failure(backend(), geometry)


def test_a_kernel_that_crashes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args, **options):
        raise RuntimeError("ptxas died\nof something")

    monkeypatch.setattr(xla, "paged_attention", crash)
    assert self_test.failure(fresh(), SMALL) == "does not run: RuntimeError: ptxas died"


def triton_matmul() -> Backend:
    return Backend("pallas_triton", Device("cpu", kind=f"cpu {next(NUMBER)}", num_cores=2), interpret=True)


@pytest.mark.parametrize("format", FORMATS)
def test_right_products_pass(format: Format) -> None:
    for dtype in ("float32", "bfloat16"):
        assert self_test.matmul_failure(fresh(), format, dtype) == ""
    if format == "int4":
        assert self_test.matmul_failure(triton_matmul(), format, "bfloat16") == ""


def test_wrong_products_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("pallas_kernels.pallas_triton_matmul")
    right = module.int4_matmul

    def one_scale(x: Any, weight: Any, **options: Any) -> Any:
        scales = weight.scales.at[1, -1].set(weight.scales[2, -1])
        return right(x, weight._replace(scales=scales), **options)

    monkeypatch.setattr(module, "int4_matmul", one_scale)
    assert "is off by" in self_test.matmul_failure(triton_matmul(), "int4", "bfloat16")

    def crash(*_: Any, **options: Any) -> Any:
        raise RuntimeError("ptxas died\nof something")

    monkeypatch.setattr(module, "int4_matmul", crash)
    told = self_test.matmul_failure(triton_matmul(), "int4", "bfloat16")
    assert told == "does not run: RuntimeError: ptxas died"
    h200 = Device("gpu", (9, 0), "NVIDIA H200", 132)
    assert matmul.resolve_matmul("int4", h200).name == "pallas_triton"
    assert matmul.resolve_matmul("int4", h200, without=("pallas_triton",)).name == "xla"
    with pytest.raises(NotImplementedError, match="passed over: pallas_triton, xla"):
        matmul.resolve_matmul("int4", h200, without=("pallas_triton", "xla"))


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


def test_a_product_that_fails_on_this_gpu_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """int4's kernel cannot run here: XLA multiplies instead, and the log says why."""
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, _: cls("gpu", (9, 0), "NVIDIA Fake", 132)))
    config = EngineConfig(quantization="int4").on("cpu")
    with caplog.at_level(logging.WARNING):
        chosen = choose_quantization(config, TINY)
    assert chosen is not None
    assert chosen.backend.name == "xla"
    assert (
        "products of int4 weights by pallas_triton fail their test on NVIDIA Fake: it does not run"
        in caplog.text
    )
