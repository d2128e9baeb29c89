"""`jaxinfer doctor`: what a bug report needs, and what usually is wrong when something is.

Every part is looked at on its own, so that a broken one is reported and does not hide the others.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "jaxinfer", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "safetensors",
    "gguf", "tokenizers", "jinja2", "huggingface_hub", "fastapi", "uvicorn", "pydantic",
    "llguidance",
)  # fmt: skip
PACKAGES = ("jaxinfer", "pallas_kernels", "checkpoints")
ENVIRONMENT = ("JAXINFER_", "JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE")
_SECRET = ("KEY", "TOKEN", "SECRET")


def examine() -> dict[str, Any]:
    """The report as plain data, ready for JSON."""
    environment = _environment()  # before the line below adds to it
    # XLA would take most of a GPU's memory at once, and another process may be using it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return {
        "versions": _versions(),
        "platform": {"system": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "devices": _attempt(_devices),
        "measured": _attempt(_measured),
        "attention_backends": _attempt(_attention_backends),
        "structured_outputs": _attempt(_structured_outputs),
        "engine_defaults": _attempt(_engine_defaults),
        "cache": _attempt(_cache),
        "import_paths": {name: _import_path(name) for name in PACKAGES},
        "environment": environment,
    }


def doctor(as_json: bool = False) -> str:
    """The report as text for people, or as one JSON object."""
    report = examine()
    if as_json:
        return json.dumps(report, indent=2)
    return "\n".join(line for title, part in report.items() for line in _section(title, part))


def _attempt(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception as error:  # a broken part of the installation is what doctor is there to report
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _devices() -> list[dict[str, Any]]:
    import jax

    return [
        {"id": device.id, "platform": device.platform, "kind": device.device_kind, **_memory(device)}
        for device in jax.devices()
    ]


def _memory(device: Any) -> dict[str, int | None]:
    """Bytes. `free` is what XLA may still take: its own limit, less what it holds."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        limit = int(stats["bytes_limit"])
        return {"memory_bytes": limit, "free_bytes": limit - int(stats.get("bytes_in_use", 0))}
    if device.platform != "cpu":
        return {"memory_bytes": None, "free_bytes": None}
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES") if _has_free_pages() else None
    return {"memory_bytes": total * page, "free_bytes": None if free is None else free * page}


def _measured() -> dict[str, Any]:
    """The two limits of the first device, and the step times that are known of it."""
    import jax

    from jaxinfer.calibration import known_calibrations
    from jaxinfer.config import EngineConfig
    from jaxinfer.runtime.roofline import measure_machine

    platform = jax.default_backend()
    machine = measure_machine(platform, EngineConfig().on(platform).dtype)
    known = known_calibrations(jax.local_devices()[0].device_kind)
    return {
        "bandwidth_per_s": machine.bandwidth,
        "operations_per_s": machine.matmul_rate,
        "operations_in": machine.dtype,
        "calibrations": {
            str(path): f"{found.model}, {found.dtype}, {found.date}, residual {100 * found.residual:.0f} %"
            for path, found in known.items()
        },
    }


def _has_free_pages() -> bool:
    return "SC_AVPHYS_PAGES" in os.sysconf_names  # Linux says; macOS does not


def _attention_backends() -> dict[str, str]:
    """Each backend with the reason why it cannot run here; "" where it can. Asked for the shapes of Llama 3
    8B in the device's usual type: other models may be told no where this is told yes. On a GPU each one that
    serves it is tried on the device, as the engine does before it takes one."""
    import jax

    import pallas_kernels
    from pallas_kernels import self_test

    device = pallas_kernels.Device.of(jax.local_devices()[0])
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    geometry = pallas_kernels.Geometry(32, 8, 128, 16, dtype, dtype)
    reasons = pallas_kernels.backends(device, geometry)
    if device.platform == "cpu":
        return reasons
    tested = {
        name: self_test.failure(pallas_kernels.Backend(name, device), geometry)
        for name, reason in reasons.items()
        if not reason
    }
    return reasons | {name: f"fails its test here: it {why}" for name, why in tested.items() if why}


def _structured_outputs() -> dict[str, str | bool]:
    """Whether schemas, patterns, choices and grammars can be served: a native library compiles them."""
    try:
        importlib.import_module("llguidance")
    except Exception as error:  # a wheel for another platform fails in ways of its own
        return {"llguidance": f"cannot be imported ({type(error).__name__}: {error})"}
    return {"llguidance": True}


def _engine_defaults() -> dict[str, Any]:
    """How a model runs on this device when nothing is stated."""
    import jax

    from jaxinfer.config import EngineConfig

    return dataclasses.asdict(EngineConfig().on(jax.default_backend()))


def _cache() -> dict[str, Any]:
    from checkpoints import cache_folder

    folder = cache_folder()
    compiled = [path for path in (folder / "compile").rglob("*") if path.is_file()]
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(_nearest_existing(folder), os.W_OK),
        "pulled_models": _pulled(folder),
        "compiled_programs": len(compiled),
        "compiled_bytes": sum(path.stat().st_size for path in compiled),
    }


def _pulled(folder: Path) -> dict[str, str]:
    """Names that can be given as MODEL, and where their files are."""
    models = {path.parent.name: str(path) for path in sorted(folder.glob("*/*.gguf"))}
    for path in sorted((folder / "hub").glob("*/.pull-complete")):
        models[path.parent.name.replace("--", "/", 1)] = str(path.parent)
    return models


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _import_path(name: str) -> str | None:
    """Where the package would be imported from: two checkouts on one machine are easily mixed up."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _environment() -> dict[str, str]:
    """Variables that change how things run; the values of secrets are not shown."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)}
    return {
        name: "(set)" if any(word in name for word in _SECRET) else value for name, value in found.items()
    }


# ------------------------------------------------------------------------------------------- as text


def _section(title: str, part: Any) -> list[str]:
    lines = [title.replace("_", " ")]
    if isinstance(part, list):
        for row in part:
            lines.append("  " + "  ".join(f"{_name(key)} {_plain(key, value)}" for key, value in row.items()))
    elif title == "attention_backends" and "error" not in part:
        lines += [f"  {name}: {reason or 'yes'}" for name, reason in part.items()] or ["  (none reported)"]
    else:
        for key, value in part.items():
            rows = (
                [f"{k} ({v})" for k, v in value.items()] if isinstance(value, dict) else [_plain(key, value)]
            )
            lines.append(f"  {_name(key)}: {', '.join(rows) or '-'}")
    if len(lines) == 1:
        lines.append("  -")
    return [*lines, ""]


def _name(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ") if key.islower() else key


def _plain(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_per_s"):
        return f"{value / 1e9:.4g} G/s"
    if key.endswith("bytes"):
        return f"{value / 2**30:.2f} GiB"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
