"""Structured output: which tokens a schema, a pattern, a choice or a grammar allows next.

llguidance (https://github.com/guidance-ai/llguidance) walks a trie of the vocabulary's bytes beside an Earley
parser. It is given the bytes that `Tokenizer.token_bytes` says, so that the text it follows is the text that
the tokenizer decodes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING

from jaxinfer.core import RequestError, SamplingParams, Structure
from jaxinfer.text.grammar_lark import OPTIONS, grammar_of
from jaxinfer.text.pieces import Pieces
from jaxinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CACHE_SIZE = 32
"""Compiled grammars that are kept, the last used ones: some 1 MB each, at worst 50."""

_LIMITS = {
    "initial_lexer_fuel": 400_000,  # building the lexer: 10 ms
    "step_lexer_fuel": 200_000,  # one mask: 15 ms
    "step_max_items": 20_000,  # one mask: some 30 ms
    "max_items_in_row": 1000,
    "max_lexer_states": 50_000,  # some 1 kB each, per output
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,  # walks the whole vocabulary while the client waits
    "verbose_errors": False,  # the text so far is nobody's business
}


class GrammarCompiler:
    """Compiles the structures of requests for one tokenizer; any number of threads may use it at once.

    llguidance is imported, and its tokenizer built (0.3 s for 49k tokens), when the first structure is seen.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: V of the model's logits, which sets the size of masks; ids from the tokenizer's own
        vocab_size on are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[Hashable, ...], LLMatcher] = OrderedDict()

    def check(self, sampling: SamplingParams) -> None:
        """Raise RequestError, naming the field, when the structure of `sampling` cannot be served.

        Takes milliseconds for an ordinary structure, under a second for any, and keeps the result for
        `matcher`. Nothing happens when there is no structure.
        """
        self._compiled(sampling)

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """A matcher at the start of an output; None when `sampling` has no structure. Raises as `check`."""
        compiled = self._compiled(sampling)
        return None if compiled is None else Matcher(compiled, self._vocabulary)

    def _compiled(self, sampling: SamplingParams) -> LLMatcher | None:
        structure = sampling.structure
        if structure is None:
            return None
        key = _cache_key(structure)
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known.deep_copy()
        compiled = self._vocabulary.compile(grammar_of(structure), structure.param)
        with self._lock:
            self._cache[key] = compiled
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
            # Only copies leave the lock: a matcher that two threads touch raises.
            return compiled.deep_copy()

    @property
    def _vocabulary(self) -> _Vocabulary:
        with self._lock:
            return self._built_vocabulary

    @cached_property
    def _built_vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, self._vocab_size)


class Matcher:
    """Follows one output through its structure; used by one thread at a time.

    It needs nothing but the tokens: after a preemption the engine keeps it as it is, and a new one that
    accepts the same tokens is in the same state. A RuntimeError from any method (a limit is reached, a token
    that the mask did not allow) ends this output alone: the matcher stays broken, others are untouched.
    """

    def __init__(self, core: LLMatcher, vocabulary: _Vocabulary) -> None:
        """core: a matcher of llguidance that nobody else uses."""
        self._core = core
        self._vocabulary = vocabulary
        self._mask: bytes | None = None
        self._ended = False

    def mask(self) -> bytes:
        """The ids that may come next, as `Draw.mask`: bit i % 32 of little-endian word i // 32.

        ceil(V / 32) words. End ids are set where the structure may end. When `finished`, they alone are (and
        nothing is, for a tokenizer without end ids).
        """
        if self._mask is None:
            mask = self._core.compute_bitmask()
            self._raise_if_broken()
            self._mask = self._vocabulary.fitted(mask)
        return self._mask

    def accept(self, token_id: int) -> None:
        """Go on by one token, which `mask` must allow."""
        if self._ended or not self._core.consume_token(token_id):
            self._raise_if_broken()
            raise RuntimeError(f"structured output: token {token_id} after the end")
        self._mask = None
        self._ended = token_id in self._vocabulary.end_ids

    @property
    def finished(self) -> bool:
        """True when nothing but an end id may follow, or one did: the output is complete."""
        if self._ended:
            return True
        if self._core.is_stopped():
            self._raise_if_broken()
            return True
        # The mask is the dear part, and only asked for where an end is possible; the next `mask` has it then.
        accepting = self._core.is_accepting()
        self._raise_if_broken()
        return accepting and self.mask() == self._vocabulary.end_mask

    def copy(self) -> Matcher:
        """Another matcher in the same state."""
        other = Matcher(self._core.deep_copy(), self._vocabulary)
        other._mask, other._ended = self._mask, self._ended
        return other

    def _raise_if_broken(self) -> None:
        if self._core.is_error():
            raise RuntimeError(f"structured output: {_one_line(self._core.get_error())}")


