"""What MODEL and the compile cache may be, and what is said of what they may not."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny import GOLDEN

from jaxinfer.config import EngineConfig
from jaxinfer.core import ConfigError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime import load
from jaxinfer.runtime.loading import use_compile_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache_setting():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(("path", "kind"), [("/dev/null", "character device"), ("pipe", "named pipe")])
def test_a_model_that_is_no_file_is_named_for_what_it_is(tmp_path: Path, path: str, kind: str) -> None:
    if path == "pipe":
        path = str(tmp_path / path)
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"{path} is neither a file nor a folder but a {kind}; give"):
        load(path, EngineConfig())
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "generate", path, "hi"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert kind in done.stderr


@pytest.mark.usefixtures("cache_setting")
@pytest.mark.parametrize("under", ["file", "file/deeper", "null\0byte"])
def test_a_cache_folder_that_cannot_be_written_is_one_line_and_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, under: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    use_compile_cache(str(tmp_path / under))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "\n" not in record.getMessage()
    assert "compiled programs are not kept" in record.getMessage()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.usefixtures("cache_setting")
def test_a_cache_folder_is_made_where_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use_compile_cache(str(tmp_path / "new" / "cache"))
    assert not caplog.records
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new" / "cache")
    assert list((tmp_path / "new" / "cache").iterdir()) == []


@pytest.mark.usefixtures("compile_cache")
def test_a_folder_with_sentencepiece_alone_answers_as_with_its_tokenizer_json(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "text"))
    from test_sentencepiece_file import stories_model

    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "stories260k", folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(stories_model())
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 33}
    greedy = SamplingParams(temperature=0, max_tokens=12)
    outputs = [
        LLM(str(path), progress=False, **options).generate("Once upon a time", greedy)[0]
        for path in (folder, GOLDEN / "stories260k")
    ]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text != ""
