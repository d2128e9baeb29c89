"""Changes to logits, entry by entry, against the same rules written densely in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cpu_time import cpu_time
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core import LogitChanges, SamplingParams
from jaxinfer.engine.changes import SequenceChanges

VOCABULARY = 24
ids = st.integers(0, VOCABULARY - 1)
samplings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.none() | st.dictionaries(ids, st.sampled_from([-100.0, -0.1, 0.0, 2.5]), max_size=5),
)


def dense(
    logits: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int], held: set[int]
) -> np.ndarray:
    """logits [V] float64 after the changes, from the definitions."""
    result = logits.copy()
    for token in range(len(logits)):
        if token in prompt or token in output:
            r = sampling.repetition_penalty
            result[token] = result[token] / r if result[token] > 0 else result[token] * r
        count = output.count(token)
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        result[token] += (sampling.logit_bias or {}).get(token, 0.0)
        if token in held:
            result[token] = -math.inf
    return result


def applied(logits: np.ndarray, changes: LogitChanges | None) -> np.ndarray:
    """logits [V] after `changes`, as `LogitChanges` says."""
    result = logits.copy()
    if changes is None:
        return result
    assert len(set(changes.ids)) == len(changes) == len(changes.factors) == len(changes.addends)
    for token, factor, addend in zip(changes.ids, changes.factors, changes.addends, strict=True):
        result[token] = (result[token] / factor if result[token] > 0 else result[token] * factor) + addend
    return result


def entries(changes: LogitChanges | None) -> dict[int, tuple[float, float]]:
    if changes is None:
        return {}
    return dict(zip(changes.ids, zip(changes.factors, changes.addends, strict=True), strict=True))


@given(
    samplings,
    st.lists(ids, min_size=1, max_size=8),
    st.lists(ids, max_size=12),
    st.sets(ids, max_size=3),
    st.integers(0, 12),
    st.integers(0, 2**32 - 1),
)
def test_every_step_is_the_dense_rule(
    sampling: SamplingParams, prompt: list[int], output: list[int], ends: set[int], minimum: int, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 4, VOCABULARY)
    changes = SequenceChanges(sampling, prompt, ends)
    for length in range(len(output) + 1):
        held = length < minimum
        current = changes.current(hold_ends=held)
        expected = dense(logits, sampling, prompt, output[:length], ends if held else set())
        np.testing.assert_allclose(applied(logits, current), expected, rtol=1e-6, atol=1e-5)
        # Preempted and computed again: the very same numbers, not nearly the same ones.
        again = SequenceChanges(sampling, prompt, ends, output[:length])
        assert entries(again.current(hold_ends=held)) == entries(current)
        if length < len(output):
            changes.append(output[length])


@given(samplings, st.lists(ids, max_size=10), st.sets(ids, max_size=4), st.lists(st.booleans(), max_size=8))
def test_holding_back_leaves_no_trace(
    sampling: SamplingParams, output: list[int], ends: set[int], holds: list[bool]
) -> None:
    changes = SequenceChanges(sampling, [1, 2], ends, output)
    plain = entries(SequenceChanges(sampling, [1, 2], (), output).current(hold_ends=False))
    for hold in holds:
        found = entries(changes.current(hold_ends=hold))
        taken_out = {token for token, (_, addend) in found.items() if addend == -math.inf}
        assert taken_out == (ends if hold else set())
    assert entries(changes.current(hold_ends=False)) == plain


def test_nothing_to_change_is_none() -> None:
    changes = SequenceChanges(SamplingParams(), [1, 2, 3], [0])
    changes.append(5)
    assert changes.current(hold_ends=False) is None
    assert entries(changes.current(hold_ends=True)) == {0: (1.0, -math.inf)}
    assert changes.current(hold_ends=False) is None
    assert SequenceChanges(SamplingParams(logit_bias={4: 0.0}), [1]).current(hold_ends=False) is None


def test_sequences_of_one_request_do_not_share() -> None:
    sampling = SamplingParams(n=2, presence_penalty=1.0, logit_bias={7: 3.0})
    first, second = (SequenceChanges(sampling, [1], [0]) for _ in range(2))
    first.append(7)
    second.append(9)
    assert entries(first.current(hold_ends=False)) == {7: (1.0, 2.0)}
    assert entries(second.current(hold_ends=False)) == {7: (1.0, 3.0), 9: (1.0, -1.0)}


@pytest.mark.parametrize("token", [3, 8])
def test_an_end_that_was_counted_gets_its_entry_back(token: int) -> None:
    sampling = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, logit_bias={3: 1.0})
    changes = SequenceChanges(sampling, [8], [3, 8])
    changes.current(hold_ends=True)
    changes.append(token)
    assert entries(changes.current(hold_ends=True))[token] == (2.0, -math.inf)
    assert entries(changes.current(hold_ends=False))[token] == (2.0, (1.0 if token == 3 else 0.0) - 0.5)


def test_a_view_must_not_outlive_the_step() -> None:
    changes = SequenceChanges(SamplingParams(presence_penalty=1.0), [1], output=[2])
    current = changes.current(hold_ends=False)
    assert current is not None
    copy, view = np.array(current.ids), np.frombuffer(current.ids, np.int32)
    with pytest.raises(BufferError):
        changes.append(3)
    del view
    fresh = SequenceChanges(SamplingParams(presence_penalty=1.0), [1], output=[2, 3])
    assert entries(fresh.current(hold_ends=False)).keys() == {2, 3}
    assert copy.tolist() == [2]


def test_a_step_costs_the_same_however_long_the_sequence_is() -> None:
    sampling = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)

    def best(length: int) -> float:
        changes = SequenceChanges(sampling, range(length), [0])
        times = []
        for _ in range(7):
            with cpu_time() as spent:
                for token in range(500):
                    changes.append(token)
                    changes.current(hold_ends=False)
                times.append(spent())
        return min(times)

    # A thousand times longer; 5 allows for caches on a busy machine, where walking the entries would be 100.
    assert best(100_000) < 5 * best(1000)
