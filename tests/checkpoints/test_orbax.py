"""Folders with an Orbax checkpoint: what is written, what Orbax makes of it, and what damage does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from cpu_time import cpu_time
from hypothesis import given
from hypothesis import strategies as st
from named_arrays import ARRAYS, assert_same, pending, write

import checkpoints
from checkpoints import CheckpointError, orbax_folder
from checkpoints.orbax_folder import OrbaxFolder
from checkpoints.writing import chunk_shape, write_safetensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("orbax") / "model")


@pytest.fixture(scope="module")
def opened(written: Path) -> OrbaxFolder:
    return OrbaxFolder(written)


def test_tensors_read_back(written: Path) -> None:
    opened = checkpoints.open_checkpoint(written)
    assert isinstance(opened, OrbaxFolder)
    assert opened.config == {"model_type": "llama"}
    assert opened.generation_config == {}
    assert opened.names() == tuple(sorted(ARRAYS))
    for name, expected in ARRAYS.items():
        assert opened.shape(name) == expected.shape
        assert opened.dtype(name) == expected.dtype
        assert_same(opened.read(name), expected, name)


slices = st.builds(
    slice,
    st.none() | st.integers(-70, 70),
    st.none() | st.integers(-70, 70),
    st.none() | st.sampled_from([1, 1, 2, -1, 7]),
)


@given(name=st.sampled_from(sorted(ARRAYS)), index=st.lists(slices, max_size=2))
def test_every_part_is_numpys_part(opened: OrbaxFolder, name: str, index: list[slice]) -> None:
    part = tuple(index[: len(opened.shape(name))])
    assert_same(opened.read(name, part), ARRAYS[name][part], f"{name}{part}")


def test_large_reads_are_put_together_from_runs(opened: OrbaxFolder, monkeypatch: Any) -> None:
    for run_bytes in (1, 100_000, 600_000, 2_000_000):
        monkeypatch.setattr(orbax_folder, "_RUN_BYTES", run_bytes)
        for name, expected in ARRAYS.items():
            assert_same(opened.read(name), expected, name)
        for rows in (slice(1, 999), slice(125, 250), slice(900, None, -3), slice(7, 7)):
            part = (rows, slice(100, 300))
            assert_same(
                opened.read("model.embed_tokens.weight", part), ARRAYS["model.embed_tokens.weight"][part]
            )


def test_unusable_requests_are_refused_by_name(opened: OrbaxFolder) -> None:
    for ask in (opened.read, opened.shape, opened.dtype):
        with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
            ask("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*2 slices"):
        opened.read("model.norm.weight", (slice(None), slice(None)))


# ------------------------------------------------------------------------------------ Orbax itself


def test_orbax_restores_what_was_written(written: Path) -> None:
    import jax
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(written / "params")
        target = {
            name: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
            )
            for name, array in ARRAYS.items()
        }
        placed = checkpointer.restore(written / "params", target)
    assert set(tree) == set(placed) == set(ARRAYS)
    for name, expected in ARRAYS.items():
        assert_same(np.asarray(tree[name]), expected, name)
        assert isinstance(placed[name], jax.Array)
        assert_same(np.asarray(placed[name]), expected, name)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_what_orbax_saved_opens(tmp_path: Path, nested: bool, kind: str) -> None:
    """Orbax's own defaults: zarr 2, compressed, one chunk per tensor, no manifest of ours."""
    import jax
    import orbax.checkpoint as ocp

    flat = {name: array for name, array in ARRAYS.items() if "special" not in name}
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        keys = name.split(".") if nested else [name]
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = jax.numpy.asarray(array) if kind == "jax" else array
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", tree)
    (tmp_path / "config.json").write_text("{}")
    opened = checkpoints.open_checkpoint(tmp_path)
    assert opened.names() == tuple(sorted(flat))
    for name, expected in flat.items():
        assert_same(opened.read(name), expected, name)
    part = (slice(3, 9), slice(-7, None))
    assert_same(opened.read("model.embed_tokens.weight", part), ARRAYS["model.embed_tokens.weight"][part])


SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from checkpoints.orbax_folder import OrbaxFolder

opened = OrbaxFolder(Path(sys.argv[1]))
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("tp",))
for name, spec in (
    ("model.embed_tokens.weight", ("tp", None)), ("model.layers.0.mlp.down_proj.weight", (None, "tp")),
):
    taken = []
    def part(index):
        values = opened.read(name, index)
        taken.append(values.nbytes)
        return values
    placed = jax.make_array_from_callback(
        opened.shape(name), NamedSharding(mesh, PartitionSpec(*spec)), part)
    whole = opened.read(name)
    assert len(taken) == 4 and sum(taken) == whole.nbytes, taken
    for shard in placed.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()
