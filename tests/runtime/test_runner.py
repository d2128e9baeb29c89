"""The runner by its protocol, without an engine: chained steps, copies, scores, failures, the manifest."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from driving import GREEDY, run, step, texts
from tiny import PLENTY, TINY, prompts, random_tensors, tiny_runner

from jaxinfer.config import SampleShape, StepShape
from jaxinfer.core import Draw, LogitChanges, SamplingParams, Slice, StepPlan
from jaxinfer.runtime import JaxRunner, steps
from jaxinfer.runtime.programs import COPY, SCORE
from jaxinfer.runtime.trace import _BACKEND_COMPILE as COMPILED

sys.path.append(str(Path(__file__).parents[1] / "model"))
from dense import dense_logits  # it lives with the tests of the model

pytestmark = pytest.mark.usefixtures("compile_cache")

CURSED = TINY.vocab_size - 1
"""A token whose embedding is NaN in the runner below."""
BATCH = prompts([5, 20, 1, 31], vocab_size=CURSED)
SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=3),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=0, prompt_logprobs=3),
]
NEW = 7


@pytest.fixture(scope="module")
def runner() -> JaxRunner:
    """Warmed up in full; its limits are 4 sequences and 32 tokens."""
    tensors = random_tensors(TINY)
    tensors["model.embed_tokens.weight"][CURSED] = np.nan
    made = tiny_runner(tensors=tensors, num_pages=PLENTY)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def expected(runner: JaxRunner) -> list[list[int]]:
    """The new tokens of each text of BATCH, run step by step."""
    running = texts(runner, BATCH, SAMPLING)
    run(runner, running, NEW)
    return [text.tokens[text.num_prompt :] for text in running]


def chained(runner: JaxRunner, steps: int) -> list[list[int]]:
    """The same with every decode chained: step n + 1 is dispatched before step n is fetched."""
    running = texts(runner, BATCH, SAMPLING, seed=3)
    got: list[list[int]] = [[] for _ in running]
    for text in running:  # prompts one by one but for their last token: what is left is a step of ones
        if len(text.tokens) > 1:
            step(runner, 0, [(text, len(text.tokens) - 1)])
    before: Any = None
    for number in range(steps):
        # The order of the slices changes, so that a token comes from another row than its own.
        order = running if number % 2 else running[::-1]
        slices = []
        for text in order:
            start = text.num_prompt - 1 + number
            token = 0 if number else text.tokens[-1]
            pages = text.pages[: -(-(start + 1) // runner.page_size)]
            slices.append(Slice(
                text.uid, start, (token,), pages, emit=True, num_prompt=text.num_prompt, chained=number > 0
            ))  # fmt: skip
        pending = runner.dispatch(StepPlan(number, tuple(slices)))
        if before is not None:
            collect(runner, before, got)
        draws = [Draw(text.sampling, 1000 + text.uid, text.num_prompt + number) for text in order]
        runner.sample(pending, draws)
        before = pending
    collect(runner, before, got)
    return got


def collect(runner: JaxRunner, pending: Any, got: list[list[int]]) -> None:
    for piece, sampled in zip(pending.plan.slices, runner.fetch(pending).sampled, strict=True):
        assert sampled is not None
        got[piece.uid].append(sampled.token_id)


def test_chained_steps_are_the_steps_one_by_one(runner: JaxRunner, expected: list[list[int]]) -> None:
    assert chained(runner, NEW) == expected


def test_a_row_without_a_draw_gives_nothing(runner: JaxRunner, expected: list[list[int]]) -> None:
    """And cannot be chained to."""
    running = texts(runner, BATCH[:2], SAMPLING[:2])
    plan = StepPlan(0, tuple(t.slice(c, runner.page_size) for t, c in zip(running, (5, 20), strict=True)))
    pending = runner.dispatch(plan)
    runner.sample(pending, [None, running[1].draw()])
    first, second = runner.fetch(pending).sampled
    assert first is None
    assert second is not None
    assert second.token_id == expected[1][0]
    wrong = Slice(0, 5, (0,), running[0].pages[:1], emit=True, chained=True)
    with pytest.raises(AssertionError, match="sequence 0 was not sampled") as caught:
        runner.dispatch(StepPlan(1, (wrong,)))
    assert caught.value.kv_lost is False  # type: ignore[attr-defined]
    pending = runner.dispatch(plan)
    runner.sample(pending, [None, None])
    assert runner.fetch(pending).sampled == (None, None)


# -------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("extra", [0, 7])
def test_a_copied_prefix_serves_as_the_original(
    runner: JaxRunner, expected: list[list[int]], extra: int
) -> None:
    """And a swap beside it; more pairs than the copy program takes at once."""
    (text,) = texts(runner, BATCH[3:], SAMPLING[3:])
    text.uid = 3
    step(runner, 0, [(text, 31)])
    fresh = [page for page in range(1, runner.num_pages) if page not in text.pages][: 4 + extra]
    pairs = [*zip(text.pages, fresh[:4], strict=False), *((fresh[0] + 100, page) for page in fresh[4:])]
    text.pages = (*fresh[:4], *text.pages[4:])
    plan = StepPlan(1, (text.slice(1, runner.page_size),), copies=tuple(pairs))
    pending = runner.dispatch(plan)
    runner.sample(pending, [text.draw()])
    (sampled,) = runner.fetch(pending).sampled
    assert sampled is not None
    assert [text.tokens[31], sampled.token_id] == expected[3][:2]


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (((1, 0),), "leave 1"),
        (((PLENTY, 1),), "leave 1"),
        (((1, 3), (2, 3)), "copied to twice"),
        (((1, 2), (3, 4), (5, 6), (7, 8), (2, 9)), r"pages \{2\} are copied from after"),
    ],
)
def test_wrong_copies_are_refused(runner: JaxRunner, copies: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        runner.dispatch(StepPlan(0, (Slice(0, 0, (1,), (1,), emit=True),), copies=copies))
    assert caught.value.kv_lost is False  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_a_dense_model() -> None:
    """Over chunks, beside decodes and texts that want none: logprob, rank and alternatives of each token."""
    runner = tiny_runner()
    running = texts(
        runner, BATCH, [GREEDY, *[SamplingParams(temperature=0, prompt_logprobs=k) for k in (0, 5, 20)]]
    )
    run(runner, running, 3, chunk=lambda: 9)
    assert [len(text.scores) for text in running] == [0, 19, 0, 30]
    for text in running:
        logits = dense_logits(TINY, random_tensors(TINY), text.tokens[: text.num_prompt])
        logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= logits.max(-1, keepdims=True)
        for place, score in enumerate(text.scores):
            row, target = logprobs[place], text.tokens[place + 1]
            assert score.token_id == target
            assert score.logprob == pytest.approx(row[target], abs=1e-4)
            assert score.rank == 1 + (row > row[target]).sum()
            best = np.argsort(-row)[: text.sampling.prompt_logprobs or 0]
            assert [token for token, _ in score.top] == best.tolist()
            np.testing.assert_allclose([value for _, value in score.top], row[best], atol=1e-4)


def test_targets_may_be_fewer_than_tokens_and_never_more(runner: JaxRunner) -> None:
    def piece(targets: tuple[int, ...]) -> Slice:
        return Slice(0, 0, (4, 5, 6), (1,), emit=False, scored=1, targets=targets)

    pending = runner.dispatch(StepPlan(0, (piece((5, 6)),)))
    runner.sample(pending, [])
    result = runner.fetch(pending)
    assert result.sampled == (None,)
    assert [score.token_id for score in result.scores[0]] == [5, 6]
    with pytest.raises(AssertionError, match="4 targets for a slice of 3 tokens"):
        runner.dispatch(StepPlan(0, (piece((5, 6, 7, 8)),)))


# ------------------------------------------------------------------------------------------------ failures


class StepFailed(RuntimeError):
    pass


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise StepFailed("planted in fetch")


@pytest.fixture
def compiled(runner: JaxRunner) -> Iterator[dict[Any, Any]]:
    """The runner's programs by bucket, to be replaced for one test."""
    held: dict[Any, Any] = runner.programs.compiled  # type: ignore[assignment]
    before = dict(held)
    yield held
    held.clear()
    held.update(before)


