"""Random outputs of a matcher: what a model could write, drawn without a model."""

from __future__ import annotations

import random

from jaxinfer.text import Tokenizer
from jaxinfer.text.grammar import Matcher


def allowed_ids(mask: bytes, vocab_size: int) -> list[int]:
    bits = int.from_bytes(mask, "little")
    assert bits >> vocab_size == 0, "an id past the vocabulary is allowed"
    return [token for token in range(vocab_size) if bits >> token & 1]


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, longest: int = 4000) -> list[int]:
    """Ids of a complete output, without its end. Ends now and then where it may, and after some
    tokens takes, half of the time, a byte that closes something if there is one."""
    draw = random.Random(seed)
    closing = set(b'"}],0 .:@')
    ids: list[int] = []
    while not matcher.finished:
        choices = allowed_ids(matcher.mask(), tokenizer.vocab_size)
        ends = [token for token in choices if token in tokenizer.eos_ids]
        texts = [token for token in choices if token not in tokenizer.eos_ids]
        assert not tokenizer.special_ids & set(texts), "a special token is allowed inside of text"
        assert set(ends) in (set(), set(tokenizer.eos_ids)), "some end ids are allowed and others are not"
        if ends and (draw.random() < 0.3 or len(ids) > 40):
            matcher.accept(draw.choice(ends))
            assert matcher.finished
            break
        if len(ids) > draw.randrange(5, 40) and draw.random() < 0.5:
            first = tokenizer.token_bytes
            texts = [t for t in texts if len(first(t)) == 1 and first(t)[0] in closing] or texts
        ids.append(draw.choice(texts))
        matcher.accept(ids[-1])
        assert len(ids) < longest, tokenizer.decode(ids)[:200]
    return ids
