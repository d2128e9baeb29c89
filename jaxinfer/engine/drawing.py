"""What decides the next token of a sequence besides the model: changes to logits, a grammar, its noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from jaxinfer.core import Draw, Limits, Sequence, Slice
from jaxinfer.engine.changes import SequenceChanges
from jaxinfer.engine.validate import held_back_ids


class Matcher(Protocol):
    """Follows an output that is bound to a structure (`jaxinfer.text.grammar`)."""

    @property
    def finished(self) -> bool:
        """True when the structure is complete and nothing but an end may follow."""
        ...

    def mask(self) -> bytes | None:
        """The ids that may follow, as `Draw.mask`; None allows all."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token. Raises RuntimeError for one that may not follow."""
        ...


class Drawing:
    """Makes the Draws of one sequence. Told of every token, so that none is looked at twice."""

    __slots__ = ("_allowed", "_changes", "_matcher", "_sequence")

    def __init__(
        self,
        sequence: Sequence,
        limits: Limits,
        matcher: Matcher | None,
        banned: Iterable[tuple[int, ...]] = (),
    ):
        """banned: runs of ids that spell the `bad_words`."""
        sampling = sequence.request.sampling
        self._sequence, self._matcher = sequence, matcher
        held = held_back_ids(sampling, limits.eos_token_ids) if sampling.min_tokens else ()
        self._changes = None
        banned = tuple(banned)
        if held or banned or sampling.adjusts_logits:
            prompt = sequence.request.prompt_token_ids
            self._changes = SequenceChanges(sampling, prompt, held, banned=banned)
        self._allowed = None
        if sampling.allowed_token_ids is not None:
            self._allowed = _mask(sampling.allowed_token_ids, limits.vocab_size)

    @property
    def finished(self) -> bool:
        """True when a structure is complete."""
        return self._matcher is not None and self._matcher.finished

    def append(self, token_id: int) -> None:
        """Take the next output token. Raises RuntimeError when the structure does not allow it."""
        if self._changes is not None:
            self._changes.append(token_id)
        if self._matcher is not None:
            self._matcher.accept(token_id)

    def draw(self, piece: Slice) -> Draw:
        """How the token after a slice is chosen; all tokens before it have been appended."""
        sequence, sampling = self._sequence, self._sequence.request.sampling
        changes = None
        if self._changes is not None:
            changes = self._changes.current(hold_ends=sequence.num_output < sampling.min_tokens)
        mask = self._allowed if self._matcher is None else self._matcher.mask()
        return Draw(sampling, sequence.seed, piece.start + piece.count, changes, mask)


def _mask(ids: Iterable[int], vocab_size: int) -> bytes:
    """`Draw.mask` that allows these ids alone."""
    words = bytearray((vocab_size + 31) // 32 * 4)
    for token in ids:
        words[token >> 3] |= 1 << (token & 7)
    return bytes(words)
