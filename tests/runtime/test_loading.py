"""What MODEL and the compile cache may be, and what is said of what they may not."""

from __future__ import annotations

import json
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

import pallas_kernels
from jaxinfer.config import EngineConfig
from jaxinfer.core import ConfigError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime import load
from jaxinfer.runtime.loading import claim_memory, use_compile_cache

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


@pytest.mark.usefixtures("compile_cache")
def test_a_model_is_called_what_its_user_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_of(model: str) -> str:
        return load(model, EngineConfig(num_pages=9, max_num_seqs=2), progress=False).model_name

    snapshot = tmp_path / "models--some-org--a--model" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(GOLDEN / "stories260k", snapshot)
    (tmp_path / "mine").symlink_to(snapshot)
    monkeypatch.chdir(tmp_path)
    assert name_of("mine") == name_of("./mine/") == name_of(str(tmp_path / "mine")) == "mine"
    assert name_of(str(snapshot)) == "some-org/a--model"
    monkeypatch.chdir(snapshot)
    assert name_of(".") == "some-org/a--model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert name_of("~/mine") == "mine"


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("tokenizer.json", "{}", r"model: the tokenizer cannot be used: .*tokenizer\.json: not a tokenizer"),
        ("tokenizer_config.json", '{"chat_template": 7}', r"tokenizer_config\.json: chat_template must be"),
        ("tokenizer_config.json", '{"add_bos_token": "no"}', r"tokenizer_config\.json: add_bos_token must"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_a_config_error(
    tmp_path: Path, file: str, text: str, told: str
) -> None:
    shutil.copytree(GOLDEN / "stories260k", tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)
    with pytest.raises(ConfigError, match=told):
        load(str(tmp_path / "model"), EngineConfig())


def test_random_weights_that_do_not_fit_are_refused_with_numbers(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 2**31 - 1, "hidden_size": 2**20,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = r"random:.*: 4503\d{12} parameters in float32 take 18014\d{3}\.\d GB; \d+\.\d GB are free"
    with pytest.raises(ConfigError, match=told):
        load(f"random:{tmp_path}", EngineConfig())


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


@pytest.mark.parametrize("stated", [None, 9])
def test_a_pool_is_what_the_attention_backend_can_index(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stated: int | None
) -> None:
    monkeypatch.setattr(pallas_kernels, "most_pages", lambda backend, *geometries: 8)
    config = EngineConfig(max_model_len=64, max_num_seqs=4, num_pages=stated)
    if stated:
        with pytest.raises(ConfigError, match="num_pages 9 is more than attention backend 'xla' can index"):
            load(str(GOLDEN / "stories260k"), config)
        return
    assert load(str(GOLDEN / "stories260k"), config).limits.num_pages == 8
    assert "the pool is held at 8 pages, the most that xla can index; 17 would be of use" in caplog.text


@pytest.mark.parametrize("said", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_gpu_is_asked_for_nearly_all_of_its_memory_unless_the_user_says_otherwise(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's own default is 75 %, and a pool of 90 % of that."""
    from jaxlib import xla_client

    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.5" if name == said else "")
    claim_memory()
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == (0.5 if said else 0.94)
