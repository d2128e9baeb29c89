"""The two errors this package raises on purpose; both carry one readable sentence."""

from __future__ import annotations

import reprlib


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of a kind that cannot be read.

    The message names the file, the tensor or key, and says got / expected.
    """


class PullError(RuntimeError):
    """A download did not succeed (no network, no pip, wrong checksum); one line that says what to do."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(name: object) -> str:
    """A name out of a file, fit for a message: as it is when it is short and printable, else `quoted`.

    Names come from strangers: a megabyte long, or with line ends and terminal escapes in them.
    """
    if isinstance(name, str) and name.isprintable() and len(name) <= 100:
        return name
    return quoted(name)


def quoted(value: object) -> str:
    """A value out of a file as Python would write it, cut to one line of a few hundred characters at most."""
    return _SHORT.repr(value)
