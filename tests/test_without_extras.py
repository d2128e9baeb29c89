"""What a model of random weights, or a folder, needs: not the packages of GGUF files, grammars, server or
CLI.

A machine with a GPU may have jax, flax and numpy, and no way to install what else there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABSENT = ("gguf", "fastapi", "starlette", "uvicorn", "llguidance", "tyro", "openai", "torch", "transformers")


def test_random_weights_generate_without_them(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 300,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = f"""
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {ABSENT!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Absent())
        import benchmarks.gpu, benchmarks.gpu_parts
        import pallas_kernels.bench.__main__, pallas_kernels.bench.worker
        from jaxinfer import LLM, SamplingParams
        llm = LLM("random:{tmp_path}", max_num_seqs=1, max_num_batched_tokens=16, progress=False)
        (answer,) = llm.generate("Hello", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        print(len(answer.outputs[0].token_ids))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True,
        timeout=300, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]
