from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints

GOLDEN = Path(__file__).parents[1] / "golden" / "stories260k"


def write_shards(folder: Path) -> dict[str, np.ndarray]:
    weights = {f"layer.{index}.weight": np.full((2, 3), index, np.float32) for index in range(4)}
    save_file({name: weights[name] for name in list(weights)[:2]}, folder / "a.safetensors")
    save_file({name: weights[name] for name in list(weights)[2:]}, folder / "b.safetensors")
    places = {name: "a.safetensors" if index < 2 else "b.safetensors" for index, name in enumerate(weights)}
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return weights


def test_stories260k_folder_opens() -> None:
    opened = checkpoints.open_checkpoint(GOLDEN)
    assert opened.config["num_key_value_heads"] == 4
    assert opened.generation_config["eos_token_id"] == 2
    assert opened.shape("model.embed_tokens.weight") == (512, 64)
    assert opened.read("model.embed_tokens.weight").dtype == np.float32
    source = opened.tokenizer_source()
    assert isinstance(source, checkpoints.FolderTokenizerSource)
    assert source.tokenizer_json == GOLDEN / "tokenizer.json"
    assert source.chat_template is None
    assert (source.bos_token_id, source.eos_token_ids) == (1, (2,))


def test_types_of_one_file(tmp_path: Path) -> None:
    arrays = {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "brain": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "full": np.arange(6, dtype=np.float32),
        "whole": np.arange(6, dtype=np.int8),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    opened = checkpoints.open_checkpoint(tmp_path)
    assert opened.names() == ("brain", "full", "half", "whole")
    for name, expected in arrays.items():
        assert opened.read(name).dtype == expected.dtype
        assert opened.shape(name) == expected.shape
        np.testing.assert_array_equal(opened.read(name), expected)


def test_shards_read_back(tmp_path: Path) -> None:
    weights = write_shards(tmp_path)
    opened = checkpoints.open_checkpoint(tmp_path)
    assert set(opened.names()) == set(weights)
    for name, expected in weights.items():
        np.testing.assert_array_equal(opened.read(name), expected)


def test_index_decides_where_a_tensor_is_read(tmp_path: Path) -> None:
    weights = write_shards(tmp_path)
    stray = {name: array + 100 for name, array in weights.items()}
    save_file(stray, tmp_path / "b.safetensors")  # also holds what the index places in a.safetensors
    save_file(stray, tmp_path / "z.safetensors")
    opened = checkpoints.open_checkpoint(tmp_path)
    assert opened.read("layer.0.weight")[0, 0] == 0
    assert opened.read("layer.3.weight")[0, 0] == 103
    assert set(opened.names()) == set(weights)


def test_end_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    source = checkpoints.open_checkpoint(tmp_path / "model").tokenizer_source()
    assert source.eos_token_ids == (2, 11)
    assert source.bos_token_id == 1


def test_unknown_tensor_is_an_error_with_its_name() -> None:
    opened = checkpoints.open_checkpoint(GOLDEN)
    for ask in (opened.read, opened.shape):
        with pytest.raises(checkpoints.CheckpointError, match=r"lm_head\.weight"):
            ask("lm_head.weight")
