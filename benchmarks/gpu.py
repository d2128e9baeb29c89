"""The whole engine on a GPU, against what the same device was measured to do in the same run.

    python -m benchmarks.gpu random:llama3-8b [--parts start,decode,saturated,long,prefill] [--quick]
                                              [--backend auto --kv auto --quantization int8 --revision R]

limits      bandwidth of a copy and rate of a bfloat16 product, as pallas_kernels.bench measures them
start       two processes, with an empty and then a warm compile cache: seconds to the first token, and of
            compiling
decode      one stream; 64 streams at 512, 2048 and 3328 tokens of context: time of a step, its floor, the
            slope over the context, how long the device is idle
saturated   512 requests of 1000 + 1000 tokens at once, at most 256 of them running
long        8 requests of 20 000 + 2000 tokens
prefill     one prompt of 2048, 8192, 32 768 tokens

MBU: bytes of weights and of K/V that a step must read, over its time, over the copy bandwidth. MFU:
operations over time over the matmul rate. `floor` is the larger of both times. --quick divides lengths and
counts by 8; --tiny runs everything in sizes for a CPU, which proves this program and nothing else. The last
line of stdout is one JSON object. A part that fails says why under "failed", those of another engine are run,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PARTS = ("start", "decode", "saturated", "long", "prefill")
TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 512,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rope_theta": 10000.0,
}  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help='random:PRESET, or what LLM takes; "random:tiny" with --tiny')
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step; long, prefill: 4 x")
    parser.add_argument("--revision", default="", help="where git does not tell it")
    parser.add_argument("--output", type=Path, help="append every part there as it comes")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.parts = given.parts.split(",")
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    given.scale = 64 if given.tiny else 8 if given.quick else 1
    given.budget = given.budget // 64 if given.tiny else given.budget
    return given


def model_of(name: str, longest: int, folder: Path) -> str:
    """The MODEL argument. A preset is given positions enough for `longest`, which Llama 3's own do not reach:
    of random weights only the shapes matter."""
    from jaxinfer.presets import PRESETS

    shape = {**PRESETS, "tiny": TINY}.get(name.removeprefix("random:"))
    if not name.startswith("random:") or shape is None:
        return name
    config = {**shape, "max_position_embeddings": max(longest, shape.get("max_position_embeddings", 0))}
    (folder / "config.json").write_text(json.dumps(config))
    return f"random:{folder}"


def options(given: argparse.Namespace, *, most: int, longest: int, budget: int) -> dict[str, Any]:
    """Keywords of LLM."""
    chosen: dict[str, Any] = {
        "dtype": given.dtype or ("float32" if given.tiny else "bfloat16"), "kv_cache_dtype": given.kv,
        "attention_backend": given.backend, "page_size": given.page_size, "max_num_seqs": most,
        "max_model_len": longest, "max_num_batched_tokens": budget, "progress": False,
    }  # fmt: skip
    if given.quantization:
        chosen["quantization"] = given.quantization
    return chosen


def start(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the start of a process to the first token, with an empty compile cache and with a warm
    one."""
    result = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.gpu", *given.given, "--child", cache]
            began = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=540)
            if done.returncode:
                return {**result, "failed": f"the {name} process ended with {done.returncode}"}
            told = json.loads(done.stdout.strip().splitlines()[-1])
            result[name] = {"process_s": time.perf_counter() - began, **told}
    return result


