"""Recipes of comparisons for tests: small, and of a model that is trained in seconds."""

from __future__ import annotations

import copy
from typing import Any

SMALL: dict[str, Any] = {
    "name": "small",
    "source": {
        "vocabulary": 257,
        "data": ["rhyme.txt"],
        "config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": True,
        },
        "train": {"tokens": 512, "batch": 4, "sequence_length": 16, "learning_rate": 3e-3},
    },
    "variant": [{"name": "MQA", "kv_heads": 1}],
    "grid": {"methods": ["mean"], "tokens": [0, 64], "seeds": [0]},
    "uptrain": {"data": ["rhyme.txt"], "batch": 2, "sequence_length": 16, "learning_rate": 1e-3},
    "evaluate": {"perplexity": [{"file": "rhyme.txt", "start": 0.5}], "window": 32, "windows": 4},
    "engine": {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64},
    "calibration": {"tokens": 128},
}  # fmt: skip


def recipe(**changes: Any) -> dict[str, Any]:
    """SMALL with keys changed: names are paths with two underscores, None removes one."""
    value = copy.deepcopy(SMALL)
    for path, new in changes.items():
        *above, name = path.split("__")
        table = value
        for key in above:
            table = table[int(key)] if isinstance(table, list) else table.setdefault(key, {})
        if new is None:
            del table[name]
        else:
            table[name] = new
    return value
