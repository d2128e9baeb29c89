"""Which keys a query sees where that is set by hand and not by the checkpoint: `EngineConfig.attention_span`.

    window:W                               the last W tokens (Mistral, 2310.06825)
    window:W,sinks:S                       and the first S tokens (StreamingLLM, 2309.17453)
    longformer:W,global:G                  the last W tokens and the first G pages (Longformer, 2004.05150)
    bigbird:W,global:G,random:R[,seed:X]   the last W tokens, the first G pages and R random ones between, all
                                           in whole pages (BigBird, 2007.14062)
    topk-pages:K[,skip:L][,from:P]         the K pages with the highest bounds on scores (Quest, 2406.10774)

W, S and P count tokens, G, R and K pages of Z tokens, L layers. All are causal. `sees(query, key)` of each
class is the specification to which tests hold every backend and the training pass; positions are those of
the text, and keys keep the rotation of the position that they were written at (StreamingLLM gives them new
ones within its cache).

Window and sinks, and so Longformer, go token by token, as kernels' Rule has them. Among causal queries,
global tokens at the front see no more than any other: Longformer's mask is that of a window with G * Z
sinks. BigBird goes page by page: the queries of one page see the same pages, in every head and layer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.core import ConfigError

LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class WindowSpan:
    """The last `window` tokens, the query's own included, and the first `sinks`.

    window 4, sinks 2, query at 9:  keys 0 1 . . . . 6 7 8 9
    """

    window: int
    sinks: int = 0

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return key <= query and (key > query - self.window or key < self.sinks)


@dataclass(frozen=True, slots=True)
class PageSpan:
    """BigBird's blocks as pages of `page_size` tokens: queries of page j see the pages j - near + 1 .. j, the
    first `global_pages`, and `random_pages` of those between, drawn for (seed, j). Of its own page a query
    sees the keys up to itself.

        near 2, global 1, random 1, queries of page 7:  pages 0 . . 3 . . 6 7
    """

    page_size: int
    near: int
    global_pages: int
    random_pages: int
    seed: int = 0

    def pages(self, page: int) -> tuple[int, ...]:
        """The pages that queries of a page see, in order; the last is their own."""
        return _seen_pages(self, page)

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return key <= query and key // self.page_size in self.pages(query // self.page_size)

    @property
    def most_pages(self) -> int:
        """The most pages that one query sees."""
        return self.near + self.global_pages + self.random_pages

    def keys_of(self, start: int, count: int) -> tuple[int, int]:
        """Of a slice from position `start`: keys that its queries see, those of each page of queries once;
        and keys seen by all its queries together."""
        read = seen = 0
        end = start + count
        while start < end:
            page = start // self.page_size
            stop = min(end, (page + 1) * self.page_size)
            before, queries = (len(self.pages(page)) - 1) * self.page_size, stop - start
            offset = start % self.page_size
            read += before + offset + queries
            seen += queries * (before + offset) + queries * (queries + 1) // 2
            start = stop
        return read, seen


@functools.lru_cache(maxsize=1 << 16)
def _seen_pages(span: PageSpan, page: int) -> tuple[int, ...]:
    first_near = max(0, page - span.near + 1)
    fixed = range(min(span.global_pages, first_near))
    between = list(range(fixed.stop, first_near))
    # A Fisher-Yates shuffle that stops early, by a hash: the same on every machine and Python.
    chosen = min(span.random_pages, len(between))
    for place in range(chosen):
        other = place + _hash(span.seed, page, place) % (len(between) - place)
        between[place], between[other] = between[other], between[place]
    return (*fixed, *sorted(between[:chosen]), *range(first_near, page + 1))


def _hash(*values: int) -> int:
    """splitmix64 over the values, one after the other."""
    state = 0
    for value in values:
        state = (state ^ value % 2**64) + 0x9E3779B97F4A7C15 & 2**64 - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 2**64 - 1
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class TopPages:
    """A query that chooses sees its own page and `count` of the full pages before it, chosen for each KV
    head: those with the highest bound on a score. The bound of a page and a query head is the sum over
    channels of max(q * low, q * high), with the least and the largest key of the page in that channel; of a
    KV head, the largest of its query heads' bounds. Equal bounds: the earlier page.

    The queries after the prompt choose; those of the prompt see all, as in Quest. With `start` the queries at
    that position and later choose, of prompts too: that is how perplexity can be told.
    """

    count: int
    start: int | None = None

    def chooses(self, query: int, num_prompt: int) -> bool:
        """Whether the query at a position chooses, where `num_prompt` tokens are the prompt."""
        return query >= (num_prompt if self.start is None else min(self.start, num_prompt))

    def chosen(self, bounds: Sequence[float]) -> list[int]:
        """The pages chosen, in order, given the bound of each full page before the query's own."""
        ranked = sorted(range(len(bounds)), key=lambda page: (-bounds[page], page))
        return sorted(ranked[: self.count])