def one_token(runner: JaxRunner, *, chained: bool = False) -> StepPlan:
    return StepPlan(0, (Slice(0, 0, (0 if chained else 7,), (1,), emit=True, chained=chained),))


@pytest.mark.parametrize("where", ["dispatch", "sample", "fetch"])
def test_a_failed_step_voids_itself_and_what_came_after(
    runner: JaxRunner, compiled: dict[Any, Any], expected: list[list[int]], where: str
) -> None:
    """The pool is a new one, void steps are refused, and the next texts run as ever."""
    before, draw = runner.kv, [Draw(GREEDY, 0, 1)]
    shape, sampler = StepShape(1, 1, 0), SampleShape(1, 0)
    forward, choose = compiled[shape], compiled[sampler]

    def fail(*args: Any) -> Any:
        if where != "sample":
            forward(*args)  # KV is donated and gone
        raise StepFailed(f"planted in {where}")

    first = runner.dispatch(one_token(runner))
    if where == "fetch":
        compiled[sampler] = lambda *args: (Unreadable(), choose(*args)[1])
    if where == "sample":
        compiled[sampler] = fail
        with pytest.raises(StepFailed):
            runner.sample(first, draw)
        void = [first]
    else:
        runner.sample(first, draw)
        if where == "dispatch":
            compiled[shape] = fail
            with pytest.raises(StepFailed) as caught:
                runner.dispatch(one_token(runner, chained=True))
            assert getattr(caught.value, "kv_lost", True)
            assert runner.fetch(first).sampled[0]  # it had run: its tokens are good
            void = []
        else:
            second = runner.dispatch(one_token(runner, chained=True))
            with pytest.raises(StepFailed):
                runner.fetch(first)
            void = [first, second]
    for pending in void:
        for call in (lambda p=pending: runner.sample(p, draw), lambda p=pending: runner.fetch(p)):
            with pytest.raises(AssertionError, match="is void") as refused:
                call()
            assert refused.value.kv_lost is False  # type: ignore[attr-defined]
    assert runner.kv is not before
    assert not any(pages.is_deleted() for pages in jax.tree.leaves(runner.kv))
    with pytest.raises(AssertionError, match="no step before this one has sampled"):
        runner.dispatch(one_token(runner, chained=True))
    compiled[shape], compiled[sampler] = forward, choose
    assert chained(runner, NEW) == expected


