"""Beam search: against every sequence there is, against itself without its shortcuts, and what it refuses."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from tiny import tiny_runner

from jaxinfer.config import EngineConfig
from jaxinfer.core import JaxInferError, Limits, Logprob, Request, RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.llm.beams import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams, BeamSearchSequence
from jaxinfer.runtime import JaxRunner
from jaxinfer.text import ByteTokenizer

EOS = 257


@pytest.fixture(scope="module")
def runner() -> JaxRunner:
    return tiny_runner()


def over(runner: JaxRunner, **options: Any) -> LLM:
    limits = Limits(
        num_pages=runner.num_pages, page_size=runner.page_size, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=64, vocab_size=runner.config.vocab_size, eos_token_ids=frozenset({EOS}),
    )  # fmt: skip
    return LLM.from_parts(
        runner, limits, tokenizer=ByteTokenizer(), model_name="tiny", engine_config=EngineConfig(**options)
    )


# ---------------------------------------------------------------------- the search, without an engine


IDS, END = 6, 2
FEW = Limits(
    num_pages=9, page_size=8, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, vocab_size=8,
    eos_token_ids=frozenset({END}), sampled_vocab=IDS,
)  # fmt: skip


def known(tokens: tuple[int, ...]) -> dict[int, Logprob]:
    """What a made-up model of 8 ids, of which 2 stand for no token, says of the token after these."""
    draw = random.Random(str(tokens))
    weights = [draw.random() ** 3 for _ in range(IDS)] + [5.0, 5.0]
    return {i: Logprob(math.log(w / sum(weights)), 1) for i, w in enumerate(weights)}


def searched(params: BeamSearchParams, prompt: tuple[int, ...] = (1, 0)) -> tuple[BeamSearch, int]:
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams())
    search, asked = BeamSearch(request, params, FEW), 0
    while not search.done:
        requests = search.requests()
        asked += len(requests)
        assert len({request.request_id for request in requests}) == len(requests)
        search.take([known(request.prompt_token_ids) for request in requests])
    return search, asked


def every_output(prompt: tuple[int, ...], longest: int) -> dict[tuple[int, ...], float]:
    """All outputs that end, or have `longest` tokens, and their logprobs."""
    scores: dict[tuple[int, ...], float] = {}
    for output in itertools.product(range(IDS), repeat=longest):
        if END in output:
            output = output[: output.index(END) + 1]
        scores[output] = sum(known(prompt + output[:i])[token].logprob for i, token in enumerate(output))
    return scores


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
def test_a_wide_search_finds_the_best_of_all(penalty: float) -> None:
    """With 6 ids and 2 tokens, ten beams leave nothing out."""
    search, _ = searched(BeamSearchParams(beam_width=10, max_tokens=2, length_penalty=penalty))
    scores = every_output((1, 0), 2)
    ranked = sorted(scores, key=lambda output: scores[output] / len(output) ** penalty, reverse=True)[:10]
    found = search.best()
    assert [beam.output_token_ids for beam in found] == ranked
    for beam in found:
        output = beam.output_token_ids
        assert beam.tokens == (1, 0, *output)
        assert beam.cum_logprob == pytest.approx(scores[output])
        assert beam.finish_reason == ("stop" if output[-1] == END else "length")
        assert [entries[i].logprob for i, entries in zip(output, beam.logprobs, strict=True)] == [
            known((1, 0, *output[:place]))[token].logprob for place, token in enumerate(output)
        ]


def test_a_wider_search_is_no_worse_and_ends_may_be_ignored() -> None:
    for start in range(20):
        prompt = (start % IDS, start // IDS)
        best = max(score / len(output) for output, score in every_output(prompt, 4).items())
        scores = [
            beam.cum_logprob / len(beam.logprobs)
            for width in (1, 10)
            for beam in searched(BeamSearchParams(beam_width=width, max_tokens=4), prompt)[0].best()[:1]
        ]
        assert scores[0] <= scores[1] + 1e-9 <= best + 2e-9
        endless = searched(BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True), prompt)[0].best()
        assert [len(beam.output_token_ids) for beam in endless] == [4, 4, 4]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
def test_stopping_early_changes_nothing(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = 0
    for start in range(10):
        params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=penalty)
        early, asked = searched(params, (start,))
        with monkeypatch.context() as patch:
            patch.setattr(BeamSearch, "_bound", lambda *_: math.inf)
            late, all_asked = searched(params, (start,))
        assert early.best() == late.best()
        assert asked <= all_asked
        saved += all_asked - asked
    assert saved > 0 or penalty > 0  # which lets long outputs overtake to the last


def test_only_beams_that_are_kept_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam holds all of its prompt; a step looks at 2 * width alternatives of each."""
    copies, grown = [0], BeamSearchSequence.grown

    def counting(self: BeamSearchSequence, *args: Any, **given: Any) -> BeamSearchSequence:
        copies[0] += 1
        return grown(self, *args, **given)

    monkeypatch.setattr(BeamSearchSequence, "grown", counting)
    _, asked = searched(BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=2.5))
    assert asked > 10
    assert copies[0] <= 2 * (asked + 3)


