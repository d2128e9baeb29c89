"""What the compiler prints is read right. The texts are in its form, made small."""

from __future__ import annotations

import pytest

from gpu_check import hlo
from gpu_check.report import Kernel, Report, read_ptxas, read_thunks
from gpu_check.targets import CHECKED, TARGETS

THUNKS = """\
001: kCopy         [source       | next=003 (2)] kCopy
002: kCustomKernel [prev=001 (1) | next=003 (1)] gemm_fusion_dot_3 grid: [1536, 1, 1] threads: [64, 1, 1]  \
shared_memory: 768 bytes
003: kWhile        [prev=002 (1)  | next=006 (1)  ]
condition:
    004: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]  \
shared_memory: 0 bytes
  body:
    005: kCustomKernel [source | sink] input_reduce_fusion grid: [4, 1, 1] threads: [256, 1, 1]  \
shared_memory: 32 bytes
006: kSequential   [prev=003 (1)  | sink          ]
    007: kDynamicSliceFusion [source | sink] params=5, results=3
        008: kCustomCall [source | sink] kCustomCall
"""

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm_fusion_dot_3' for 'sm_90a'
ptxas info    : Function properties for gemm_fusion_dot_3
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 46 registers, used 1 barriers
ptxas info    : Compile time = 31.451 ms
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    96 bytes stack frame, 88 bytes spill stores, 96 bytes spill loads
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 96 bytes cumulative stack size, 1024 bytes smem
"""


def test_thunks_are_counted_by_kind_and_loops_once() -> None:
    thunks = read_thunks(THUNKS)
    assert thunks.kinds == {"kCopy": 1, "kCustomKernel": 3, "kCustomCall": 1}
    assert thunks.loops == 1
    assert thunks.shared["gemm_fusion_dot_3"] == 768
    assert thunks.shared["input_reduce_fusion"] == 32


def test_registers_spills_and_shared_memory_by_kernel() -> None:
    kernels = read_ptxas(PTXAS, "xla", {"gemm_fusion_dot_3": 768})
    assert kernels == [
        Kernel("gemm_fusion_dot_3", "xla", 46, 0, 768),
        Kernel("kernel", "xla", 255, 88 + 96 + 4 + 8, 1024),
    ]


def test_a_report_survives_json() -> None:
    report = Report("case", "h200", kinds={"kCopy": 2}, kernels=read_ptxas(PTXAS, "xla"), copies=["copy a"])
    assert Report.from_json(report.to_json()) == report
    assert report.to_json()["launches"] == report.launches == 2
    assert (report.most_registers, report.spill_bytes) == (255, 196)


def test_every_target_is_text_with_its_own_facts() -> None:
    assert set(CHECKED) <= set(TARGETS)
    assert TARGETS["h200"].architecture == "sm_90a"
    assert TARGETS["l4"].architecture == "sm_89"
    for target in TARGETS.values():
        assert f'name: "{target.kind}"' in target.text
        assert f"core_count: {target.cores}\n" in target.text
        assert f"shared_memory_per_block_optin: {target.shared_per_block}\n" in target.text
        assert target.shared_per_block < target.shared_per_core


# ------------------------------------------------------------------------------------------- copies

PAGES, SMALL = "bf16[512,8,16,128]{3,2,1,0}", "bf16[8,8,16,128]{3,2,1,0}"
LEAST = 2 * 512 * 8 * 16 * 128

FUSIONS = f"""\
HloModule jit_checked, is_scheduled=true

%fused_scatter (a: bf16[512,8,16,128], b: bf16[8,8,16,128], c: s32[8]) -> bf16[512,8,16,128] {{
  %a = {PAGES} parameter(0)
  %b = {SMALL} parameter(1)
  %c = s32[8,1]{{1,0}} parameter(2)
  ROOT %s = {PAGES} scatter(%a, %c, %b), to_apply=%region
}}

%fused_convert (a.1: bf16[512,8,16,128]) -> f32[512,8,16,128] {{
  %a.1 = {PAGES} parameter(0)
  ROOT %convert.1 = f32[512,8,16,128]{{3,2,1,0}} convert(%a.1)
}}

%fused_gather (a.2: bf16[512,8,16,128], b.2: s32[8]) -> bf16[8,8,16,128] {{
  %a.2 = {PAGES} parameter(0)
  %b.2 = s32[8]{{0}} parameter(1)
  ROOT %gather.2 = {SMALL} gather(%a.2, %b.2), offset_dims={{1,2,3}}
}}