@dataclass(frozen=True, slots=True)
class TopPagesSpan:
    """`TopPages` in every layer but the first `skip`, which see all (Quest leaves out two)."""

    pages: TopPages
    skip: int = 0


AttentionSpan = WindowSpan | PageSpan | TopPagesSpan


def no_scoring(span: AttentionSpan | None, tokens: int | None = None) -> str | None:
    """Why texts that are scored tell nothing of a span; None where they do. `tokens`: how many each has at
    most, if that is known."""
    if isinstance(span, TopPagesSpan) and span.pages.start is None:
        return (
            "under topk-pages only the queries after a prompt choose pages, and a text that is scored is all "
            "prompt, which sees everything; say from:P, the position from which queries of texts choose too"
        )
    if isinstance(span, TopPagesSpan) and tokens is not None and (span.pages.start or 0) >= tokens:
        return (
            f"queries choose pages from position {span.pages.start} on, and texts are scored {tokens} tokens "
            "at a time: none chooses; say a lower from:P"
        )
    return None


# ------------------------------------------------------------------------------------------------- as text

_NAMED: dict[str, tuple[dict[str, int], dict[str, int | None]]] = {
    # kind: what must be given besides its own number, and what may be, each with its least value or default
    "window": ({}, {"sinks": 0}),
    "longformer": ({"global": 1}, {}),
    "bigbird": ({"global": 0, "random": 0}, {"seed": 0}),
    "topk-pages": ({}, {"skip": 0, "from": None}),
}
FORMS = (
    "window:W, window:W,sinks:S, longformer:W,global:G, bigbird:W,global:G,random:R[,seed:X], "
    "topk-pages:K[,skip:L][,from:P]"
)


def attention_span(text: str, page_size: int) -> AttentionSpan:
    """What the text of an `attention_span` means for pages of `page_size` tokens. Raises ConfigError.

    >>> attention_span("bigbird:64,global:1,random:2", 16)
    PageSpan(page_size=16, near=4, global_pages=1, random_pages=2, seed=0)
    """
    first, *rest = text.split(",") if isinstance(text, str) else ("",)
    kind, _, number = first.partition(":")
    if kind not in _NAMED:
        raise ConfigError(f"attention_span {text!r} is none of {FORMS}")
    required, optional = _NAMED[kind]
    main = _number(text, kind, number, 1)
    values: dict[str, int | None] = dict(optional)
    given: set[str] = set()
    for part in rest:
        name, _, number = part.partition(":")
        if name not in required.keys() | optional.keys() or name in given:
            raise ConfigError(f"attention_span {text!r}: {part!r} does not belong here; there are {FORMS}")
        given.add(name)
        values[name] = _number(text, name, number, required.get(name, 0))
    if missing := sorted(required.keys() - given):
        raise ConfigError(f"attention_span {text!r} lacks {', '.join(missing)}; there are {FORMS}")
    build: dict[str, Callable[..., AttentionSpan]] = {
        "window": lambda sinks: WindowSpan(main, sinks),
        "longformer": lambda **v: WindowSpan(main, min(v["global"] * page_size, LARGEST)),
        "bigbird": lambda **v: PageSpan(
            page_size, _pages(text, main, page_size), v["global"], v["random"], v["seed"]
        ),
        "topk-pages": lambda **v: TopPagesSpan(TopPages(main, v["from"]), v["skip"]),
    }
    return build[kind](**values)


def _number(text: str, name: str, number: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", number) or not least <= int(number) <= LARGEST:
        raise ConfigError(
            f"attention_span {text!r}: {name} must be an integer of at least {least}, below 2^31; "
            f"got {number!r}"
        )
    return int(number)


def _pages(text: str, tokens: int, page_size: int) -> int:
    if tokens % page_size:
        raise ConfigError(
            f"attention_span {text!r}: bigbird goes page by page, and {tokens} tokens are not whole pages of "
            f"{page_size}; take a multiple, or another page_size"
        )
    return tokens // page_size
