"""A GGUF file's tokenizer as the files of a Hugging Face folder.

The tokenizer is the one this project runs (`gguf_tokenizer`), written by the `tokenizers` library itself:
whoever opens tokenizer.json gets its ids, with or without the settings beside it.
"""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.text.gguf_tokenizer import adds_bos_and_eos, build_from_gguf
from jaxinfer.text.sources import GGUFSource
from jaxinfer.text.tokenizer import set_post_processor

UNLIMITED = int(1e30)
"""What transformers takes for "no limit" in `model_max_length`."""


def hugging_face_files(source: GGUFSource, *, max_length: int | None = None) -> dict[str, str]:
    """Texts of tokenizer.json, tokenizer_config.json and, with a template, chat_template.jinja, by file name.

    `max_length` is the model's context in tokens. Raises TokenizerError for a tokenizer that this project
    cannot build.
    """
    core = build_from_gguf(source)
    eos_id = source.eos_token_ids[0] if source.eos_token_ids else None
    add_bos, add_eos = adds_bos_and_eos(source)
    set_post_processor(core, source.bos_token_id if add_bos else None, eos_id if add_eos else None)

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": UNLIMITED if max_length is None else max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    # transformers would set the pre-tokenizer's flag to its own default, false, where this is not said.
    if source.model == "gpt2":
        config["add_prefix_space"] = bool(source.add_space_prefix)
    named = {
        "bos_token": source.bos_token_id,
        "eos_token": eos_id,
        "unk_token": source.unknown_token_id,
        "pad_token": getattr(source, "padding_token_id", None),
    }
    for key, token_id in named.items():
        text = None if token_id is None else core.id_to_token(token_id)
        if text is not None:
            config[key] = text
    files = {"tokenizer.json": core.to_str(pretty=True)}
    if source.chat_template is not None:
        config["chat_template"] = source.chat_template  # for readers that do not know chat_template.jinja
        files["chat_template.jinja"] = source.chat_template
    files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return files
