"""The buckets: static shapes of the compiled programs."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.core import StepPlan

QUERY_TILES = (256, 32)
"""Tokens of the tiles that attention cuts chunks into, largest first, where no backend asks for others."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """A bucket of forward passes: the static shape of one compiled program.

    `tokens` T packed tokens, of which the first `decode_rows` are rows of one token; the rest hold at most
    `chunk_rows` rows of more than one, or, with `decode_rows` 0, of any count. Rows B = decode_rows +
    chunk_rows. Attention cuts chunks into query tiles of `tiles` tokens, largest first; `uniform`: into tiles
    of one size, and one-token slices run as chunks (see `invariant_ladder`). With `cut` (pages of so many
    tokens) a chunk takes a row for each page that it touches, with a table of its own (see
    `runtime.compact`): `chunk_rows` then counts chunks, and B is more.
    """

    tokens: int
    decode_rows: int
    chunk_rows: int
    uniform: bool = False
    tiles: tuple[int, ...] = QUERY_TILES
    cut: int | None = None

    @property
    def rows(self) -> int:
        return self.decode_rows + self.table_rows

    @property
    def table_rows(self) -> int:
        """Rows that the chunks take. Of n >= 2 tokens, (n - 2) // Z + 2 pages are touched at most, of one
        1."""
        if self.cut is None:
            return self.chunk_rows
        return min(self.chunk_tokens, self.chunk_tokens // self.cut + 2 * self.chunk_rows)

    @property
    def chunk_tokens(self) -> int:
        return self.tokens - self.decode_rows

    def holds(self, ones: int, chunks: int, chunk_tokens: int) -> bool:
        """Whether a plan of `ones` one-token slices and `chunks` longer ones fits."""
        return ones <= self.decode_rows and chunks <= self.chunk_rows and chunk_tokens <= self.chunk_tokens

    def __str__(self) -> str:
        return f"T{self.tokens}/D{self.decode_rows}/C{self.chunk_rows}" + ("/uniform" if self.uniform else "")


@dataclass(frozen=True, slots=True, order=True)
class SampleShape:
    """A bucket of the sampler: `rows` B rows of logits with `changes` N changed logits between them."""

    rows: int
    changes: int

    def __str__(self) -> str:
        return f"B{self.rows}/N{self.changes}"


@dataclass(frozen=True, slots=True)
class Granularity:
    """How finely a ladder divides: the fewest chunk tokens of a bucket, and how many decode rows the buckets
    have in which all of them would be much of the step (0: there are none)."""

    least_chunk: int
    few_rows: int

    @classmethod
    def of(cls, platform: str) -> Granularity:
        """On CPU every token costs. On a GPU a step of some 200 tokens takes no longer than the weights take
        to be read, and each program takes seconds to compile."""
        return cls(16, 8) if platform == "cpu" else cls(128, 0)


def shape_ladder(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tiles: tuple[int, ...] = QUERY_TILES,
    platform: str = "cpu",
    *,
    cut: int | None = None,
) -> tuple[StepShape, ...]:
    """The buckets, cheapest first; every plan within the two limits fits one of them. `cut`: of a StepShape.

    Decode alone: 1, 2, 4, ... rows. With chunks: `Granularity.least_chunk` chunk tokens, twice as many, ...
    beside no decode rows, a few (where all of them would be much of the step), or all. (On CPU 32 seqs, 512
    tokens: 6 + 15 = 21 programs. On GPU 256, 2048: 9 + 10.)
    """
    grain = Granularity.of(platform)
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    shapes = {StepShape(rows, rows, 0, tiles=tiles, cut=cut) for rows in _powers(1, most_rows)}
    for chunk_tokens in _powers(grain.least_chunk, max_num_batched_tokens):
        top = chunk_tokens == max_num_batched_tokens
        chunk_rows = most_rows if top else min(most_rows, max(2, chunk_tokens // 8))
        choices = {0}
        if top or chunk_tokens >= most_rows or not grain.few_rows:
            choices.add(most_rows)
        if grain.few_rows and chunk_tokens < 8 * most_rows:
            choices.add(min(grain.few_rows, most_rows))
        for decode_rows in choices:
            shapes.add(StepShape(decode_rows + chunk_tokens, decode_rows, chunk_rows, tiles=tiles, cut=cut))
    return tuple(sorted(shapes))


def invariant_ladder(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tiles: tuple[int, ...] = QUERY_TILES,
    *,
    cut: int | None = None,
) -> tuple[StepShape, ...]:
    """The one bucket of a run whose ids and logprobs do not depend on the batch, the chunks or the cache.

    A product of 512 rows may add its terms in another order than one of 8, and so may each kernel that a
    library picks by shape. With one shape every token goes through the same instructions in the same order,
    wherever in the step it stands: one-token slices run as chunks, tiles of queries have one size, blocks of
    keys begin at multiples of their size, and the sampler has one number of rows. (A few shapes were tried on
    CPU, where products alone do not depend on the number of rows; what is fused behind them does.)
    """
    rows = min(max_num_seqs, max_num_batched_tokens)
    return (StepShape(max_num_batched_tokens, 0, rows, uniform=True, tiles=tiles[-1:], cut=cut),)


def is_invariant(ladder: tuple[StepShape, ...]) -> bool:
    """Whether a ladder is an `invariant_ladder`: one-token slices then run as chunks."""
    return all(shape.uniform for shape in ladder)


def most_emitting(ladder: tuple[StepShape, ...]) -> int:
    """R, the most slices of a step that emit: the max_num_seqs that the ladder was made for."""
    return max(max(shape.decode_rows, shape.chunk_rows) for shape in ladder)


def choose_step_shape(plan: StepPlan, ladder: tuple[StepShape, ...]) -> StepShape:
    """The cheapest bucket that holds the plan."""
    ones = sum(len(piece.tokens) == 1 for piece in plan.slices)
    return cheapest_shape(ladder, ones, len(plan.slices) - ones, plan.num_tokens - ones)


def cheapest_shape(ladder: tuple[StepShape, ...], ones: int, chunks: int, chunk_tokens: int) -> StepShape:
    """The cheapest bucket that holds `ones` one-token slices, and `chunks` longer ones of so many tokens."""
    if is_invariant(ladder):
        ones, chunks, chunk_tokens = 0, ones + chunks, ones + chunk_tokens
    for shape in ladder:
        if shape.holds(ones, chunks, chunk_tokens):
            return shape
    raise AssertionError(f"no bucket holds {ones} one-token slices, {chunks} chunks, {chunk_tokens} tokens")


def sampled_rows(ladder: tuple[StepShape, ...], emitting: int) -> int:
    """Rows of the sampler's cheapest bucket (`sample_ladder`) for so many slices that emit, or rows that are
    scored; 0 when there are none."""
    most = most_emitting(ladder)
    if not emitting or is_invariant(ladder):
        return most if emitting else 0
    return min(1 << (emitting - 1).bit_length(), max(most, emitting))


FEW_CHANGES = 512
"""Changed logits a row of the sampler's small buckets: a page of text with penalties."""


def sample_ladder(
    ladder: tuple[StepShape, ...], vocab_size: int, most_changes: int
) -> tuple[SampleShape, ...]:
    """The buckets of the sampler beside those of the forward pass, cheapest first.

    1, 2, 4, ... rows without changes, and three numbers of rows with few changes and with as many as
    `most_changes`, the most that one row can have (32 rows: 6 + 6). Of an invariant ladder all rows alone.
    """
    most_rows = most_emitting(ladder)
    few = min(8, most_rows)
    if is_invariant(ladder):
        rows = with_changes = {most_rows}
    else:
        rows, with_changes = set(_powers(1, most_rows)), {1, few, most_rows}
    most = min(most_changes, vocab_size)
    shapes = {SampleShape(b, 0) for b in rows}
    shapes |= {SampleShape(b, b * n) for b in with_changes for n in (min(FEW_CHANGES, most), most)}
    return tuple(sorted(shapes))


def _powers(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... below high, then high itself."""
    steps = []
    while low < high:
        steps.append(low)
        low *= 2
    return [*steps, high]
