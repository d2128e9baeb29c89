"""Shapes of well-known models, as their published config.json keys; for `random:NAME` and for planning.

Sources: the config.json of each model's official repository on the Hugging Face hub.
"""

from __future__ import annotations

from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
_LLAMA31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_LLAMA,
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "llama2-7b": {
        **_LLAMA,
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "llama2-13b": {
        **_LLAMA,
        "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40, "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "llama2-70b": {
        **_LLAMA,
        "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "llama3-70b": {
        **_LLAMA,
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "llama3.1-8b": {
        **_LLAMA,
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": _LLAMA31_ROPE,
    },
    "llama3.1-70b": {
        **_LLAMA,
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": _LLAMA31_ROPE,
    },
    "llama3.2-1b": {
        **_LLAMA,
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA31_ROPE, "factor": 32.0},
    },
    "mistral-7b": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "sliding_window": None,
    },
    "llama3-8b": {
        **_LLAMA,
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
}  # fmt: skip
"""Name -> config.json keys."""