%fused_dot (a.3: bf16[512,8,16,128], b.3: bf16[128]) -> f32[512,8,16,512] {{
  %a.3 = {PAGES} parameter(0)
  %b.3 = bf16[128,512]{{1,0}} parameter(1)
  ROOT %dot.3 = f32[512,8,16,512]{{3,2,1,0}} dot(%a.3, %b.3), lhs_contracting_dims={{3}}
}}
"""


def entry(*lines: str) -> hlo.Module:
    """A module whose entry has pages, small pages and indexes as its parameters."""
    parameters = (f"%p = {PAGES} parameter(0)", f"%n = {SMALL} parameter(1)", "%i = s32[8]{0} parameter(2)")
    body = "\n".join(f'  {line}, metadata={{op_name="jit(x)/calls=%none"}}' for line in (*parameters, *lines))
    return hlo.parse(
        f"{FUSIONS}\nENTRY %main (p: bf16[1], n: bf16[1], i: s32[8]) -> bf16[1] {{\n{body}\n}}\n"
    )


def found(module: hlo.Module) -> list[str]:
    return [copy.name for copy in hlo.copies(module, LEAST)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((f"ROOT %f = {PAGES} fusion(%p, %n, %i), kind=kInput, calls=%fused_scatter",), []),
        ((f"ROOT %f = {SMALL} fusion(%p, %i), kind=kLoop, calls=%fused_gather",), []),
        (("ROOT %f = f32[512,8,16,512]{3,2,1,0} fusion(%p, %n), kind=kCustom, calls=%fused_dot",), []),
        ((f"ROOT %c = {PAGES} copy(%p)",), ["c"]),
        (("%b = bf16[512,16384]{1,0} bitcast(%p)", "ROOT %c = bf16[512,16384]{0,1} copy(%b)"), ["c"]),
        (("ROOT %f = f32[512,8,16,128]{3,2,1,0} fusion(%p), kind=kLoop, calls=%fused_convert",), ["f"]),
        # What a copy gives is still the pool: a second copy of it counts too.
        ((f"%c = {PAGES} copy(%p)", f"ROOT %d = {PAGES} copy(%c)"), ["c", "d"]),
        # A scattered pool stays the pool, and what a product makes is none.
        (
            (
                f"%f = {PAGES} fusion(%p, %n, %i), kind=kInput, calls=%fused_scatter",
                f"ROOT %c = {PAGES} copy(%f)",
            ),
            ["c"],
        ),
        (
            (
                "%f = f32[512,8,16,512]{3,2,1,0} fusion(%p, %n), kind=kCustom, calls=%fused_dot",
                "ROOT %c = f32[512,8,16,512]{3,2,1,0} copy(%f)",
            ),
            [],
        ),
        # A kernel that writes into its operand gives the operand back.
        (
            (
                f'%k = ({PAGES}, f32[8]{{0}}) custom-call(%n, %p), custom_call_target="kernel", '
                "output_to_operand_aliasing={{0}: (1, {})}",
                f"%g = {PAGES} get-tuple-element(%k), index=0",
                f"ROOT %c = {PAGES} copy(%g)",
            ),
            ["c"],
        ),
    ],
)
def test_copies_of_an_argument(lines: tuple[str, ...], expected: list[str]) -> None:
    assert found(entry(*lines)) == expected


def test_copies_within_loops_and_calls() -> None:
    loop = f"""\
%async (a.5: bf16[512,8,16,128]) -> bf16[512,8,16,128] {{
  %a.5 = {PAGES} parameter(0)
  ROOT %hidden = {PAGES} copy(%a.5)
}}

%body (t: (s32[], bf16[512,8,16,128])) -> (s32[], bf16[512,8,16,128]) {{
  %t = (s32[], /*index=1*/{PAGES}) parameter(0)
  %n.1 = s32[] get-tuple-element(%t), index=0
  %start = (({PAGES}), {PAGES}, u32[]) fusion-start(%t#1), calls=%async
  %done = {PAGES} fusion-done(%start)
  ROOT %r = (s32[], {PAGES}) tuple(%n.1, %done)
}}
"""
    text = f"""{FUSIONS}
{loop}
ENTRY %main (p: bf16[1], z: s32[]) -> bf16[1] {{
  %p = {PAGES} parameter(0)
  %z = s32[] parameter(1)
  %u = (s32[], {PAGES}) tuple(%z, %p)
  %w = (s32[], {PAGES}) while(%u), condition=%cond, body=%body
  %o = {PAGES} get-tuple-element(%w), index=1
  ROOT %last = {PAGES} copy(%o)
}}
"""
    assert found(hlo.parse(text)) == ["hidden", "last"]


def test_small_arguments_are_not_followed() -> None:
    assert not found(entry(f"ROOT %c = {SMALL} copy(%n)"))
