"""`jaxinfer doctor`: of this installation, of a server that runs, and how long steps take here."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from jaxinfer.cli.bench_flags import refuse_given
from jaxinfer.cli.flags import EngineFlags
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.planner.calibration import Calibration


@dataclass(frozen=True)
class Doctor:
    """Versions, devices, what they can do, attention backends, the cache folder and import paths; which wall
    binds a server that runs (--server); step times of this device for the planner (--calibrate)."""

    json: bool = False
    """As one JSON object."""
    server: Annotated[str | None, arg(metavar="URL")] = None
    """Say of this server, such as http://127.0.0.1:8000, what binds it now and what to change first."""
    seconds: float = 5.0
    """How long to watch the server."""
    api_key: str | None = None
    """That of the server; $JAXINFER_API_KEY when left out."""
    calibrate: Annotated[str | None, arg(metavar="MODEL")] = None
    """Measure steps of this model, and keep what they say for `plan`, `bench` and `simulate`."""
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        if self.server is not None and self.calibrate is not None:
            raise UsageError("--server and --calibrate are two commands")
        if self.calibrate is None:
            refuse_given(self.engine, "is of the model that --calibrate names")
        if self.server is None:
            refuse_given(self, "is of a server: it needs --server", ("seconds", "api_key"))
        else:
            return self._watch(self.server)
        if self.calibrate is not None:
            return self._calibrate(self.calibrate)
        from jaxinfer.doctor import doctor

        print(doctor(as_json=self.json))
        return 0

    def _watch(self, url: str) -> int:
        import os

        from jaxinfer.doctor.diagnosis import diagnose, read

        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds must be more than 0, got {self.seconds}")
        key = self.api_key or os.environ.get("JAXINFER_API_KEY")
        began, before = time.monotonic(), read(url, key)
        time.sleep(self.seconds)
        found = diagnose(before, read(url, key), time.monotonic() - began)
        print(json.dumps(found.as_data(), allow_nan=False) if self.json else found.as_text())
        return 0

    def _calibrate(self, model: str) -> int:
        from jaxinfer.calibration import calibrate, calibration_path
        from jaxinfer.runtime import JaxRunner

        with self.engine.load(model) as llm:
            runner = llm.engine.runner
            assert isinstance(runner, JaxRunner), f"a model was loaded onto {type(runner).__name__}"
            costs = runner.costs
            found = calibrate(runner, costs, llm.model_name, llm.limits.max_model_len)
        path = calibration_path(found.device, costs)
        found.save(path)
        if self.json:
            import dataclasses

            print(json.dumps({**dataclasses.asdict(found), "file": str(path)}, allow_nan=False))
        else:
            print("\n".join([*_page(found), f"kept in {path}"]))
        return 0


def _page(found: Calibration) -> list[str]:
    numbers = f"{found.dtype}, pages {found.kv_dtype}, quantization {found.quantization}"
    lines = [
        f"{found.steps} steps of {found.model} on {found.device} ({numbers})",
        f"  median error of the fit    {100 * found.residual:.1f} %",
        f"  memory bandwidth           {found.bandwidth / 1e9:.1f} GB/s",
        f"  matmul rate                {found.matmul_rate / 1e9:.0f} GFLOP/s",
    ]
    if found.decode_byte_s:
        lines.append(f"  K/V of decodes             {1e-9 / found.decode_byte_s:.1f} GB/s")
    if found.chunk_operation_s:
        lines.append(f"  attention of chunks        {1e-9 / found.chunk_operation_s:.0f} GFLOP/s")
    lines.append("  layers, by tokens of a step (GFLOP/s): " + ", ".join(
        f"{at}: {2e-9 * at / seconds:.0f}"
        for at, seconds in zip(found.linear.at, found.linear.seconds, strict=True)
        if seconds
    ))  # fmt: skip
    return lines
