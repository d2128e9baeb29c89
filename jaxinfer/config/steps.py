"""The buckets: static shapes of the compiled step programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """A bucket: the static shape of one compiled step program.

    `tokens` T packed tokens, of which the first `decode_rows` are rows of one token; the rest hold at most
    `chunk_rows` rows of more than one. Rows B = decode_rows + chunk_rows; each may emit.
    """

    tokens: int
    decode_rows: int
    chunk_rows: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_rows

    @property
    def chunk_tokens(self) -> int:
        return self.tokens - self.decode_rows

    def holds(self, ones: int, chunks: int, chunk_tokens: int) -> bool:
        """Whether a plan of `ones` one-token slices and `chunks` longer ones fits."""
        return ones <= self.decode_rows and chunks <= self.chunk_rows and chunk_tokens <= self.chunk_tokens

    def __str__(self) -> str:
        return f"T{self.tokens}/D{self.decode_rows}/C{self.chunk_rows}"


def shape_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[StepShape, ...]:
    """The buckets, cheapest first; every plan within the two limits fits one of them.

    Decode alone: 1, 2, 4, ... rows. With chunks: 16, 32, 64, ... chunk tokens beside no decode rows, a few
    (where all of them would be much of the step), or all. (32 seqs, 512 tokens: 6 + 15 = 21 programs.)
    """
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    shapes = {StepShape(rows, rows, 0) for rows in _powers(1, most_rows)}
    for chunk_tokens in _powers(16, max_num_batched_tokens):
        top = chunk_tokens == max_num_batched_tokens
        chunk_rows = most_rows if top else min(most_rows, max(2, chunk_tokens // 8))
        choices = {0}
        if top or chunk_tokens >= most_rows:
            choices.add(most_rows)
        if chunk_tokens < 8 * most_rows:
            choices.add(min(8, most_rows))
        for decode_rows in choices:
            shapes.add(StepShape(decode_rows + chunk_tokens, decode_rows, chunk_rows))
    return tuple(sorted(shapes))


def _powers(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... below high, then high itself."""
    steps = []
    while low < high:
        steps.append(low)
        low *= 2
    return [*steps, high]
