"""Finding stop strings in text that arrives in pieces, in time linear in the text."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.text.errors import TokenizerError


class _Progress:
    """How far the text matches one stop string (Knuth-Morris-Pratt): `matched` characters of it are the
    end of the text so far, and `matched` is the largest such number below its full length."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # borders[n]: the longest proper prefix of stop[:n] that also ends it. "abab" -> 0 0 0 1 2.
        self.borders = [0, 0]
        length = 0
        for character in stop[1:]:
            while length and stop[length] != character:
                length = self.borders[length]
            length += stop[length] == character
            self.borders.append(length)

    def feed(self, character: str) -> bool:
        """Take one more character; True when it completes the stop string."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self.borders[matched]
        matched += self.stop[matched] == character
        complete = matched == len(self.stop)
        self.matched = self.borders[matched] if complete else matched
        return complete


class StopFinder:
    """Takes text in pieces and gives back what is certain not to belong to a stop string.

    The stop string that starts first in the text wins; of two that start together, the shorter. The answer
    does not depend on how the text is cut into pieces: when a stop string is complete while another that
    began before it may still complete, the decision waits for the text that settles it.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        """Raises TokenizerError for an empty stop string, which would match everywhere."""
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise TokenizerError(f"stop string {stop!r} is not allowed; expected non-empty text")
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self._held_from = 0  # position in the whole text of the first held character
        self._best: tuple[int, int, str] | None = None  # start, length, stop string
        self.matched: str | None = None

    def feed(self, text: str, counts: bool) -> str:
        """Take more text; returns what may be emitted now.

        counts: whether a stop string that is completed by this text may stop the output.
        """
        if not self._progress:
            return text
        if self.matched is not None:
            return ""
        position = self._held_from + len(self._held)
        self._held += text
        for character in text:
            position += 1
            for progress in self._progress:
                if progress.feed(character) and counts:
                    start = position - len(progress.stop)
                    found = (start, len(progress.stop), progress.stop)
                    self._best = found if self._best is None else min(self._best, found)
            if self._best is not None and self._first_open(position) >= self._best[0]:
                return self._stop_at_best()
        return self._release(self._first_open(position))

    def finish(self) -> str:
        """The end of the text: the rest of what was held, cut at a stop string that was complete."""
        if self.matched is not None:
            return ""
        if self._best is not None:
            return self._stop_at_best()
        return self._release(self._held_from + len(self._held))

    def _first_open(self, position: int) -> int:
        """Where the earliest stop string that is begun but not complete starts; `position` when none is."""
        return position - max(progress.matched for progress in self._progress)

    def _stop_at_best(self) -> str:
        assert self._best is not None
        start, length, self.matched = self._best
        return self._release(start + length if self._include_stop else start)

    def _release(self, end: int) -> str:
        count = end - self._held_from
        text, self._held = self._held[:count], self._held[count:]
        self._held_from = end
        return text
