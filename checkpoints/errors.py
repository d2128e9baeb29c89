"""The two errors this package raises on purpose; both carry one readable sentence."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of a kind that cannot be read.

    The message names the file, the tensor or key, and says got / expected.
    """


class PullError(RuntimeError):
    """A download did not succeed (no network, no pip, wrong checksum); one line that says what to do."""