# ------------------------------------------------------------------------------- through the engine


def test_a_search_counts_as_one_request(runner: JaxRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(runner)
    (output,) = llm.beam_search("abc", BeamSearchParams(beam_width=3, max_tokens=4))
    stats = llm.engine.stats()
    assert (stats["requests"], stats["prompt_tokens"]) == (1, 3)
    assert stats["generated_tokens"] == sum(len(beam.output_token_ids) for beam in output.sequences)
    assert sum(stats["finished"].values()) == 3
    assert stats["computed_tokens"] >= 3 + 1 + 3 + 3, "what was computed is told as it is"
    histograms = dict(llm.engine.histograms.items())
    assert histograms["time_to_first_token"].snapshot()[0][-1] == 0
    assert histograms["request_prompt_tokens"].snapshot() == (
        [0, 0, *[3] * (len(histograms["request_prompt_tokens"].bounds) - 1)],
        9.0,
    )
    assert histograms["e2e_request_latency"].snapshot()[0][-1] == 3

    def broken(*_: Any) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(runner, "fetch", broken)
    with pytest.raises(JaxInferError):
        llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=4))
    assert llm.engine.stats()["finished"]["error"] == 2


def test_one_beam_is_greedy_and_batches_are_as_alone(runner: JaxRunner) -> None:
    llm = over(runner)
    prompts = ["Say", {"prompt_token_ids": [70, 71, 72, 73]}]
    params = BeamSearchParams(beam_width=1, max_tokens=3, ignore_eos=True)
    greedy = llm.generate(prompts, {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True})
    for output, other in zip(llm.beam_search(prompts, params), greedy, strict=True):
        assert output.sequences[0].output_token_ids == other.outputs[0].token_ids
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    together = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.beam_search(prompt, params)[0]
        assert [beam.tokens for beam in alone.sequences] == [beam.tokens for beam in output.sequences]
    uncached = over(runner, enable_prefix_caching=False).beam_search(prompts, params)
    for one, other in zip(together, uncached, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
    ],
)
def test_what_a_search_refuses(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **wrong})
    assert caught.value.param == param


def test_a_search_that_does_not_fit_or_fails(runner: JaxRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(runner)
    with pytest.raises(RequestError, match="max_tokens 62"):
        llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=62))
    with pytest.raises(RequestError, match="values for 1 prompts"):
        llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=2), priority=[])
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=2)) == []

    def broken(*_: Any) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(runner, "fetch", broken)
    with pytest.raises(JaxInferError, match="beam search ended early"):
        llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=2))
    monkeypatch.undo()
    assert llm.engine.stats()["running"] == 0
