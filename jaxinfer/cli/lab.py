"""`jaxinfer lab`: experiments with fewer KV heads. Each subcommand has a module of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from jaxinfer.cli.lab_compare import Compare
from jaxinfer.cli.lab_evaluate import Evaluate
from jaxinfer.cli.lab_uptrain import Uptrain

Which = (
    Annotated[Uptrain, subcommand("uptrain")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Compare, subcommand("compare")]
)


@dataclass(frozen=True)
class Lab:
    """Train, evaluate and compare models with fewer KV heads."""

    which: OmitSubcommandPrefixes[OmitArgPrefixes[Which]]

    def run(self) -> int:
        return self.which.run()
