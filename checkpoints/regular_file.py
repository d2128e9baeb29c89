"""Opening what a checkpoint consists of: regular files and nothing else.

A named pipe in the place of a file would make `open` wait for ever, and a device can be endless. Symbolic
links are followed, out of the folder too: the Hugging Face hub's cache consists of them.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

from checkpoints.errors import CheckpointError

GGUF_MAGIC = b"GGUF"
"""First bytes of every GGUF file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises CheckpointError when it is absent, not readable, or no regular file.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for a writer; regular files do not know it.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            regular = stat.S_ISREG(os.fstat(number).st_mode)
        except OSError:
            os.close(number)
            raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte or a lone surrogate
        raise _cannot_read(path, error) from error
    if not regular:
        os.close(number)
        raise CheckpointError(f"{path}: cannot be read (a folder, pipe or device; expected a regular file)")
    return os.fdopen(number, "rb")


def is_present(path: Path) -> bool:
    """Whether there is a regular file at `path`, links followed; False when there is nothing of that name.

    Raises CheckpointError for what is there and cannot be read: a link to nowhere, a folder, a pipe.
    """
    if not os.path.lexists(path):
        return False
    open_regular(path).close()
    return True


def read_whole(path: Path, most_bytes: int) -> bytes:
    """All bytes of a small regular file.

    Raises CheckpointError when it cannot be read or has more than `most_bytes`.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise CheckpointError(f"{path}: got {size} bytes, expected at most {most_bytes}")
            return file.read(most_bytes)
        except OSError as error:
            raise _cannot_read(path, error) from error


def map_whole(path: Path) -> mmap.mmap:
    """A regular file of at least one byte, mapped into memory for reading.

    Raises CheckpointError when it cannot be mapped.
    """
    with open_regular(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError | ValueError) -> CheckpointError:
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"{path}: cannot be read ({reason})")
