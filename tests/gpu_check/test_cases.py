"""What is compiled is what an engine would run, and nothing in it is too small to be noticed. Programs are
made, none is compiled."""

from __future__ import annotations

import jax
import pytest

from gpu_check.aot import least_copy
from gpu_check.budgets import ROOM, failures
from gpu_check.cases import CASES, KERNELS, STEPS, WHOLE, Case
from gpu_check.programs import MAX_MODEL_LEN, Engine, programs, values_of
from gpu_check.report import Expected, Kernel, Report
from gpu_check.targets import CHECKED, TARGETS
from jaxinfer.config import EngineConfig, ModelConfig, shape_ladder
from jaxinfer.presets import PRESETS

PAIRS = [(name, target) for name, case in CASES.items() for target in case.targets]
ATTENTION = [(name, target) for name, target in PAIRS if name.startswith("attention/")]
PRODUCTS = [case for name, case in CASES.items() if name.startswith("quant_matmul/")]
LAYERS = 32


def size(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize


def test_steps_are_buckets_of_a_gpu_by_default() -> None:
    defaults = EngineConfig().on("gpu")
    assert defaults.max_num_seqs is not None
    assert defaults.max_num_batched_tokens is not None
    made = programs(Engine("pallas_mosaic"), TARGETS["h200"])
    sizes = defaults.max_num_seqs, defaults.max_num_batched_tokens
    assert made.ladder == shape_ladder(*sizes, made.ladder[0].tiles, "gpu")
    assert ModelConfig.from_hf(PRESETS["llama3-8b"]).max_position == MAX_MODEL_LEN
    buckets = [(shape.tokens, shape.decode_rows) for shape in made.ladder]
    assert set(STEPS.values()) <= set(buckets)
    assert STEPS["full"] == buckets[-1] == (256 + 2048, 256)
    assert STEPS["decode-256"] == (256, 256)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("step/pallas_mosaic/bfloat16/decode-256", {"h200", "l4"}),
        ("step/pallas_mosaic/bfloat16/full", {"h200", "l4"}),
        ("step/pallas_mosaic/bfloat16/decode-1", set(CHECKED)),
        ("step/pallas_triton/int8/decode-64", {"h200"}),
        ("step/pallas_triton/int8/full", {"h200"}),
        ("step/pallas_triton/float8_e4m3fn/decode-64", {"h200"}),
        ("step/pallas_mosaic/bfloat16/int8-weights/decode-1", {"h200"}),
        ("step/pallas_mosaic/bfloat16/int4-weights/decode-1", {"h200"}),
    ],
)
def test_whole_steps_are_compiled(name: str, targets: set[str]) -> None:
    assert targets <= set(CASES[name].targets)


@pytest.mark.parametrize(("name", "target"), ATTENTION)
def test_half_of_the_pages_that_attention_reads_are_a_copy(name: str, target: str) -> None:
    program = CASES[name].program(TARGETS[target])
    assert 2 * program.least <= size(values_of(program.arguments[1]))


def test_half_of_the_smallest_array_is_a_copy() -> None:
    large, small = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "int8")
    assert least_copy([large, small]) == 64 * 64 // 2


@pytest.mark.parametrize("kind", ["int8/decode-64", "int8/full"])
def test_int8_pages_bring_their_scales_into_the_pool(kind: str) -> None:
    program = CASES[f"step/pallas_triton/{kind}"].program(TARGETS["h200"])
    assert program.donate == program.pool == (1,)
    leaves = jax.tree.leaves(program.arguments[1])
    assert [x.dtype.name for x in leaves[:2]] == ["int8", "float32"]
    assert len(leaves) == 4 * LAYERS
    assert program.least <= min(size(x) for x in leaves) // 2


@pytest.mark.parametrize(("weights", "dtype"), [("int8", "int8"), ("int4", "uint8")])
def test_weights_of_few_bits_are_watched(weights: str, dtype: str) -> None:
    case = CASES[f"step/pallas_mosaic/bfloat16/{weights}-weights/decode-1"]
    program = case.program(TARGETS["h200"])
    narrow = [x for x in jax.tree.leaves(program.arguments[0]) if x.dtype == dtype]
    assert len(narrow) == 4 * LAYERS
    assert program.least <= min(size(x) for x in narrow) // 2


@pytest.mark.parametrize("case", PRODUCTS, ids=[case.name for case in PRODUCTS])
def test_no_copy_of_a_weight_fits_into_the_budget_of_a_product(case: Case) -> None:
    narrow = case.program(TARGETS["h200"]).arguments[1].values
    for target in case.targets:
        assert case.budget.at(target).temp_mib * 2**20 <= size(narrow) / 4


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_a_case_names_the_kernels_that_it_is_about(name: str, target: str) -> None:
    mosaic, triton = (
        [kernel.name for kernel in CASES[name].kernels(TARGETS[target]) if kernel.maker == maker]
        for maker in ("mosaic", "triton")
    )
    decodes, chunks = "decode" in name or "mixed" in name or "full" in name, "decode" not in name
    wanted = ["paged_decode"] * decodes
    if "pallas_mosaic" in name:
        wide = "wgmma" if target == "h200" else "mma"
        assert mosaic == wanted + [f"ragged_prefill_{wide}"] * chunks
    else:
        assert not mosaic
    if "pallas_triton" in name:
        assert triton == wanted + ["paged_prefill"] * chunks
    else:
        assert triton == ["int4_matmul"] * ("int4" in name)


def test_a_launch_more_in_each_layer_is_over_the_budget_of_a_step() -> None:
    for each in WHOLE:
        for target, (launches, temp_mib) in each.measured.items():
            report = Report(
                f"step/{each.engine}/{each.step}", target, temp_bytes=int(temp_mib * 2**20),
                kinds={"kCustomKernel": launches}, kernels=[Kernel("k", "xla", 32, 0)],
            )  # fmt: skip
            assert failures(report, each.budget) == []
            report.kinds["kCopy"] = LAYERS
            report.temp_bytes += report.temp_bytes // 4 + (4 << 20)
            kinds = [failure.partition(":")[0] for failure in failures(report, each.budget)]
            assert kinds == ["launches", "temp"]
    assert ROOM.launches < LAYERS


def test_every_kernel_is_compiled_with_every_type_of_pages() -> None:
    served = {(kernel.backend, kv_dtype) for kernel in KERNELS for kv_dtype in kernel.kv_dtypes}
    assert {("pallas_mosaic", "bfloat16"), ("pallas_triton", "int8"), ("xla", "int8")} <= served
    assert CASES["quant_matmul/int4/64"].kernels(TARGETS["l4"]) == (Expected("triton", "int4_matmul"),)