print("sharded")
"""


def test_each_device_gets_its_own_part(written: Path) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(written)],
        cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sharded\n"


def database(folder: Path) -> ts.KvStore:
    base = {"driver": "file", "path": f"{folder / 'params'}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def test_a_part_reads_no_chunk_but_its_own(tmp_path: Path) -> None:
    folder, name = write(tmp_path / "model"), "model.embed_tokens.weight"
    store = database(folder)
    keys = [key for key in store.list().result() if key.startswith(f"{name}/c/".encode())]
    assert len(keys) > 4
    for key in keys:
        if not key.startswith(f"{name}/c/0/".encode()):
            store.delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
    (folder / "jaxinfer.json").unlink()  # its sizes are those from before
    opened = OrbaxFolder(folder)
    rows = chunk_shape((1000, 576), 4)[0]
    assert_same(opened.read(name, (slice(0, rows),)), ARRAYS[name][:rows])
    # And what is not there is not zero.
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read \(NOT_FOUND"):
        opened.read(name, (slice(rows, rows + 1),))


# ----------------------------------------------------------------------------------------- damage


def complaint_of(folder: Path) -> str | None:
    """Opens and reads everything; what is read is what was written. The message of the error, if any."""
    try:
        opened = checkpoints.open_checkpoint(folder)
        for name, expected in ARRAYS.items():
            assert_same(opened.read(name), expected, name)
    except CheckpointError as error:
        return str(error)
    return None


def truncated(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(raw: bytes) -> bytes:
        at = int(place * (len(raw) - 1))
        return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]

    return flip


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda raw: None,
    "empty": lambda raw: b"",
    "half": truncated,
    "longer": lambda raw: raw + b"\0" * 100,
    "noise": lambda raw: np.random.default_rng(1).bytes(len(raw)),
    "zeros": lambda raw: b"\0" * len(raw),
    **{f"flip {place}": flipped(place) for place in (0.0, 0.01, 0.3, 0.5, 0.77, 0.99, 1.0)},
}


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "without"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused_or_without_effect(
    written: Path, tmp_path: Path, damage: Callable[[bytes], bytes | None], manifest: bool
) -> None:
    folder = tmp_path / "model"
    refused = 0
    for number, victim in enumerate(sorted(item for item in written.rglob("*") if item.is_file())):
        shutil.copytree(written, folder)
        if not manifest:
            (folder / "jaxinfer.json").unlink()
        target = folder / victim.relative_to(written)
        if target.exists():
            left = damage(target.read_bytes())
            target.unlink() if left is None else target.write_bytes(left)
            with cpu_time() as spent:
                complaint = complaint_of(folder)
                if complaint is not None:
                    refused += 1
                    assert str(folder) in complaint
                    assert "\n" not in complaint
                assert spent() < 5.0, (number, victim)
        shutil.rmtree(folder)
    assert refused >= 2  # _METADATA and the data at least


def test_with_a_manifest_missing_files_show_on_opening(written: Path, tmp_path: Path) -> None:
    for victim in sorted((written / "params").rglob("*")):
        if victim.is_dir():
            continue
        for damage in (lambda path: path.unlink(), lambda path: os.truncate(path, 10)):
            folder = tmp_path / "model"
            shutil.copytree(written, folder)
            damage(folder / victim.relative_to(written))
            with pytest.raises(CheckpointError, match=victim.name):
                OrbaxFolder(folder)
            shutil.rmtree(folder)


def hostile(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A folder whose _METADATA is what `change` makes of it (nothing returned: changed in place)."""
    write(folder, {"a": np.ones((4, 4), np.float32)})
    (folder / "jaxinfer.json").unlink()
    path = folder / "params" / "_METADATA"
    metadata = json.loads(path.read_text())
    other = change(metadata)
    path.write_text(json.dumps(metadata if other is None else other))
    return folder


def entry(keys: Any, kind: Any = "np.ndarray") -> dict[str, Any]:
    return {"key_metadata": keys, "value_metadata": {"value_type": kind}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.clear(), "use_ocdbt"),
        (lambda m: m.update(use_ocdbt=False), "use_ocdbt False, expected true"),
        (lambda m: m.update(tree_metadata=[]), "tree_metadata"),
        (lambda m: m.update(tree_metadata={}), "tree_metadata"),
        (lambda m: m["tree_metadata"].update(x=3), "entry x is damaged"),
        (lambda m: m["tree_metadata"].update(x={"key_metadata": [{"key": "b"}]}), "entry x is damaged"),
        (lambda m: m["tree_metadata"].update(x=entry([])), "not the name of a tensor"),
        (lambda m: m["tree_metadata"].update(x=entry([{"key": 7}])), "not the name of a tensor"),
        (lambda m: m["tree_metadata"].update(x=entry([{"key": "../../x"}])), "not the name of a tensor"),
        (lambda m: m["tree_metadata"].update(x=entry([{"key": "b\n"}])), "not the name of a tensor"),
        (lambda m: m["tree_metadata"].update(x=entry([{"key": "b"}], "scalar")), "got 'scalar'"),
        (lambda m: m["tree_metadata"].update(x=entry([{"key": "b"}])), "tensor b cannot be opened"),
        (lambda m: m["tree_metadata"].update(x=entry([{"key": "a"}])), "two entries"),
        (lambda m: m.update(use_zarr3=False), "tensor a cannot be opened"),
        (lambda m: [m], "expected an object"),
    ],
)
def test_hostile_metadata(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoints.open_checkpoint(hostile(tmp_path / "model", change))


@pytest.mark.parametrize(
    ("shape", "chunk", "kind", "message"),
    [
        ([10**9, 10**9], [10**4, 10**4], "float32", "chunks of"),
        ([30000, 30000], [1, 1], "float32", "900000000 chunks"),
        ([4, 4], [10**5, 10**3], "float32", "none larger than the tensor"),
        ([10**6, 10**6], [10**5, 10**5], "float32", "at most"),
        ([10**7, 10**7], [10**4, 10**4], "bfloat16", "no memory"),
        ([], [], "float32", "got a single number"),
        ([4, 4], [4, 4], "int8", "got type int8"),
        ([4, 4], [4, 4], "float64", "got type float64"),
    ],
)
def test_hostile_arrays(tmp_path: Path, shape: list[int], chunk: list[int], kind: str, message: str) -> None:
    folder = hostile(tmp_path / "model", lambda m: m["tree_metadata"].update(x=entry([{"key": "b"}])))
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / 'params'}/"}, "path": "b/"
        },
        "metadata": {
            "shape": shape,
            "data_type": kind,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }  # fmt: skip
    ts.open(spec, create=True).result()
    with pytest.raises(CheckpointError, match=rf"tensor b.*{message}"):
        checkpoints.open_checkpoint(folder).read("b")


