"""What commands say and are given: one-line errors, text arguments, answers as they come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxinfer import progress
from jaxinfer.core import RequestError, TokenEvent


class UsageError(Exception):
    """The command line is wrong in a way that its grammar cannot say."""


def say_error(message: str) -> None:
    """One line on stderr."""
    print(f"jaxinfer: error: {message}", file=sys.stderr, flush=True)


def text_argument(argument: str) -> str:
    """The argument itself. Raises RequestError for bytes of a shell that are no UTF-8."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the text is not valid UTF-8", "prompt") from None
    return argument


def token_id_argument(argument: str) -> list[int]:
    """Ids written "504,3575,314" or "504 3575 314". Raises RequestError for anything else."""
    try:
        return [int(part) for part in argument.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"with --token-ids a prompt looks like 504,3575,314; got {argument!r}", "prompt"
        ) from None


def bias_argument(arguments: Iterable[str]) -> dict[int, float]:
    """Biases written "504:-100", by token id. Raises RequestError for anything else, or an id given twice."""
    biases: dict[int, float] = {}
    for argument in arguments:
        token, _, bias = argument.partition(":")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise RequestError(
                f"a logit_bias looks like 504:-100 (token id : bias); got {argument!r}", "logit_bias"
            ) from None
        if token_id in biases:
            raise RequestError(f"logit_bias: token {token_id} is given twice", "logit_bias")
        biases[token_id] = value
    return biases


def file_argument(argument: str, name: str) -> str:
    """The argument itself, or the content of FILE where it is @FILE. Raises OSError, or RequestError for what
    is no UTF-8."""
    if not argument.startswith("@"):
        return text_argument(argument)
    try:
        return Path(argument[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: {argument[1:]}: byte {error.start} is not valid UTF-8", name) from None


def print_stream(events: Iterable[TokenEvent]) -> Iterator[TokenEvent]:
    """Pass events on and print their text as it comes, with a line end after the last.

    From the first text on no progress is shown beside it; what compiles before is.
    """
    quiet = False
    with contextlib.ExitStack() as stack:
        for event in events:
            if event.text and not quiet:
                stack.enter_context(progress.silenced())
                quiet = True
            print(event.text, end="", flush=True)
            yield event
        print(flush=True)
