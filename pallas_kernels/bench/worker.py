"""Many rows in a process that may die of one: a compiler can abort, a kernel can hang or spoil the device.

    python -m pallas_kernels.bench.worker < jobs.json

Lines on stdout: "START n" before each job and "ROW {json}" after it. After a job that raises the process
ends: a device that has refused an address answers nothing any more. The command starts another one with what
is left.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax

from pallas_kernels.bench.matmuls import MATMULS, TINY_MATMULS, matmul_row
from pallas_kernels.bench.rows import Bench, Options, Row
from pallas_kernels.bench.timing import limits
from pallas_kernels.bench.tune import tune_row
from pallas_kernels.bench.workload import TINY_WORKLOADS, WORKLOADS
from pallas_kernels.device import Device


def facts() -> dict[str, Any]:
    """What this process runs on."""
    device = jax.local_devices()[0]
    known = Device.of(device)
    return {
        "platform": known.platform, "kind": known.kind, "capability": known.capability,
        "cores": known.num_cores, "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": getattr(device.client, "platform_version", "").replace("\n", " ").strip(),
    }  # fmt: skip


def run(job: dict[str, Any], bench: Bench, tiny: bool) -> Row:
    if job["kind"] == "limits":
        return {**limits(tiny=tiny, budget=bench.options.budget), "device": facts()}
    if job["kind"] == "matmul":
        known = {case.name: case for case in (TINY_MATMULS if tiny else MATMULS)}
        return matmul_row(known[job["case"]], job["backend"], bench.device, bench.options)
    workload = {known.name: known for known in (TINY_WORKLOADS if tiny else WORKLOADS)}[job["case"]]
    if job["kind"] == "tune":
        return tune_row(bench, workload, job["backend"], job["path"])
    return bench.attention(workload, job["backend"])


def main() -> int:
    given = json.load(sys.stdin)
    bench = Bench(Device.of(jax.local_devices()[0]), Options(**given["options"]))
    for job in given["jobs"]:
        print(f"START {job['number']}", flush=True)
        failed = False
        try:
            row = run(job, bench, given["tiny"])
        except Exception as error:
            failed, line = True, next(iter(str(error).strip().splitlines()), "")
            row = {**job, "status": "failed", "reason": f"{type(error).__name__}: {line}"[:300]}
        print("ROW " + json.dumps({"number": job["number"], **row}), flush=True)
        if failed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