def test_a_pipe_in_params_blocks_nobody(written: Path, tmp_path: Path) -> None:
    for name in ("manifest.ocdbt", "_METADATA"):
        for manifest in (True, False):
            folder = tmp_path / "model"
            shutil.copytree(written, folder)
            (folder / "params" / name).unlink()
            os.mkfifo(folder / "params" / name)
            if not manifest:
                (folder / "jaxinfer.json").unlink()
            with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
                OrbaxFolder(folder)
            shutil.rmtree(folder)


def test_files_of_another_checkpoint_are_not_taken_for_this_ones(written: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", {name: array + 1 for name, array in ARRAYS.items()})

    def mixed(name: str, *, without: bool = False) -> Path:
        folder = tmp_path / name
        shutil.copytree(written, folder)
        if without:
            shutil.rmtree(folder / "params" / "d")
        shutil.copytree(other / "params" / "d", folder / "params" / "d", dirs_exist_ok=True)
        shutil.copy(other / "params" / "manifest.ocdbt", folder / "params")
        return folder

    with pytest.raises(CheckpointError, match=r"params: file d/\w+ is not in jaxinfer\.json"):
        OrbaxFolder(mixed("all"))
    # Files in d that are the listed ones: the hash of what points into them tells.
    folder = mixed("renamed", without=True)
    manifest = json.loads((other / "jaxinfer.json").read_text())
    manifest["sha256"] = json.loads((written / "jaxinfer.json").read_text())["sha256"]
    (folder / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt: got sha256 \w+, expected '"):
        OrbaxFolder(folder)


def test_a_manifest_that_is_a_lost_link_is_not_absent(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "model")
    (tmp_path / "model" / "jaxinfer.json").unlink()
    (tmp_path / "model" / "jaxinfer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"jaxinfer\.json: cannot be read"):
        OrbaxFolder(tmp_path / "model")


@pytest.mark.parametrize(
    "manifest", [{}, {"format": "other", "params": {}}, {"format": "jaxinfer-params-1", "params": [1]}]
)
def test_a_strange_manifest_is_refused(written: Path, tmp_path: Path, manifest: dict) -> None:
    shutil.copytree(written, tmp_path / "model")
    (tmp_path / "model" / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"jaxinfer\.json: got format"):
        OrbaxFolder(tmp_path / "model")


def test_two_kinds_of_weights_are_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "model")
    write_safetensors(tmp_path / "model", pending(ARRAYS))
    with pytest.raises(CheckpointError, match="expected one of the two"):
        checkpoints.open_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "params" / "_METADATA").unlink()  # any folder of that name
    assert checkpoints.open_checkpoint(tmp_path / "model").names() == tuple(sorted(ARRAYS))


def test_any_folder_name_will_do(tmp_path: Path) -> None:
    folder = write(tmp_path / "a b?c#d%41|é")
    assert_same(checkpoints.open_checkpoint(folder).read("special"), ARRAYS["special"])


def test_reading_costs_the_tensors_own_size(tmp_path: Path) -> None:
    size = 1 << 27
    folder = write(tmp_path / "model", {"a": np.ones((size // 4096, 1024), np.float32)})
    code = (
        "import resource, sys; from pathlib import Path; from checkpoints.orbax_folder import OrbaxFolder\n"
        "opened = OrbaxFolder(Path(sys.argv[1])); opened.read('a', (slice(0, 1),))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "opened.read('a'); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 1.35 * size, int(done.stdout) * unit / size


def test_the_package_imports_no_orbax_and_tensorstore_late() -> None:
    code = (
        "import sys, checkpoints; assert 'tensorstore' not in sys.modules; import checkpoints.orbax_folder; "
        "assert not {'orbax', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
