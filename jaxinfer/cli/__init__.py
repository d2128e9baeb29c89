"""The command `jaxinfer`: results on stdout, everything else on stderr.

Status 0: all was done. 1: it could not be, and one line on stderr says why. 2: the command line itself is
wrong. 130: interrupted. JAXINFER_DEBUG=1 shows the traceback behind the line, 2 to 4 also what the engine
does (`jaxinfer.cli.debug`). Heavy modules are imported by the command that needs them, so that `--help`
answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from jaxinfer.cli import debug
from jaxinfer.cli.bench import Bench
from jaxinfer.cli.chat import Chat
from jaxinfer.cli.commands import Pull, Serve
from jaxinfer.cli.convert import Convert
from jaxinfer.cli.doctor import Doctor
from jaxinfer.cli.generate import Generate
from jaxinfer.cli.lab import Lab
from jaxinfer.cli.plan import Plan
from jaxinfer.cli.score import Score
from jaxinfer.cli.simulate import Simulate
from jaxinfer.cli.terminal import UsageError, say_error
from jaxinfer.core import JaxInferError

__all__ = ["main"]

Command = (
    Annotated[Pull, subcommand("pull")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Lab, subcommand("lab")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Simulate, subcommand("simulate")]
    | Annotated[Doctor, subcommand("doctor")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    # A terminal that cannot show a character, or input that is no UTF-8, is no reason to break off.
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        command: Any = tyro.cli(
            Command,  # type: ignore[arg-type]
            prog="jaxinfer",
            description="Inference for Llama-family models in JAX.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
        return _run(command)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `jaxinfer ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: Any) -> int:
    try:
        debug.set_up()
        status = command.run()
        sys.stdout.flush()
        return status
    except UsageError as error:
        say_error(str(error))
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if debug.level() >= debug.TRACEBACKS:
            raise
        say_error(_one_line(error))
        return 1


def _one_line(error: Exception) -> str:
    """What to tell of an error. One that is not meant for the caller is named, since it is ours."""
    from checkpoints import CheckpointError, PullError
    from jaxinfer.text.errors import ChatTemplateError, TokenizerError

    text = " ".join(str(error).split())
    told = (JaxInferError, CheckpointError, PullError, TokenizerError, ChatTemplateError, OSError)
    if isinstance(error, told):
        return text
    return f"unexpected {type(error).__name__}: {text[:500]} (JAXINFER_DEBUG=1 shows where)"
