"""Tokenizer sources for tests: the shape of a GGUF source, and a small byte-level BPE tokenizer in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxinfer.text.pieces import gpt2_alphabet

GOLDEN = Path(__file__).parent / "golden"
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, eq=False)
class SmallSource:
    """A GGUF tokenizer source for tests."""

    tokens: tuple[str, ...]
    model: str = "gpt2"
    pre: str | None = "smollm"
    merges: tuple[str, ...] = ()
    scores: np.ndarray | None = None
    token_types: np.ndarray | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unknown_token_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = None
    path: Path = field(default=Path("small.gguf"))


def small_source(**changes: object) -> SmallSource:
    """256 bytes, a few merges, three control tokens, one user-defined token and one unused one."""
    tokens = [*gpt2_alphabet(), "he", "ll", "hell", "Ġw", "ðŁ", *CONTROLS, "<think>", "[PAD9]"]
    merges = ("h e", "l l", "he ll", "Ġ w", "ð Ł")
    types = [1] * 261 + [3, 3, 3, 4, 5]
    settings: dict[str, object] = {
        "tokens": tuple(tokens),
        "merges": merges,
        "token_types": np.array(types),
        "bos_token_id": tokens.index("<|endoftext|>"),
        "eos_token_ids": (tokens.index("<|im_end|>"),),
        "chat_template": CHATML,
    }
    return SmallSource(**(settings | changes))  # type: ignore[arg-type]
