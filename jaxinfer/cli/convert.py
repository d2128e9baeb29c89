"""jaxinfer convert: one format of checkpoints to another, as the model is, or with other attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jaxinfer.cli.head_flags import HeadFlags
from jaxinfer.cli.linear_flags import LinearFlags
from jaxinfer.cli.share_flags import ShareFlags
from jaxinfer.cli.terminal import UsageError, text_argument


@dataclass(frozen=True)
class Convert:
    """Write a model as an Orbax or a Hugging Face folder, with its tokenizer, from whatever can be opened."""

    source: Annotated[
        Positional[str],
        arg(metavar="SRC", help="A pulled name, a Hugging Face folder, an Orbax folder or a .gguf file."),
    ]
    destination: Annotated[Positional[str], arg(metavar="DST", help="The folder to write; it must be new.")]
    to: Literal["orbax", "safetensors"] = "orbax"
    """orbax loads straight to devices, each its own part; safetensors opens in every other tool."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto keeps each as it is (block-quantised ones become float32)."""
    max_shard_gb: float = 2.0
    """Largest file of safetensors, in GB."""
    heads: HeadFlags = field(default_factory=HeadFlags)
    linear: LinearFlags = field(default_factory=LinearFlags)
    share: ShareFlags = field(default_factory=ShareFlags)

    def run(self) -> int:
        if not 0 < self.max_shard_gb < 1e6:
            raise UsageError(f"--max-shard-gb must be more than 0, got {self.max_shard_gb:g}")
        plan, linear_layers, sharing = self.heads.plan(), self.linear.layers(), self.share.plan()
        from jaxinfer.convert import convert
        from jaxinfer.heads import HeadChange, Shared, lines

        def say(change: HeadChange) -> None:
            print("\n".join(lines(change)), flush=True)

        def say_shared(view: Shared) -> None:
            print("\n".join(view.lines()), flush=True)

        print(
            convert(
                text_argument(self.source),
                text_argument(self.destination),
                to=self.to,
                dtype=self.dtype,
                max_shard_bytes=int(self.max_shard_gb * 1e9),
                heads=plan,
                on_heads=say,
                linear_layers=linear_layers,
                favor=self.linear.favor(),
                sharing=sharing,
                on_sharing=say_shared,
            )
        )
        return 0
