"""The lm_eval adapter without lm_eval: its requests are stood in for, and so are its modules."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import LENGTH, byte_llm
from tiny import TINY

from jaxinfer.config import EngineConfig, TopPages, TopPagesSpan
from jaxinfer.core import ConfigError, RequestError
from jaxinfer.lab import lm_eval_adapter
from jaxinfer.lab.evaluate.scoring import continuation_span, score_spans
from jaxinfer.lab.lm_eval_adapter import Adapter, rolling_spans
from jaxinfer.text import ChatTemplate


@dataclass
class Request:
    """An lm_eval Instance, as far as a model looks at it."""

    args: tuple[Any, ...]


class Kept:
    """lm_eval's cache of answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Any, Any]] = []

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.answers.append((attr, req, res))


@pytest.fixture(scope="module")
def adapter(compile_cache):
    made = Adapter.__new__(Adapter)
    made.set_up(byte_llm())
    made.llm.chat_template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


@pytest.fixture(autouse=True)
def kept(adapter) -> Kept:
    adapter.cache_hook = Kept()
    return adapter.cache_hook


def lm_eval_windows(
    ids: list[int], prefix: int, most: int, context: int
) -> list[tuple[list[int], list[int]]]:
    """What lm_eval.utils' get_rolling_token_windows and make_disjoint_window give, from their docstrings."""
    first = ids[:most]
    pairs = [([prefix, *first[:-1]], first)]
    predicted = len(first)
    while predicted < len(ids):
        end = min(predicted + most - context + 1, len(ids))
        pairs.append((ids[end - most - 1 : end - 1], ids[predicted:end]))
        predicted = end
    return [(before[: len(before) - (len(after) - 1)], after) for before, after in pairs]


@given(st.integers(1, 200), st.integers(3, 30))
def test_rolling_windows_are_lm_evals(length: int, room: int) -> None:
    ids = list(range(length))
    expected = [(*a, *b) for a, b in lm_eval_windows(ids, 999, room - 1, 1)]
    spans = rolling_spans(ids, 999, room, "t")
    assert [span.token_ids for span in spans] == expected
    assert [i for span in spans for i in span.token_ids[span.first :]] == ids


def test_likelihoods_are_those_of_the_lab(adapter, kept) -> None:
    pairs = [("one two", " three"), ("", " He is."), ("spaces  ", "end")]
    found = adapter.loglikelihood([Request(pair) for pair in pairs])
    spans = [continuation_span(adapter.llm, *pair, "here") for pair in pairs]
    scores = score_spans(adapter.llm, spans)
    assert [value for value, _ in found] == pytest.approx([sum(score.logprobs) for score in scores])
    assert [greedy for _, greedy in found] == [score.greedy for score in scores]
    assert kept.answers == [("loglikelihood", pair, value) for pair, value in zip(pairs, found, strict=True)]


def test_texts_longer_than_the_model_are_rolled_over(adapter, kept) -> None:
    short, long = "a short one", "a longer text than fits at once, " * 4
    found = adapter.loglikelihood_rolling([Request((short,)), Request((long,)), Request(("",))])
    assert found[0] == pytest.approx(adapter.loglikelihood([Request(("", short))])[0][0])
    spans = rolling_spans(list(long.encode()), 256, LENGTH - 1, "t")
    assert len(spans) == 3
    assert found[1] == pytest.approx(sum(sum(s.logprobs) for s in score_spans(adapter.llm, spans)))
    assert found[2] == 0.0
    rolled = [request for kind, request, _ in kept.answers if kind == "loglikelihood_rolling"]
    assert rolled == [(short,), (long,), ("",)]


def test_generation_is_greedy_and_stops_where_asked(adapter) -> None:
    whole = adapter.llm.generate("Once", {"temperature": 0.0, "max_tokens": 12})[0].outputs[0].text
    stop = whole[4:6]
    requests = [
        Request(("Once", {"max_gen_toks": 12})),
        Request(("Once", {"until": [stop], "do_sample": False, "temperature": 0.7, "max_gen_toks": 12})),
        Request(("x" * 200, {"until": "never of this", "max_new_tokens": 4})),
    ]
    texts = adapter.generate_until(requests)
    assert texts[0] == whole
    assert texts[1] == whole[: whole.index(stop)]
    assert adapter.sampling({}).max_tokens == 256
    assert adapter.sampling({"do_sample": True}).temperature == 1.0
    assert adapter.sampling({"temperature": 0.3, "top_k": 5}).top_k == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_gen_toks": 3, "max_tokens": 4}, "are the same"),
        ({"num_beams": 4}, "num_beams is not known"),
        ({"max_gen_toks": LENGTH}, "no room for a context"),
    ],
)
def test_options_that_cannot_be_are_refused(adapter, options, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        adapter.generate_until([Request(("a", options))])


@pytest.mark.parametrize(
    "options", [{"batch_size": 8}, {"device": "cuda:1"}, {"max_batch_size": 4}, {"revision": "x"}]
)
def test_model_args_that_mean_nothing_here_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Adapter("nothing-of-this-name", **options)


def test_a_span_that_a_scored_text_does_not_see_is_refused(compile_cache) -> None:
    """Its answers would be those of all attention; texts that go on are under the span."""
    made, config = Adapter.__new__(Adapter), TINY.spanned(TopPagesSpan(TopPages(1)))
    made.set_up(byte_llm(config, engine_config=EngineConfig(seed=7, attention_span="topk-pages:1")))
    made.cache_hook = Kept()
    for answers, arguments in (
        (made.loglikelihood, ("a b c", " d")),
        (made.loglikelihood_rolling, ("a b c d",)),
    ):
        with pytest.raises(ConfigError, match=r"'topk-pages:1': .*say from:P"):
            answers([Request(arguments)])
    assert made.generate_until([Request(("a b", {"max_gen_toks": 2}))])


def test_chats_are_text_by_the_models_template(adapter) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert adapter.apply_chat_template(chat) == "<user>Hi<assistant>"
    assert adapter.apply_chat_template(chat, add_generation_prompt=False) == "<user>Hi"
    assert adapter.chat_template(True).startswith("{% for")
    assert adapter.chat_template(False) is None
    with pytest.raises(RequestError, match="only the model's own"):
        adapter.chat_template("tool_use")


def test_it_is_registered_once_with_lm_eval(monkeypatch) -> None:
    """Against the three names of lm_eval that `register` uses."""

    class LM:
        def __init__(self) -> None:
            self.cache_hook = Kept()

    models: dict[str, type] = {}

    def register_model(name: str):
        return lambda cls: models.setdefault(name, cls)

    for name, names in {
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": register_model, "model_registry": models},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval": {},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    made = lm_eval_adapter.register()
    assert models == {"jaxinfer": made}
    assert issubclass(made, LM)
    assert issubclass(made, Adapter)
    assert lm_eval_adapter.register() is made


def test_without_lm_eval_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['lm_eval'] = None\nfrom jaxinfer.lab import lm_eval_adapter\n"
    code += "sys.exit(lm_eval_adapter.main())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "pip install lm-eval" in ended.stderr