def child(given: argparse.Namespace) -> dict[str, float]:
    """What one process of `start` does: load, and generate a little."""
    began = time.perf_counter()
    from jaxinfer import LLM, SamplingParams

    longest = 512 if given.tiny else 4096
    with tempfile.TemporaryDirectory() as folder:
        name = model_of(given.model, longest, Path(folder))
        chosen = options(given, most=8, longest=longest, budget=given.budget)
        imported = time.perf_counter()
        llm = LLM(name, compile_cache_dir=given.child, **chosen)
    loaded = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate([list(range(1, 9))], params)
    first = time.perf_counter()
    llm.generate([list(range(1, 9))], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    stats = llm.stats()
    return {
        "import_s": imported - began, "load_s": loaded - imported, "first_token_s": first - began,
        "compile_s": stats["compile_s"], "programs": stats["programs"],
    }  # fmt: skip


def limits(given: argparse.Namespace) -> dict[str, Any]:
    """The device and its limits, measured by a worker of the kernels' bench in a process of its own."""
    from pallas_kernels.bench.children import work
    from pallas_kernels.bench.rows import Options

    jobs, chosen = [{"number": 0, "kind": "limits"}], Options(budget=0.1 if given.tiny else 1.0)
    (row,) = work(jobs, chosen, tiny=given.tiny, timeout=120, deadline=time.monotonic() + 120)
    assert "copy" in row, f"the device's limits could not be measured: {row.get('reason')}"
    return row


def run(given: argparse.Namespace, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Every part asked for; `keep` gets its name and figures."""
    if "start" in given.parts:  # before this process takes the device's memory
        try:
            keep("start", start(given))
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            keep("start", failed(error))
    measured = limits(given)
    keep("limits", {name: measured[name] for name in ("copy", "copy_memcpy", "copy_kernel", "matmul")})
    keep("device", measured["device"])
    from benchmarks import gpu_parts as parts
    from jaxinfer import LLM

    scale = given.scale
    groups: list[tuple[dict[str, int], dict[str, Callable[[Any], dict[str, Any]]]]] = [
        (
            {
                "most": 8 if given.tiny else 256,
                "longest": 512 if given.tiny else 4096,
                "budget": given.budget,
            },
            {
                "decode": lambda bench: parts.decode(bench, scale),
                "saturated": lambda bench: parts.saturated(bench, scale),
            },
        ),
        (
            {"most": 8, "longest": 1024 if given.tiny else 34816, "budget": 4 * given.budget},
            {
                "long": lambda bench: parts.long(bench, scale),
                "prefill": lambda bench: parts.prefill(bench, scale),
            },
        ),
    ]
    for sizes, wanted in groups:
        if not set(wanted) & set(given.parts):
            continue
        llm = bench = None
        engine = "engine " + "+".join(wanted)
        try:
            with tempfile.TemporaryDirectory() as folder:
                name = model_of(given.model, sizes["longest"], Path(folder))
                began = time.perf_counter()
                llm = LLM(name, **options(given, **sizes))
            loaded = time.perf_counter() - began
            bench = parts.EngineBench(llm, measured["copy"], measured["matmul"])
            keep(engine, {**sizes, "load_s": loaded, **bench.facts()})
        except Exception as error:
            keep(engine, failed(error))
        for part, function in wanted.items():
            if bench is not None and part in given.parts:
                try:
                    keep(part, function(bench))
                except Exception as error:
                    keep(part, failed(error))
                    bench = None  # the engine may still hold the requests of this part
        del bench, llm
        gc.collect()


def failed(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {"failed": f"{type(error).__name__}: {error}"[:300]}


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    given.given = [word for word in (sys.argv[1:] if arguments is None else arguments)]
    if given.child:
        print(json.dumps(child(given)))
        return 0
    report: dict[str, Any] = {"model": given.model, "quick": given.quick, "tiny": given.tiny}

    def keep(name: str, figures: dict[str, Any]) -> None:
        report[name] = figures = rounded(figures)
        print(f"{name:10} {json.dumps(figures)}", file=sys.stderr, flush=True)
        if given.output:
            with given.output.open("a") as file:
                file.write(json.dumps({name: figures}) + "\n")

    run(given, keep)
    from benchmarks.cpu import versions

    report |= versions() | ({"revision": given.revision} if given.revision else {})
    print_table(report)
    print(json.dumps({**report, "date": time.strftime("%Y-%m-%d")}))
    missing = [part for part in given.parts if part not in report]
    bad = [name for name, figures in report.items() if isinstance(figures, dict) and "failed" in figures]
    if bad or missing:
        print(
            f"failed: {', '.join(bad)}" + "".join(f"; not run: {part}" for part in missing), file=sys.stderr
        )
    return 1 if bad or missing else 0


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def print_table(report: dict[str, Any]) -> None:
    columns = (
        ("tokens_per_s", "tok/s", 1), ("tpot_s", "TPOT ms", 1e3), ("ttft_s", "TTFT ms", 1e3),
        ("mbu", "MBU", 1), ("mfu", "MFU", 1), ("over_floor", "x floor", 1), ("idle_s", "idle us", 1e6),
    )  # fmt: skip
    print(f"{'part':16}" + "".join(f"{heading:>10}" for _, heading, _ in columns), file=sys.stderr)
    for part in ("decode", "saturated", "long", "prefill"):
        for name, figures in report.get(part, {}).items():
            if isinstance(figures, dict):
                cells = (figures.get(column) for column, _, _ in columns)
                text = "".join(
                    f"{'' if cell is None else f'{cell * times:.4g}':>10}"
                    for cell, (_, _, times) in zip(cells, columns, strict=True)
                )
                print(f"{name:16}{text}  {figures.get('idle_unknown', '')}".rstrip(), file=sys.stderr)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
