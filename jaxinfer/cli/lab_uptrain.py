"""`jaxinfer lab uptrain`: a converted model learns from texts, and from its original."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from jaxinfer.cli.flags import Model
from jaxinfer.cli.terminal import UsageError, text_argument
from jaxinfer.lab.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFlags(Settings):
    """How it learns."""

    eval_file: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FILE")] = ()
    """Held-out texts, whose loss is measured before, after, and every --eval-every steps; may be given
    several times."""

    def __post_init__(self) -> None:
        """Nothing: `checked` validates, where its error is reported as one line and not as tyro's."""

    def checked(self) -> Settings:
        """Raises ConfigError."""
        return Settings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)})


@dataclass(frozen=True)
class Uptrain:
    """Train a model further, all of it or its K and V projections alone.

    DST.training holds the loss curve (log.jsonl) and the states from which --resume goes on. The last line
    on stdout is one JSON object: losses before and after, tokens/s, memory.
    """

    model: Model
    destination: Annotated[Positional[str], arg(metavar="DST", help="The folder to write; it must be new.")]
    data: Annotated[tuple[str, ...], arg(metavar="FILE...")] = ()
    """Texts to learn from, in UTF-8: of a .jsonl file the "text" of every line, any other file as a whole."""
    resume: bool = False
    """Go on where a run to DST with the same model, texts and settings was broken off."""
    settings: SettingFlags = field(default_factory=SettingFlags)

    def run(self) -> int:
        if not self.data:
            raise UsageError("uptrain needs --data FILE...")
        settings = self.settings.checked()
        from jaxinfer.lab.uptrain import uptrain

        report = uptrain(
            text_argument(self.model),
            text_argument(self.destination),
            [text_argument(file) for file in self.data],
            settings,
            resume=self.resume,
        )
        print(json.dumps(report, ensure_ascii=False))
        return 0
