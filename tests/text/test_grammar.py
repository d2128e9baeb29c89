"""Patterns, choices and grammars; every kind of tokenizer; the cache, threads, and copies."""

from __future__ import annotations

import re
import statistics
import threading

import pytest
from cpu_time import cpu_time
from grammar_walks import allowed_ids, walk
from small_tokenizers import small_source
from test_grammar_schemas import accepts, record

from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.text import ByteTokenizer, Tokenizer
from jaxinfer.text import grammar as grammar_module
from jaxinfer.text.grammar import GrammarCompiler


@pytest.fixture(scope="module", params=["bytes", "small gguf", "stories"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "stories":
        return request.getfixturevalue("stories")
    return ByteTokenizer() if request.param == "bytes" else Tokenizer.from_gguf(small_source())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def walked(compiler: GrammarCompiler, tokenizer: Tokenizer, sampling: SamplingParams, seed: int) -> str:
    matcher = compiler.matcher(sampling)
    assert matcher is not None
    return tokenizer.decode(walk(matcher, tokenizer, seed))


@pytest.mark.parametrize(
    "pattern",
    [
        "abc", "^abc$", "[a-z ]+[.]", "[0-9]{3}-[0-9]{4}", "(yes|no)( maybe)?", "a*", "", " x+ ",
        r"\s*[0-9]+", "(?i)hello", "a/b//c", "[^a-z]{1,8}", "[à-ý]{2,5}", "😀{1,3}", r"\n?x", "(?:a|b)*?c",
        r"[a-z]+@[a-z]+\.(com|org)", r"\x41\u0042", "(?s).{3}", '"[^"]*"', r"\\\\", "#no comment",
        "// neither",
    ],
)  # fmt: skip
def test_every_walk_matches_the_pattern(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    for seed in range(8):
        text = walked(compiler, tokenizer, SamplingParams(regex=pattern), seed)
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"], ["a", "ab", "abc"], [" lead", "lead"], [" a", " b"], ["one"],
        ['q"uo\\te', "new\nline", "\x7f\x01"], ["süß", "日本", "😀"], ["<|im_end|>", "</s>"],
        ["/x/", "# y", "%json", "<z>"],
    ],
)  # fmt: skip
def test_a_walk_is_one_of_the_choices(
    compiler: GrammarCompiler, tokenizer: Tokenizer, choices: list[str]
) -> None:
    found = {walked(compiler, tokenizer, SamplingParams(choice=choices), seed) for seed in range(40)}
    assert found == set(choices)


def test_a_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = """
    start: sum  // a comment with <special> "text
    sum: product ("+" product)*   # and / another
    product: atom ("*" atom)*
    atom: NUMBER | "(" sum ")"
    NUMBER: /[0-9]+/
    %ignore / /
    """
    for seed in range(8):
        found = walked(compiler, tokenizer, SamplingParams(grammar=text), seed)
        assert re.fullmatch(r"[0-9+*() ]+", found)
        assert found.count("(") == found.count(")")


def test_a_grammar_with_json_inside(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = 'start: "call " %json {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],\n'
    text += '"additionalProperties": false} "."'
    for seed in range(4):
        found = walked(compiler, tokenizer, SamplingParams(grammar=text), seed)
        assert re.fullmatch(r'call \{\s*"a"\s*:\s*1\s*\}\.', found)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("regex", "(", "unclosed"),
        ("regex", "a(?=b)", "look"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a^b", "not supported"),
        ("regex", r"\bx", "not supported"),
        ("regex", "\ud800", "surrogate"),
        ("choice", ["\ud800"], "surrogate"),
        ("grammar", "", "empty"),
        ("grammar", 'start: "a', "lexer"),
        ("grammar", "start: missing", "missing"),
        ("grammar", 'begin: "a"', "start"),
        ("grammar", "start: r\nr: r", "no text"),
        ("grammar", "start: <|im_end|>", "special"),
        ("grammar", 'start: "a" <[0-5]>', "special"),
        ("grammar", "start: x\nx[temperature=0.5]: /a/", "temperature"),
        ("grammar", 'start: x "b"\nx[stop=""]: /a+/', "stop"),
        ("grammar", 'start: %json {"foo": 1}', "foo"),
        ("grammar", "start: %json {", "JSON"),
        ("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "allow_invalid_utf8"),
        ("grammar", 'start: %lark { start: "a" }', "%lark"),
        ("grammar", "start: @other", "other"),
    ],
)
def test_refused_by_name(compiler: GrammarCompiler, field: str, value: object, said: str) -> None:
    with pytest.raises(RequestError, match=field) as raised:
        compiler.check(SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert raised.value.param == field
    assert said in str(raised.value)


def test_nothing_without_a_structure(compiler: GrammarCompiler) -> None:
    compiler.check(SamplingParams())
    assert compiler.matcher(SamplingParams()) is None


@pytest.mark.parametrize("vocab_size", [200, 259, 260, 1000])
def test_masks_have_the_size_of_the_model(vocab_size: int) -> None:
    matcher = GrammarCompiler(ByteTokenizer(), vocab_size).matcher(SamplingParams(regex="[a-c]+"))
    assert matcher is not None
    assert len(matcher.mask()) == (vocab_size + 31) // 32 * 4
    assert allowed_ids(matcher.mask(), vocab_size) == list(b"abc")
    matcher.accept(ord("b"))
    ends = [257] if vocab_size > 257 else []
    assert allowed_ids(matcher.mask(), vocab_size) == [*b"abc", *ends]


def test_an_end_only_where_the_structure_ends(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    end = min(tokenizer.eos_ids)
    matcher = compiler.matcher(SamplingParams(choice=["ab"]))
    assert matcher is not None
    early = matcher.copy()
    with pytest.raises(RuntimeError):
        early.accept(end)
    with pytest.raises(RuntimeError):
        early.mask()
    assert not matcher.finished  # untouched by the copy's misfortune
    ids = walk(matcher.copy(), tokenizer, 1)
    for token in ids:
        assert not matcher.finished
        matcher.accept(token)
    assert matcher.finished
    assert allowed_ids(matcher.mask(), tokenizer.vocab_size) == sorted(tokenizer.eos_ids)
    matcher.accept(end)
    assert matcher.finished
    with pytest.raises(RuntimeError, match="after the end"):
        matcher.accept(end)


def test_a_copy_and_a_restart_are_the_same(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(json_schema=record(a={"type": "string"}, b={"type": "integer"}))
    matcher = compiler.matcher(sampling)
    assert matcher is not None
    ids = walk(matcher.copy(), tokenizer, 3)
    for length, token in enumerate(ids):
        again = compiler.matcher(sampling)
        assert again is not None
        for before in ids[:length]:
            again.accept(before)
        assert again.mask() == matcher.copy().mask() == matcher.mask()
        assert again.finished == matcher.finished
        matcher.accept(token)


def test_several_ends_and_none() -> None:
    tokens = ByteTokenizer()
    for ends in ({257, 258}, set[int]()):
        several = ByteTokenizer()
        several.eos_ids = frozenset(ends)
        matcher = GrammarCompiler(several, tokens.vocab_size).matcher(SamplingParams(regex="a+b?"))
        assert matcher is not None
        matcher.accept(ord("a"))
        assert allowed_ids(matcher.mask(), 259) == sorted({*b"ab", *ends})
        assert not matcher.finished
        matcher.accept(ord("b"))
        assert matcher.finished
        assert allowed_ids(matcher.mask(), 259) == sorted(ends)


def test_a_structure_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 259)
    compiled: list[str] = []
    real = grammar_module.grammar_of
    monkeypatch.setattr(grammar_module, "grammar_of", lambda s: (compiled.append(s.kind), real(s))[1])
    monkeypatch.setattr(grammar_module, "CACHE_SIZE", 2)
    for pattern in ("a", "a", "b", "a", "c", "a", "b"):
        compiler.check(SamplingParams(regex=pattern))
        compiler.check(SamplingParams(structured_outputs={"regex": pattern}))  # the same by its other name
    assert len(compiled) == 4  # a, b, c, and b again: c put it out, for a was used since
    # Two schemas that differ in the order of their properties are two structures.
    one, other = record(a={}, b={}), record(b={}, a={})
    assert accepts(compiler, ByteTokenizer(), SamplingParams(json_schema=one), '{"a":1,"b":2}')
    assert not accepts(compiler, ByteTokenizer(), SamplingParams(json_schema=other), '{"a":1,"b":2}')


def test_threads_share_a_compiler() -> None:
    tokenizer = Tokenizer.from_gguf(small_source())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for seed in range(15):
                pattern = f"[a-f]+{(index + seed) % 4}"
                text = walked(compiler, tokenizer, SamplingParams(regex=pattern), seed)
                if not re.fullmatch(pattern, text):
                    wrong.append(text)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.model
def test_masks_of_a_real_vocabulary_are_quick(smollm2: Tokenizer) -> None:
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size)
    schema = record(
        name={"type": "string", "maxLength": 40},
        born={"type": "string", "format": "date"},
        height={"type": "number", "minimum": 0, "maximum": 3},
        tags={"type": "array", "items": {"enum": ["old", "new", "used"]}, "maxItems": 4},
        address=record(["city"], street={"type": "string"}, city={"type": "string"}),
    )
    compiler.check(SamplingParams(json_schema=schema))
    times: list[float] = []
    for seed in range(3):
        matcher = compiler.matcher(SamplingParams(json_schema=schema))
        assert matcher is not None
        for token in walk(matcher.copy(), smollm2, seed):
            with cpu_time() as spent:
                matcher.mask()
                matcher.accept(token)
                times.append(spent())
    times.sort()
    median, high = statistics.median(times), times[int(len(times) * 0.99)]
    print(f"{len(times)} masks: median {median * 1e6:.0f} us, p99 {high * 1e6:.0f} us")
    assert median < 2e-3
