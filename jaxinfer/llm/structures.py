"""A tokenizer as the engine wants it: with the structures that outputs of one model can be bound to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from jaxinfer.core import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine import TextStream
    from jaxinfer.engine.drawing import Matcher


class StructuredTokenizer:
    """Implements `engine.Tokenizer` over a `text.Tokenizer`.

    Masks have the width of the model's output, which a tokenizer does not know and models that share it need
    not agree on; so the compiler of structures belongs here.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        from jaxinfer.text.grammar import GrammarCompiler

        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, vocab_size)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def spellings(self, words: Seq[str]) -> list[tuple[int, ...]]:
        return self._tokenizer.spellings(words)

    def stream(
        self,
        stop: Seq[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> TextStream:
        return self._tokenizer.stream(
            stop=stop,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=min_tokens,
        )

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        return self._compiler.matcher(sampling)

    def check_structure(self, sampling: SamplingParams) -> None:
        """Raise RequestError, naming the field, for a structure that cannot be served. Any thread may ask,
        and what it compiles is kept for `matcher`."""
        self._compiler.check(sampling)
