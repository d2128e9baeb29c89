"""Predicted against measured, through the whole engine: `python -m benchmarks.predicted [MODEL]`.

    jaxinfer doctor --calibrate smollm2-135m        first: this machine, on other steps than these
    python -m benchmarks.predicted smollm2-135m

For each batch and context: requests that arrive together at an idle engine. Prefill: the mean time to their
first tokens, beside what a simulation of the same load says. Decode: the same prompts again, which are found
in the prefix cache, so that all decode together from the first steps on; the mean gap between tokens, beside
the planner's. Also memory: what the planner says of weights and pool, beside the bytes of the arrays that
were allocated. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from typing import Any

from benchmarks.cpu import versions
from jaxinfer import LLM
from jaxinfer.bench.predicted import Predictor, costs_of
from jaxinfer.bench.records import RequestRecord
from jaxinfer.bench.target import InProcess
from jaxinfer.bench.workbench import same_batch
from jaxinfer.calibration import find_calibration
from jaxinfer.planner import Steps, plan_memory, tpot_s


def first_token_s(records: list[RequestRecord]) -> float:
    """Mean time to the first token."""
    return statistics.fmean(record.token_s[0] - record.arrived_s for record in records)


def gap_s(records: list[RequestRecord]) -> float:
    """Mean gap between tokens while all of the requests decode."""
    began = max(record.token_s[0] for record in records)
    ended = min(record.token_s[-1] for record in records)
    gaps = [
        after - before
        for record in records
        for before, after in itertools.pairwise(record.token_s)
        if before >= began and after <= ended
    ]
    return statistics.fmean(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--output", type=int, default=24, help="tokens that each request decodes")
    parser.add_argument(
        "--most-tokens", type=int, default=140_000, help="largest batch times context that is run"
    )
    args = parser.parse_args()

    longest = max(args.contexts) + args.output
    most = max(
        b * (c + args.output) for b in args.batches for c in args.contexts if b * c <= args.most_tokens
    )
    pages = 2 + most // 16 + max(args.batches)
    llm = LLM(
        args.model, max_num_seqs=max(args.batches), max_model_len=longest + 1, num_pages=pages,
        warmup="full",
    )  # fmt: skip
    import jax

    costs = costs_of(llm)
    assert costs is not None
    calibration = find_calibration(jax.local_devices()[0].device_kind, costs)
    if calibration is None:
        sys.exit("no calibration of this device: run jaxinfer doctor --calibrate MODEL")
    predictor = Predictor.of(llm, calibration)
    assert predictor is not None
    target = InProcess(llm)
    rows: list[dict[str, Any]] = []
    for context in args.contexts:
        for batch in args.batches:
            if batch * context > args.most_tokens:
                print(f"batch {batch} x {context}: left out (--most-tokens)", file=sys.stderr)
                continue
            load, again = (
                same_batch(context, output, batch, 1, seed=context + batch)[0] for output in (1, args.output)
            )
            measured = (
                first_token_s(target.run(load, lambda _: None).records),
                gap_s(target.run(again, lambda _: None).records),
            )
            predicted = (
                first_token_s(predictor(load)),
                tpot_s(predictor.time, batch, context, args.output, Steps(max(args.batches), 512, "cpu")),
            )
            for phase, ours, theirs in zip(("prefill", "decode"), predicted, measured, strict=True):
                rows.append({
                    "phase": phase, "batch": batch, "context": context,
                    "predicted_ms": 1e3 * ours, "measured_ms": 1e3 * theirs, "error": ours / theirs - 1.0,
                })  # fmt: skip
                print(
                    f"{phase:8}{batch:4} x {context:5}  predicted {1e3 * ours:10.1f} ms  measured "
                    f"{1e3 * theirs:10.1f} ms  {100 * rows[-1]['error']:+6.1f} %",
                    flush=True,
                )
    stats = llm.stats()
    memory = plan_memory(
        costs, 1 << 62, max_model_len=longest + 1, max_num_seqs=max(args.batches), max_num_batched_tokens=512
    )
    said = memory.weight_bytes + pages * memory.page_bytes
    allocated = stats["param_bytes"] + stats["kv_bytes"]
    report = {
        "model": args.model,
        "calibration": {
            "date": calibration.date,
            "residual": calibration.residual,
            "steps": calibration.steps,
        },
        "median_error": {
            name: statistics.median(abs(row["error"]) for row in rows if name in ("all", row["phase"]))
            for name in ("all", "prefill", "decode")
        },
        "memory": {"predicted_bytes": said, "allocated_bytes": allocated, "error": said / allocated - 1.0},
        "compiles_after_warmup": stats["compiles_after_warmup"],
        "rows": rows,
        **versions(),
    }
    for name, error in report["median_error"].items():
        print(f"median error, {name}: {100 * error:.1f} %")
    print(f"memory: predicted {said / 2**20:.1f} MiB, allocated {allocated / 2**20:.1f} MiB")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
