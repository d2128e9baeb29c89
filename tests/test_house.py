"""The house rules of docs/architecture.md, enforced on the syntax tree: who imports whom, and file sizes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "checkpoints")
BESIDE = ("benchmarks", "gpu_check", "tests")  # they use the packages, and no package uses them
MOST_LINES = 500

# Room -> what it may import of the project besides itself. Arrows point down only.
ALLOWED = {
    "pallas_kernels": set(),
    "checkpoints": set(),
    "jaxinfer.core": set(),
    "jaxinfer.progress": set(),
    "jaxinfer.presets": set(),
    "jaxinfer.reading": set(),
    "jaxinfer.config": {"jaxinfer.core"},
    "jaxinfer.shapes": {"jaxinfer.core", "jaxinfer.config", "jaxinfer.presets", "checkpoints"},
    "jaxinfer.text": {"jaxinfer.core"},
    "jaxinfer.engine": {"jaxinfer.core", "jaxinfer.text"},
    "jaxinfer.planner": {"jaxinfer.core", "jaxinfer.config"},
    "jaxinfer.model": {"jaxinfer.core", "jaxinfer.config", "pallas_kernels"},
    "jaxinfer.runtime": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.model", "jaxinfer.planner", "jaxinfer.text",
        "jaxinfer.shapes", "jaxinfer.progress", "pallas_kernels", "checkpoints",
    },
    "jaxinfer.calibration": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.planner", "jaxinfer.runtime", "jaxinfer.progress",
        "checkpoints",
    },
    "jaxinfer.doctor": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.planner", "jaxinfer.calibration", "jaxinfer.runtime",
        "jaxinfer.reading", "pallas_kernels", "checkpoints",
    },
    "jaxinfer.arguments": {"jaxinfer.core"},
    "jaxinfer.outputs": {"jaxinfer.core"},
    "jaxinfer.llm": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.engine", "jaxinfer.runtime", "jaxinfer.progress",
        "jaxinfer.text", "jaxinfer.arguments", "jaxinfer.outputs",
    },
    "jaxinfer.heads": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.model", "jaxinfer.planner", "jaxinfer.text",
        "jaxinfer.progress", "checkpoints", "pallas_kernels",
    },
    "jaxinfer.convert": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.model", "jaxinfer.text", "jaxinfer.progress",
        "jaxinfer.heads", "checkpoints",
    },
    "jaxinfer.lab": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.model", "jaxinfer.planner", "jaxinfer.runtime",
        "jaxinfer.llm", "jaxinfer.outputs", "jaxinfer.text", "jaxinfer.convert", "jaxinfer.shapes",
        "jaxinfer.heads", "jaxinfer.bench", "jaxinfer.progress", "pallas_kernels", "checkpoints",
    },
    "jaxinfer.server": {"jaxinfer.core", "jaxinfer.llm", "jaxinfer.text", "jaxinfer.engine"},
    "jaxinfer.simulator": {"jaxinfer.core", "jaxinfer.config", "jaxinfer.engine", "jaxinfer.planner"},
    "jaxinfer.bench": {
        "jaxinfer.core", "jaxinfer.config", "jaxinfer.engine", "jaxinfer.llm", "jaxinfer.planner",
        "jaxinfer.simulator", "jaxinfer.progress", "jaxinfer.reading",
    },
}  # fmt: skip

# Rooms that must run without these: the engine is pure Python, the leaves are leaves.
FORBIDDEN = {
    "jaxinfer.core": {"jax", "jaxlib", "numpy", "flax"},
    "jaxinfer.engine": {"jax", "jaxlib", "numpy", "flax"},
    "jaxinfer.text": {"jax", "jaxlib", "flax"},
    "jaxinfer.config": {"jax", "jaxlib", "numpy", "flax"},
    "jaxinfer.planner": {"jax", "jaxlib", "numpy", "flax"},
    "jaxinfer.simulator": {"jax", "jaxlib", "numpy", "flax"},
    "pallas_kernels": {"flax"},
    "checkpoints": {"jax", "jaxlib", "flax"},
}

EVERYWHERE_FORBIDDEN = {"torch", "transformers"}

# The one program that runs torch, to be compared with: a process of its own, which no module imports.
RUNS_TORCH = "benchmarks/torch_attention.py"


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def files() -> list[Path]:
    """Every Python file of the project."""
    beside = [path for folder in BESIDE for path in (ROOT / folder).rglob("*.py")]
    return [*(path for _, path in modules()), *beside, *ROOT.glob("*.py")]


def imports_of(name: str, path: Path) -> set[str]:
    """Absolute names of every module imported, wherever in the file; `from a import b` gives a and a.b."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def room_of(name: str) -> str | None:
    """The longest room of ALLOWED that the module lies in; None for the front doors, which see all."""
    rooms = [room for room in ALLOWED if name == room or name.startswith(room + ".")]
    return max(rooms, key=len) if rooms else None


def faults(name: str, path: Path) -> list[str]:
    """What a module imports and may not."""
    room = room_of(name)
    imported = imports_of(name, path)
    top_level = {module.partition(".")[0] for module in imported}
    found = [f"{name} imports {module}" for module in sorted(top_level & EVERYWHERE_FORBIDDEN)]
    if room is None:
        return found
    found += [
        f"{room} must run without {module}" for module in sorted(top_level & FORBIDDEN.get(room, set()))
    ]
    for module in sorted(imported):
        target = room_of(module)
        if target is None and module.partition(".")[0] == "jaxinfer":
            # `from jaxinfer import core` gives jaxinfer and jaxinfer.core: the package itself is a door too.
            if module != "jaxinfer" or not any(m.startswith("jaxinfer.") and room_of(m) for m in imported):
                found.append(f"{name} imports the front door {module}")
        elif target is not None and target != room and target not in ALLOWED[room]:
            found.append(f"{name} imports {module}: {room} may not see {target}")
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_down(name: str, path: Path) -> None:
    assert not faults(name, path)


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("jaxinfer.engine", "from jaxinfer.runtime import steps"),
        ("jaxinfer.engine", "import jax.numpy as jnp"),
        ("jaxinfer.engine", "import jaxinfer"),
        ("jaxinfer.engine", "from jaxinfer import LLM"),
        ("jaxinfer.model", "from jaxinfer.cli import main"),
        ("jaxinfer.model", "import checkpoints"),
        ("checkpoints", "from jaxinfer import LLM"),
        ("pallas_kernels", "import jaxinfer.config"),
        ("jaxinfer.text", "import torch"),
    ],
)
def test_a_planted_import_is_seen(tmp_path: Path, room: str, line: str) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"def f():\n    {line}\n")
    assert faults(f"{room}.planted", planted)


def test_one_program_alone_imports_torch() -> None:
    """Not even what lies beside the packages does, and nothing imports that program."""
    found = {}
    for path in files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        top_level = {module.partition(".")[0] for module in imports_of(name, path)}
        if wrong := top_level & EVERYWHERE_FORBIDDEN:
            found[str(path.relative_to(ROOT))] = wrong
        assert "benchmarks.torch_attention" not in imports_of(name, path), path
    assert found == {RUNS_TORCH: {"torch"}}


def test_every_folder_is_under_these_rules() -> None:
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")}
    assert folders <= {*PACKAGES, *BESIDE}
    assert ROOT / "gpu_check" / "cases.py" in files()


def test_files_stay_readable() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in files()}
    too_long = {str(path): count for path, count in lines.items() if count > MOST_LINES}
    assert not too_long, f"over {MOST_LINES} lines: {too_long}"
    assert len((ROOT / "serve.py").read_text().splitlines()) <= 25
