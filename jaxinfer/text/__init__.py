"""Text and token ids: tokenizers, incremental detokenizing with stop strings, chat templates."""

from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.detokenize import TextStream
from jaxinfer.text.errors import ChatTemplateError, TokenizerError
from jaxinfer.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "ChatTemplateError",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
]
