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

# Who compiles, of jaxinfer, and what. A program that serves is the runtime's: it knows the buckets, and
# that nothing is traced after warm-up. (The kernels, a leaf, jit their own functions.)
JITS = {
    "jaxinfer.runtime": "every program that serves",
    "jaxinfer.lab.trainer": "updates and losses",
    "jaxinfer.lab.evaluate.divergence": "two models' dense passes over a text, which no engine runs",
    "jaxinfer.heads.attention": "one layer's attention over the calibration text, by conversion",
    "jaxinfer.model.llama": "no program: one layer, so that programs lower equal layers once",
    "jaxinfer.model.weights": "random weights of `random:CONFIG`, drawn on the device",
}
COMPILING = {"jit", "pjit", "pmap"}

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


def compiles(path: Path) -> bool:
    """Whether a file names one of jax's functions that compile, wherever in it and by whatever module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in COMPILING:
            return True
        if isinstance(node, ast.ImportFrom) and COMPILING & {alias.name for alias in node.names}:
            return True
    return False


def test_who_compiles_is_named() -> None:
    """And nobody is named who does not."""
    found = {name for name, path in modules() if name.startswith("jaxinfer") and compiles(path)}
    named = {name: next((j for j in JITS if name == j or name.startswith(j + ".")), None) for name in found}
    unnamed = sorted(name for name, room in named.items() if room is None)
    assert not unnamed, f"{unnamed} call jit and are not in JITS; can the runtime or the trainer do it?"
    assert set(named.values()) == set(JITS)


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("y = jax.jit(f)", True),
        ("@functools.partial(jax.jit, static_argnums=0)\n    def g(): ...", True),
        ("from jax import jit", True),
        ("from flax.nnx import jit as compiled", True),
        ("y = nnx.jit(f)", True),
        ("y = jax.pmap(f)", True),
        ("y = 'jax.jit'  # jax.jit", False),
        ("jitted = f(1)", False),
    ],
)
def test_a_planted_jit_is_seen(tmp_path: Path, line: str, seen: bool) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"def f():\n    {line}\n")
    assert compiles(planted) is seen


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
