from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from folder_writing import write_folder
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
        "double": np.arange(6, dtype=np.float64),
        "one": np.float32(3).reshape(()),
    }
    opened = checkpoints.open_checkpoint(write_folder(tmp_path, arrays))
    assert opened.names() == ("brain", "double", "full", "half", "one")
    for name, expected in arrays.items():
        assert opened.read(name).dtype == opened.dtype(name) == expected.dtype
        assert opened.read(name).flags.aligned
        assert opened.shape(name) == expected.shape
        np.testing.assert_array_equal(opened.read(name), expected)


def test_shards_read_back(tmp_path: Path) -> None:
    weights = write_shards(tmp_path)
    opened = checkpoints.open_checkpoint(tmp_path)
    assert set(opened.names()) == set(weights)
    for name, expected in weights.items():
        np.testing.assert_array_equal(opened.read(name), expected)


def test_parts(tmp_path: Path) -> None:
    values = np.arange(70.0 * 30).reshape(70, 30).astype(ml_dtypes.bfloat16)
    opened = checkpoints.open_checkpoint(write_folder(tmp_path, {"odd": np.ones(3, np.float16), "x": values}))
    for part in [(), (slice(3, 9),), (slice(None), slice(4, -2)), (slice(60, 2, -7), slice(5, 5))]:
        got = opened.read("x", part)
        assert got.flags.aligned
        np.testing.assert_array_equal(got, values[part])
    with pytest.raises(checkpoints.CheckpointError, match="tensor x: got 3 slices"):
        opened.read("x", (slice(1), slice(1), slice(1)))


def test_a_file_beside_the_shards_is_not_read(tmp_path: Path) -> None:
    weights = write_shards(tmp_path)
    save_file({name: array + 100 for name, array in weights.items()}, tmp_path / "z.safetensors")
    opened = checkpoints.open_checkpoint(tmp_path)
    assert set(opened.names()) == set(weights)
    assert opened.read("layer.0.weight")[0, 0] == 0


def test_model_files_that_the_index_does_not_name_are_refused(tmp_path: Path) -> None:
    weights = write_shards(tmp_path)
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"other": weights["layer.0.weight"]}, tmp_path / name)
    assert set(checkpoints.open_checkpoint(tmp_path).names()) == set(weights)
    for name in ("model-00003-of-00003.safetensors", "model.safetensors", "model.fp16.safetensors"):
        save_file({"other": weights["layer.0.weight"]}, tmp_path / name)
        message = rf"{name}: model\.safetensors\.index\.json lies beside it and does not name it"
        with pytest.raises(checkpoints.CheckpointError, match=message):
            checkpoints.open_checkpoint(tmp_path)
        (tmp_path / name).unlink()


def test_links_out_of_the_folder_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    weights = write_shards(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (blobs / f"{number:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
        file.unlink()
    opened = checkpoints.open_checkpoint(snapshot)
    for name, expected in weights.items():
        np.testing.assert_array_equal(opened.read(name), expected)


def test_old_buffers_are_passed_over(tmp_path: Path) -> None:
    arrays = {
        "x.weight": np.ones((2, 2), np.float32),
        "x.masked_bias": np.ones(1, np.int64),
        "x.position_ids": np.ones((1, 4), np.int64),
        "x.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    opened = checkpoints.open_checkpoint(write_folder(tmp_path, arrays))
    assert opened.names() == ("x.rotary_emb.inv_freq", "x.weight")


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    write_folder(tmp_path, {"x": np.ones((100, 100), np.float32)})
    opened = checkpoints.open_checkpoint(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[:2000])
    with pytest.raises(checkpoints.CheckpointError, match=r"tensor x ends at byte .* now has 2000"):
        opened.read("x")


def test_end_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    source = checkpoints.open_checkpoint(tmp_path / "model").tokenizer_source()
    assert source.eos_token_ids == (2, 11)
    assert source.bos_token_id == 1


def test_unknown_tensor_is_an_error_with_its_name() -> None:
    opened = checkpoints.open_checkpoint(GOLDEN)
    for ask in (opened.read, opened.shape, opened.dtype):
        with pytest.raises(checkpoints.CheckpointError, match=r"lm_head\.weight"):
            ask("lm_head.weight")
