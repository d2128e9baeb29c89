"""Progress of what takes a while, on stderr: loading weights, compiling programs, a batch of prompts.

    with phase("loading", total=num_bytes, unit="B") as advance:
        for tensor in tensors:
            advance(tensor.nbytes)

On a terminal a phase is one bar that disappears when it ends. Elsewhere (a log file, CI) nothing is printed
for a phase that ends within a second; a longer one gets a line now and then, and one at its end. stdout is
never touched: it belongs to results.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["", "B"]


class Advance(Protocol):
    """So much more is done; `note` says how it goes (a loss, a speed), until the next one."""

    def __call__(self, amount: float = 1, note: str = "") -> None: ...


FIRST_LINE_S = 1.0
"""A phase shorter than this prints nothing where stderr is no terminal."""
MOST_BETWEEN_LINES_S = 60.0
"""A longer one is silent for no longer than this."""

_lock = threading.Lock()
_silenced = 0
_board: Progress | None = None
_open_phases = 0


@contextmanager
def silenced() -> Generator[None]:
    """No phase that begins inside prints anything: text is being streamed to the same terminal."""
    global _silenced
    with _lock:
        _silenced += 1
    try:
        yield
    finally:
        with _lock:
            _silenced -= 1


@contextmanager
def phase(
    title: str, *, total: float | None = None, unit: Unit = "", wanted: bool = True
) -> Generator[Advance]:
    """Show a phase of work for as long as the block runs; yields `advance(amount)`.

    `total` None is a phase of unknown length. `unit` "B" shows amounts as bytes. Phases may overlap, and
    `advance` may be called from any thread. `wanted` False and JAXINFER_PROGRESS=0 keep it silent.
    """
    if not wanted or _silenced or os.environ.get("JAXINFER_PROGRESS") == "0":
        yield lambda amount=1, note="": None
    elif sys.stderr.isatty():
        with _bar(title, total, unit) as advance:
            yield advance
    else:
        lines = _Lines(title, total, unit)
        try:
            yield lines.advance
        except BaseException:
            lines.end("failed after")
            raise
        lines.end("done in")


# ---------------------------------------------------------------------------------------- a terminal


@contextmanager
def _bar(title: str, total: float | None, unit: Unit) -> Generator[Advance]:
    """One row of a display shared by all open phases: rich allows one live display per terminal."""
    global _board, _open_phases
    with _lock:
        if _board is None:
            _board = _new_board()
            _board.start()
        board = _board
        _open_phases += 1
    task = board.add_task(title, total=total, amount="")
    done = 0.0

    def advance(amount: float = 1, note: str = "") -> None:
        nonlocal done
        with _lock:
            done += amount
            board.update(task, completed=done, amount=_amount(done, total, unit, note))

    try:
        yield advance
    finally:
        board.remove_task(task)
        with _lock:
            _open_phases -= 1
            if _open_phases == 0:
                board.stop()
                _board = None


def _new_board() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=32),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


# ------------------------------------------------------------------------------------- plain lines


class _Lines:
    """Sparse lines: the first after a second, each next one after twice the time of the one before, and every
    minute in the end."""

    def __init__(self, title: str, total: float | None, unit: Unit):
        self.title, self.total = title, total
        self.unit: Unit = unit
        self.done = 0.0
        self.began = time.monotonic()
        self.next_line = FIRST_LINE_S

    def advance(self, amount: float = 1, note: str = "") -> None:
        with _lock:
            self.done += amount
            elapsed = time.monotonic() - self.began
            if elapsed < self.next_line:
                return
            self.next_line = min(2 * elapsed, elapsed + MOST_BETWEEN_LINES_S)
        self.say(_amount(self.done, self.total, self.unit, note))

    def end(self, how: str) -> None:
        elapsed = time.monotonic() - self.began
        if elapsed >= FIRST_LINE_S:
            self.say(f"{how} {elapsed:.1f} s")

    def say(self, text: str) -> None:
        print(f"jaxinfer: {self.title}: {text}", file=sys.stderr, flush=True)


def _amount(done: float, total: float | None, unit: Unit, note: str = "") -> str:
    if unit == "B":
        text = f"{done / 1e6:.0f} MB" if total is None else f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
    else:
        text = f"{done:g}" if total is None else f"{done:g}/{total:g}"
    return f"{text}, {note}" if note else text
