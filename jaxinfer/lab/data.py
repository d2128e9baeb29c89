"""Texts to learn from: read, tokenised, joined to one stream and cut into blocks of one length.

    stream   BOS a b c EOS BOS d e EOS          what the tokenizer puts before a text, and EOS after each
    block 0  BOS a b c | targets a b c EOS      S = 4 inputs; the target of each is the token after it
    block 1  EOS BOS d e | targets BOS d e EOS

Blocks overlap by one token, so that every token but the stream's first is a target once. Attention inside a
block sees over the border of texts, as is usual where models are trained on packed texts; EOS tells it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxinfer.core import RequestError
from jaxinfer.text.tokenizer import Tokenizer


def token_stream(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> np.ndarray:
    """The texts' ids one after the other, int32 [tokens]: each with what the tokenizer adds to a text (BOS,
    of those that have it) and an EOS at its end, if the tokenizer has one.

    Raises RequestError for a text with a token that the model has no row for.
    """
    eos = tokenizer.eos_token_id
    parts = []
    for text in texts:
        ids = tokenizer.encode(text)
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        parts.append(np.asarray(ids, np.int32))
    stream = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if stream.size and stream.max() >= vocab_size:
        token = int(stream.max())
        raise RequestError(
            f"the texts hold token {token} ({tokenizer.token_text(token)!r}), and the model's vocabulary "
            f"ends at {vocab_size - 1}",
            "data",
        )
    return stream


@dataclass(frozen=True, slots=True)
class Blocks:
    """tokens int32 [blocks, S + 1]: S inputs and, one further, their targets. counted bool [blocks, S]: which
    targets are tokens; what fills the last block up is not."""

    tokens: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """S."""
        return self.counted.shape[1]

    @property
    def num_targets(self) -> int:
        return int(self.counted.sum())

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens and counted of these blocks; -1 is a block of which no target counts."""
        missing = numbers < 0
        return self.tokens[numbers], self.counted[numbers] & ~missing[..., None]

    def digest(self) -> str:
        """What tells these blocks from others: sha256, in hexadecimal digits."""
        found = hashlib.sha256(np.ascontiguousarray(self.tokens))
        found.update(np.ascontiguousarray(self.counted))
        return found.hexdigest()


def pack(stream: np.ndarray, length: int, *, most_targets: int | None = None) -> Blocks:
    """Cut a stream int32 [tokens] into blocks of `length` S targets, the last one filled up with zeros.

    `most_targets` leaves out what comes after so many, in whole blocks, but never the first block. Raises
    RequestError for a stream without a target.
    """
    targets = len(stream) - 1
    if targets < 1:
        raise RequestError(
            f"the texts have {len(stream)} tokens together, and there is nothing to predict", "data"
        )
    count = -(-targets // length)
    if most_targets is not None:
        count = min(count, max(1, most_targets // length))
    padded = np.zeros(count * length + 1, np.int32)
    kept = stream[: len(padded)]
    padded[: len(kept)] = kept
    places = np.arange(count)[:, None] * length + np.arange(length + 1)
    return Blocks(padded[places], places[:, 1:] <= targets)


class Order:
    """In which order blocks are learnt from: all of them in a random order, then all in another one, and so
    on. Where one is in it is one number, how many blocks were taken; nothing else is random in training."""

    def __init__(self, blocks: int, seed: int):
        assert blocks > 0, blocks
        self.blocks, self.seed = blocks, seed
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def take(self, position: int, count: int) -> np.ndarray:
        """The numbers int64 [count] of the blocks at position .. position + count - 1."""
        found = np.empty(count, np.int64)
        for place in range(count):
            epoch, within = divmod(position + place, self.blocks)
            if epoch != self._epoch:
                generator = np.random.default_rng([self.seed, epoch])
                self._epoch, self._permutation = epoch, generator.permutation(self.blocks)
            found[place] = self._permutation[within]
        return found