class _Vocabulary:
    """llguidance's view of a tokenizer, and the layout of masks."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        size = min(tokenizer.vocab_size, vocab_size)
        self.end_ids = frozenset(token for token in tokenizer.eos_ids if token < size)
        rule = tokenizer.decode_rule
        self._unsupported = isinstance(rule, Pieces) and bool(
            rule.separator or rule.drop_in_first or rule.strip[1] > 1 or rule.strip[0] != " "
        )
        self._strips_space = isinstance(rule, Pieces) and rule.strip[1] == 1
        self._spaced = [token for token in range(size) if tokenizer.token_bytes(token).startswith(b" ")]
        tokens = [tokenizer.token_bytes(token) for token in range(size)]
        # llguidance must have an end. Without one: an id past the tokenizer, which masks then leave out.
        ends = sorted(self.end_ids) or [size]
        if not self.end_ids:
            tokens.append(b"")
        special = sorted({token for token in tokenizer.special_ids if token < size} | set(ends))
        self._limits: LLParserLimits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        self._tokens: LLTokenizer = LLTokenizer(_TokenTable(tokens, special, ends[0]), eos_token=ends)  # type: ignore[arg-type]
        self._mask_bytes = (vocab_size + 31) // 32 * 4
        self._kept = size
        self.end_mask = sum(1 << token for token in self.end_ids).to_bytes(self._mask_bytes, "little")

    def compile(self, grammar: str, param: str) -> LLMatcher:
        """A matcher at the start of a grammar. Raises RequestError for one that does not compile, is beyond
        the limits, or allows no text at all."""
        if self._unsupported:
            raise RequestError(f"{param} is not supported with this model's tokenizer (its decoder)", param)
        matcher = self._start(grammar, param)
        if not self._strips_space:
            return matcher
        # SentencePiece: decoding takes one space off the start of an output, and models are used to write it.
        # A structure that never starts with a space may have it; before any other it must be there.
        first = matcher.compute_bitmask()
        begins = any(first[token >> 3] >> (token & 7) & 1 for token in self._spaced)
        outer = {"lark_grammar": f'start: " "{"" if begins else "?"} @inner{OPTIONS}'}
        inner = {"name": "inner", "lark_grammar": grammar}
        return self._start(json.dumps({"grammars": [outer, inner]}), param)

    def _start(self, grammar: str, param: str) -> LLMatcher:
        from llguidance import LLMatcher

        if not grammar.startswith("{"):
            grammar = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        # The first mask shows what the compiler leaves to the first step, and is worth keeping in the cache.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{param}: {_reason(matcher.get_error())}", param)
        return matcher

    def fitted(self, mask: bytes) -> bytes:
        """llguidance's mask, of its own vocabulary, as one of the model's."""
        if not self.end_ids:  # take the id of the made-up end out
            changed = bytearray(mask)
            changed[self._kept >> 3] &= ~(1 << (self._kept & 7)) & 0xFF
            mask = bytes(changed)
        return mask[: self._mask_bytes].ljust(self._mask_bytes, b"\0")


class _TokenTable:
    """What llguidance asks of a tokenizer from Python: its tokens as bytes, and which are special."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, end_id

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("llguidance tokenizes only to force tokens, which is turned off (OPTIONS)")


def _cache_key(structure: Structure) -> tuple[Hashable, ...]:
    """Equal for structures of the same grammar, whatever their callers called them."""
    value = structure.value
    if not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"{structure.param} cannot be written as JSON: {error}", structure.param
            ) from None
    return structure.kind, value, structure.compact, structure.whitespace, structure.closed


def _reason(error: str) -> str:
    """llguidance's message for the caller, who did not write our grammar around the structure."""
    if error.startswith("NoExtension"):
        return "no text can follow it"
    return _one_line(error.replace("failed to compile JSON schema: ", ""))


def _one_line(error: str) -> str:
    line = " ".join(error.split("\n   1 |")[0].replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else line[:297] + "..."
