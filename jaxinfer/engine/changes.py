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
    ) -> None:
        """prompt: token ids; end_ids: what `current(hold_ends=True)` takes out (EOS and stop ids); output:
        tokens that the sequence already has."""
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
        if self._repeat != 1.0:
            self._counts = dict.fromkeys(prompt, 0)
        for token in dict.fromkeys([*self._biases, *self._counts]):
            self._write(token)
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """Count one more output token; what `current` returned before may change."""
        if self._repeat == 1.0 and self._presence == 0.0 and self._frequency == 0.0:
            return
        self._counts[token] = self._counts.get(token, 0) + 1
        self._write(token)

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
                if hold_ends or token in self._counts or token in self._biases:
                    self._write(token)
                else:
                    self._remove(token)
        return self._live if self._live.ids else None

    def _write(self, token: int) -> None:
        """Set the entry of an id from its count, its bias and whether it is held back."""
        count = self._counts.get(token)
        factor = 1.0 if count is None else self._repeat
        addend = self._biases.get(token, 0.0)
        if count:
            addend -= self._presence + self._frequency * count
        if self._held and token in self._ends:
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
