"""The text of a growing list of tokens: emitted as early as it is certain, and never taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.text.stop_strings import StopFinder


class IncrementalDecoder(Protocol):
    """Tokens in, finished characters out (`pieces.ByteDecoder`, `pieces.PieceDecoder`)."""

    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class TextStream:
    """Incremental detokenizer with stop strings; made by `Tokenizer.stream`, one per output.

    The concatenation of all `push` results and `finish()` is the one-shot decode of the pushed ids, cut at
    the first stop string. No result holds half a character, or text that may still become a stop string. A
    push costs the same however much was pushed before.

    One match may be decided only by `finish()`: with the stop strings "abcd" and "c", the text "abc" waits
    for its next character. So look at `stopped` after `finish()` too.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """stop: strings that end the output; include_stop: whether the output ends with the one found;
        min_tokens: a stop string that lies within the text of that many first tokens does not count.
        """
        self._decoder = decoder
        self._stops = StopFinder([stop] if isinstance(stop, str) else stop, include_stop)
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._finished = False
        self.pushed = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; what is pushed afterwards is ignored."""
        return self._stops.matched is not None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now (often empty)."""
        assert not self._finished, "push after finish"
        if self.stopped:
            return ""
        self.pushed += 1
        return self._emit(self._stops.feed(self._decoder.push(token_id), self.pushed > self._min_tokens))

    def finish(self) -> str:
        """The output ends here: returns the text that was still held back. A second call returns nothing."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        rest = self._stops.feed(self._decoder.finish(), self.pushed > self._min_tokens)
        return self._emit(rest + self._stops.finish())

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
