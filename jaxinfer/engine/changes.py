"""What penalties, biases and held-back ends do to the logits of one sequence, kept up token by token.

The rules are those of `SamplingParams`: the repetition penalty counts prompt and output, once per id (Hugging
Face); presence and frequency penalties count the output alone, once and once per occurrence (OpenAI). Every
entry is computed from counts, never from the entry before it, so a sequence that is built again from its
tokens (a preempted one, or another process) has exactly the same numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxinfer.core import LogitChanges, SamplingParams


class SequenceChanges:
    """The changes to the logits of the next token of one sequence.

    `append` after every output token and `current` cost the same however long the sequence is; only the start
    or end of holding back goes through the end ids. One per sequence: the n sequences of a request each have
    their own, for their outputs differ.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Seq[int],
        end_ids: Iterable[int] = (),
        output: Iterable[int] = (),
        banned: Iterable[tuple[int, ...]] = (),
    ) -> None:
        """prompt: token ids; end_ids: what `current(hold_ends=True)` takes out (EOS and stop ids); output:
        tokens that the sequence already has; banned: runs of ids that the output may not hold, of which the
        last id is taken out wherever the others have just come."""
        self._repeat = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._biases = {token: bias for token, bias in (sampling.logit_bias or {}).items() if bias != 0.0}
        self._ends = dict.fromkeys(end_ids)  # a dict for its order: two builds give the same arrays
        self._held = False
        # Occurrences in the output by id; for an id of the prompt alone, 0 (only when repetition counts it).
        self._counts: dict[int, int] = {}
        self._live = LogitChanges(array("i"), array("f"), array("f"))
        self._places: dict[int, int] = {}  # id -> its index in the arrays
        self._runs: dict[int | None, list[tuple[int, ...]]] = {}  # by their last id but one
        for run in banned:
            self._runs.setdefault(run[-2] if len(run) > 1 else None, []).append(run)
        self._reach = max((len(run) for runs in self._runs.values() for run in runs), default=1) - 1
        self._tail: list[int] = []  # the last `reach` ids of the output
        self._out: dict[int, None] = {}  # ids that would complete a banned run now
        if self._repeat != 1.0:
            self._counts = dict.fromkeys(prompt, 0)
        for token in dict.fromkeys([*self._biases, *self._counts]):
            self._write(token)
        if self._runs:
            self._ban()
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """Count one more output token; what `current` returned before may change."""
        if self._runs:
            self._tail = [*self._tail, token][-self._reach :] if self._reach else []
            self._ban()
        if self._repeat == 1.0 and self._presence == 0.0 and self._frequency == 0.0:
            return
        self._counts[token] = self._counts.get(token, 0) + 1
        self._write(token)

    def _ban(self) -> None:
        """Take out what would complete a banned run now, and give back what no longer would."""
        previous = self._tail[-1] if self._tail else None
        runs = [*self._runs.get(None, ()), *(self._runs.get(previous, ()) if self._tail else ())]
        out = dict.fromkeys(run[-1] for run in runs if self._ends_with(run[:-1]))
        before, self._out = self._out, out
        for token in [*(t for t in before if t not in out), *(t for t in out if t not in before)]:
            self._refresh(token)

    def _ends_with(self, run: tuple[int, ...]) -> bool:
        return len(run) <= len(self._tail) and tuple(self._tail[len(self._tail) - len(run) :]) == run

    def _refresh(self, token: int) -> None:
        """Set the entry of an id that is taken out now, or is no longer."""
        out = token in self._out or (self._held and token in self._ends)
        if out or token in self._counts or token in self._biases:
            self._write(token)
        else:
            self._remove(token)

    def current(self, hold_ends: bool) -> LogitChanges | None:
        """The changes for the next token; None when there are none.

        hold_ends: the end ids are taken out as well (min_tokens is not reached yet); afterwards they have
        their ordinary entries again. The object is not a copy: it may be read until the next `append` or
        `current` of this sequence, and whoever wants it longer copies the arrays. No view of them may be left
        by then (numpy.frombuffer makes one): an array with a view cannot grow, and raises BufferError.
        """
        if hold_ends != self._held:
            self._held = hold_ends
            for token in self._ends:
                self._refresh(token)
        return self._live if self._live.ids else None

    def _write(self, token: int) -> None:
        """Set the entry of an id from its count, its bias and whether it is held back."""
        count = self._counts.get(token)
        factor = 1.0 if count is None else self._repeat
        addend = self._biases.get(token, 0.0)
        if count:
            addend -= self._presence + self._frequency * count
        if token in self._out or (self._held and token in self._ends):
            addend = -math.inf
        live, place = self._live, self._places.get(token)
        if place is None:
            self._places[token] = len(live.ids)
            live.ids.append(token)
            live.factors.append(factor)
            live.addends.append(addend)
        else:
            live.factors[place] = factor
            live.addends[place] = addend

    def _remove(self, token: int) -> None:
        """Drop an entry that changes nothing: the last one takes its place."""
        live, place = self._live, self._places.pop(token)
        last = live.ids.pop()
        factor, addend = live.factors.pop(), live.addends.pop()
        if last != token:
            self._places[last] = place
            live.ids[place], live.factors[place], live.addends[place] = last, factor, addend