def test_a_failure_on_the_host_keeps_the_pages(runner: JaxRunner, expected: list[list[int]]) -> None:
    (text,) = texts(runner, BATCH[3:], SAMPLING[3:])
    text.uid = 3
    step(runner, 0, [(text, 31)])
    pending = runner.dispatch(StepPlan(1, (text.slice(1, runner.page_size),)))
    for broken in ([], [Draw(GREEDY, 0, 1, mask=b"short")]):
        with pytest.raises(AssertionError) as caught:
            runner.sample(pending, broken)
        assert caught.value.kv_lost is False  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="token ids leave") as caught:
        runner.dispatch(StepPlan(2, (Slice(9, 0, (TINY.vocab_size,), (1999,), emit=True),)))
    assert caught.value.kv_lost is False  # type: ignore[attr-defined]
    runner.sample(pending, [text.draw()])
    (sampled,) = runner.fetch(pending).sampled
    assert sampled is not None
    assert sampled.token_id == expected[3][1]


def test_a_row_of_nan_is_told_and_alone(runner: JaxRunner, expected: list[list[int]]) -> None:
    running = texts(runner, [[CURSED], *BATCH[:2]], [GREEDY, *SAMPLING[:2]])
    for text in running:
        text.uid -= 1
    step(runner, 0, list(zip(running, (1, 5, 20), strict=True)))
    assert [text.sampled[0].finite for text in running] == [False, True, True]
    assert [text.sampled[0].token_id for text in running[1:]] == [tokens[0] for tokens in expected[:2]]


def test_a_mask_that_leaves_nothing_is_told(runner: JaxRunner) -> None:
    pending = runner.dispatch(one_token(runner))
    runner.sample(pending, [Draw(GREEDY, 0, 1, mask=bytes(4 * 10))])
    (sampled,) = runner.fetch(pending).sampled
    assert sampled is not None
    assert (sampled.token_id, sampled.rank, sampled.finite) == (0, 0, False)


# ---------------------------------------------------------------------------------------------- the manifest


def changes(count: int) -> LogitChanges:
    return LogitChanges(array("i", range(count)), array("f", [1.1] * count), array("f", [0.0] * count))


