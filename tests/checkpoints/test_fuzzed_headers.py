"""Random bits flipped in the headers of small files: an error of ours or a clean load, and nothing else."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest
from cpu_time import cpu_time
from damage import load, write_model
from folder_writing import SINGLE

import checkpoints
from jaxinfer.core import ConfigError

# A thorough run: JAXINFER_FUZZ=20000 pytest tests/checkpoints/test_fuzzed_headers.py
FLIPS = int(os.environ.get("JAXINFER_FUZZ", "250"))


def region(path: Path) -> int:
    """Bytes of the file that are header."""
    raw = path.read_bytes()
    if path.suffix == ".gguf":
        return raw.index(b"output_norm.weight") + 2000
    if path.suffix == ".safetensors":
        return 8 + struct.unpack("<Q", raw[:8])[0]
    return len(raw)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gguf", "tiny.gguf"),
        ("single", SINGLE),
        ("single", "config.json"),
        ("sharded", "model.safetensors.index.json"),
    ],
)
def test_flipped_bits(tmp_path: Path, kind: str, name: str, seed: int) -> None:
    path = write_model(tmp_path, kind)
    file = tmp_path / name
    raw, size = file.read_bytes(), region(file)
    generator = random.Random(seed)
    slowest, loaded, longest = 0.0, 0, 0
    for _ in range(FLIPS):
        damaged = bytearray(raw)
        places = [generator.randrange(size) for _ in range(generator.choice((1, 1, 2, 8)))]
        for place in places:
            damaged[place] = generator.choice((damaged[place] ^ (1 << generator.randrange(8)), 0, 255, 0x5B))
        file.write_bytes(damaged)
        with cpu_time() as spent:
            try:
                load(path)
                loaded += 1
            except (checkpoints.CheckpointError, ConfigError) as error:
                longest = max(longest, len(str(error)))
            except BaseException as error:
                error.add_note(f"{name}, seed {seed}: bytes {places} became {[damaged[p] for p in places]}")
                raise
            slowest = max(slowest, spent())
    assert loaded < FLIPS
    assert slowest < 1.0, slowest
    assert longest < 3000, longest
