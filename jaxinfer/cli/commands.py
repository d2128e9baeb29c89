"""The small commands: pull, serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import Positional, arg

from jaxinfer.cli.flags import EngineFlags, Model, ServerFlags


@dataclass(frozen=True)
class Pull:
    """Download a model into the cache folder."""

    name: Annotated[
        Positional[str], arg(metavar="NAME", help="smollm2-135m, or ORG/NAME on the Hugging Face hub.")
    ]

    def run(self) -> int:
        import checkpoints

        print(checkpoints.pull(self.name, progress=True))
        return 0


@dataclass(frozen=True)
class Serve:
    """Offer a model over HTTP, in OpenAI's shapes."""

    model: Model
    server: ServerFlags = field(default_factory=ServerFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        from jaxinfer.server.launch import serve

        serve(lambda: self.engine.load(self.model), self.server.checked())
        return 0