def test_nothing_is_compiled_or_traced_after_warm_up(runner: JaxRunner, expected: list[list[int]]) -> None:
    """Every kind of step there is, and nothing is sent but by device_put (B152)."""
    before = runner.stats()["compiles_after_warmup"]
    with jax.no_tracing(), jax.transfer_guard_host_to_device("disallow"):
        assert chained(runner, NEW) == expected
        running = texts(runner, BATCH, SAMPLING, seed=8)
        run(runner, running, NEW, chunk=lambda: 6)
        plan = StepPlan(0, (Slice(0, 0, (7,), (1,), emit=True),), copies=((1, 2),))
        pending = runner.dispatch(plan)
        runner.sample(pending, [Draw(GREEDY, 0, 1, changes(299), np.full(10, -1, np.int32).tobytes())])
        assert runner.fetch(pending).sampled[0]
    assert [text.tokens[text.num_prompt :] for text in running] == expected
    assert runner.stats()["compiles_after_warmup"] == before


def test_the_manifest_tells_what_was_compiled(runner: JaxRunner) -> None:
    stats, manifest = runner.stats(), runner.programs.manifest
    assert stats["kv_bytes"] == PLENTY * 8 * TINY.kv_bytes_per_token(4)
    assert [record.bucket for record in manifest] == list(map(str, runner.programs.planned))
    assert stats["programs"] == stats["programs_in_manifest"] == len(manifest) == 14
    for record in manifest:
        assert record.reason == "warm-up"
        assert record.aliased_bytes == (stats["kv_bytes"] if record.kind in ("forward", "copy") else 0)
        assert record.compile_s > 0
        assert record.as_dict()["temp_bytes"] == record.temp_bytes
    heading, *rows = runner.manifest_table()
    assert len({len(row) for row in (heading, *rows)}) == 1
    assert stats["bucket_calls"] == {f"{row[0]} {row[1]}": int(row[-2]) for row in rows}
    assert 0 <= stats["padding_waste"] < 1


def test_calls_and_padding_are_counted() -> None:
    runner = tiny_runner()
    (text,) = texts(runner, [BATCH[1]], [SAMPLING[1]])
    run(runner, [text], 3)
    calls = {"forward T32/D0/C4": 1, "forward T1/D1/C0": 2, "sample B1/N0": 3}
    stats = runner.stats()
    assert stats["bucket_calls"] == calls
    assert stats["padding_waste"] == pytest.approx(1 - 22 / 34)
    assert [record.reason for record in runner.programs.manifest] == [
        "first used at step 0", "first used at step 0", "first used at step 1"
    ]  # fmt: skip
    assert stats["compiles_after_warmup"] == 0


def test_the_most_changes_that_a_row_can_have_are_planned_for() -> None:
    """Every id of the vocabulary, in every row: nothing is compiled that was not planned."""
    runner = tiny_runner(ladder=(StepShape(1, 1, 0),), strict=True)
    runner.warm_up()
    pending = runner.dispatch(one_token(runner))
    runner.sample(pending, [Draw(GREEDY, 0, 1, changes(TINY.vocab_size))])
    assert runner.fetch(pending).sampled[0]
    assert runner.stats()["compiles_after_warmup"] == 0


def test_strict_refuses_to_compile_after_warm_up() -> None:
    runner = tiny_runner(ladder=(StepShape(1, 1, 0),), strict=True)
    runner.warm_up()
    runner.programs.compiled.pop(COPY)
    kv = runner.kv
    plan = StepPlan(5, (Slice(0, 0, (7,), (1,), emit=True),), copies=((1, 2),))
    with pytest.raises(
        RuntimeError, match=r"the copy program copy is wanted \(first used at step 5\)"
    ) as caught:
        runner.dispatch(plan)
    assert caught.value.kv_lost is False  # type: ignore[attr-defined]
    assert runner.kv is kv
    assert SCORE in runner.programs.compiled


def test_a_programs_own_compile_never_counts_as_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while it runs, for who asks from another thread: /metrics has a counter of it."""
    made = tiny_runner(num_pages=PLENTY)
    before, seen = made.programs.compiles_after_warmup, []
    compile_program = steps.compile_program

    def watched(*args: Any, **options: Any) -> Any:
        program = compile_program(*args, **options)
        jax.monitoring.record_event_duration_secs(COMPILED, 0.1)  # which a cached program may not have
        seen.append(made.programs.compiles_after_warmup)
        return program

    monkeypatch.setattr(steps, "compile_program", watched)
    made.programs.make(made.programs.ladder[0], "test")
    assert seen == [before]
    assert made.programs.compiles_after_warmup == before
