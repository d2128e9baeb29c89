"""Each case in a process of its own: run it, wait, and judge what it leaves or how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_check.budgets import Budget, failures
from gpu_check.report import Expected, Report

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 180
"""Of one child: imports, tracing, compiling, assembling once more for the registers."""
NAME = "checked"
"""Of every program: XLA is told to dump the module jit_checked and no other."""


def run_child(command: Sequence[str], environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Run a child with a process group of its own: (exit status, or None after the timeout; its output)."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        return status, output.read()


def ended(status: int | None, output: str, timeout: float) -> tuple[str, str]:
    """What went wrong in a child that left no report: (kind, text with the end of its output)."""
    tail = "\n".join(output.strip().splitlines()[-12:])[-1500:]
    if status is None:
        return "timeout", f"not done after {timeout:g} s; {tail}"
    if status < 0:
        return "died", f"{signal.Signals(-status).name}; {tail}"
    return "error", f"exit status {status}; {tail}"


def environment(folder: Path) -> dict[str, str]:
    """Of the child: no device is looked for, and dumps go to `folder`."""
    for part in ("xla", "mosaic"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    flags = f"--xla_dump_to={folder / 'xla'} --xla_dump_hlo_module_re=jit_{NAME} --xla_dump_emitter_re=ptx"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "MOSAIC_GPU_DUMP_TO": str(folder / "mosaic"),
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def check(
    case: str,
    target: str,
    budget: Budget,
    folder: Path,
    program: Sequence[str] = ("-m", "gpu_check.aot"),
    timeout: float = TIMEOUT_S,
    expected: Sequence[Expected] = (),
) -> Report:
    """Compile one case for one target in a child, `python PROGRAM CASE TARGET FOLDER`, and judge it."""
    folder = folder.absolute()
    command = (sys.executable, *program, case, target, str(folder))
    status, output = run_child(command, environment(folder), timeout)
    written = folder / "report.json"
    if status == 0 and written.exists():
        report = Report.from_json(json.loads(written.read_text()))
    else:
        kind, text = ended(status, output, timeout)
        report = Report(case, target, error_kind=kind, error=text)
    report.failures = failures(report, budget, expected)
    return report
