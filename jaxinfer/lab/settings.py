"""The settings of an uptraining, checked before anything is loaded. Fields are the flags of the command."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxinfer.config import AttentionSpan, EngineConfig, TopPagesSpan, attention_span
from jaxinfer.core import ConfigError

Train = Literal["all", "kv", "attention"]
ANY_TIME = frozenset({"save_every", "eval_file", "eval_every", "eval_tokens", "to", "save_dtype"})
"""Settings that change nothing of what is learnt: a resumed run may have others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model is uptrained. Raises ConfigError, naming the setting, for what cannot be."""

    steps: int | None = None
    """Updates of the parameters. Give this or --tokens."""
    tokens: int | None = None
    """Tokens to learn from, those of each epoch counted again; rounded up to whole steps."""
    batch: int = 4
    """Texts that are run at once, over all devices together."""
    sequence_length: int = 512
    """Tokens of each of them."""
    accumulate: int = 1
    """Batches whose gradients make one update: a step has batch x accumulate x sequence-length tokens."""
    learning_rate: float = 1e-4
    """The highest, of AdamW (1711.05101), after the warm-up."""
    warmup: int | None = None
    """Steps in which the rate rises; a twentieth of all, if left out."""
    final_share: float = 0.1
    """Of the learning rate, where the cosine ends (1608.03983)."""
    weight_decay: float = 0.01
    """Of matrices; norms and biases do not decay, and nothing that is frozen."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """Largest norm of all gradients together; 0 leaves them as they are."""
    dtype: Literal["f32", "bf16"] = "f32"
    """Of products and activations; parameters and the optimiser's moments are float32 in any case."""
    remat: bool = False
    """Hold only each layer's input for the backward pass, and compute the rest again."""
    seed: int = 0
    """Of the order of the data."""
    train: Train = "all"
    """Which parameters: all, the K and V projections (kv), or attention's four projections."""
    attention_span: str | None = None
    """What queries see while it learns: a span as the engine takes one, but for topk-pages; if left out, what
    the model says. It is no part of the result, which is served and measured with any."""
    page_size: int | None = None
    """Tokens of a page, for spans that count pages; 16, if left out."""
    distill: str | None = None
    """A MODEL to learn from besides the texts: the one from which this one was converted."""
    distill_weight: float = 0.5
    """Share of the divergence from it in the loss; the rest is cross entropy."""
    temperature: float = 1.0
    """Of both models' probabilities in the divergence, which counts temperature ** 2 times (1503.02531)."""
    devices: int | None = None
    """How many devices share the batch; all, if left out."""
    shard_params: bool = False
    """Split parameters and moments over them too, in place of a copy on each."""
    eval_file: tuple[str, ...] = ()
    """Held-out texts, whose loss is measured before, after, and every --eval-every steps."""
    eval_every: int = 0
    """0: only before and after."""
    eval_tokens: int = 16384
    """Most tokens of them."""
    save_every: int = 100
    """Steps between the states from which --resume goes on; 0 keeps none."""
    to: Literal["safetensors", "orbax"] = "safetensors"
    """Format of the result."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights; float32 is what was trained."""

    def __post_init__(self) -> None:
        _require((self.steps is None) != (self.tokens is None), "give one of steps and tokens")
        for name in ("steps", "tokens", "batch", "sequence_length", "accumulate", "devices", "eval_tokens"):
            value = getattr(self, name)
            _require(
                value is None or (_is_int(value) and value >= 1), f"{name} must be 1 or more, got {value!r}"
            )
        for name in ("eval_every", "save_every", "seed"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, f"{name} must be 0 or more, got {value!r}")
        for name in ("remat", "shard_params"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        files = self.eval_file
        texts = isinstance(files, tuple) and all(isinstance(file, str) for file in files)
        _require(texts, f"eval_file must be a tuple of file names, got {files!r}")
        _require(
            self.distill is None or isinstance(self.distill, str),
            f"distill must name a model, got {self.distill!r}",
        )
        for name in ("dtype", "train", "to", "save_dtype"):
            allowed = _choices(name)
            value = getattr(self, name)
            _require(value in allowed, f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        _check_range("learning_rate", self.learning_rate, 0, math.inf, above=True)
        _check_range("weight_decay", self.weight_decay, 0, math.inf)
        _check_range("clip", self.clip, 0, math.inf)
        _check_range("final_share", self.final_share, 0, 1)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _check_range(name, value, 0, 1)
            _require(value < 1, f"{name} must be below 1, got {value!r}")
        _check_range("distill_weight", self.distill_weight, 0, 1)
        _check_range("temperature", self.temperature, 0, math.inf, above=True)
        self.span()
        if self.attention_span is None:
            self._refuse_changed("of spans: it needs attention_span", "page_size")
        if self.distill is None:
            self._refuse_changed("of a distillation: it needs distill", "distill_weight", "temperature")
        if not self.eval_file:
            self._refuse_changed("of held-out texts: it needs eval_file", "eval_every", "eval_tokens")
        if self.warmup is not None:
            most = self.num_steps
            _require(
                _is_int(self.warmup) and 0 <= self.warmup <= most,
                f"warmup must be 0 to {most}, the number of steps, got {self.warmup!r}",
            )

    def _refuse_changed(self, reason: str, *names: str) -> None:
        for field in dataclasses.fields(Settings):
            if field.name in names:
                value = getattr(self, field.name)
                _require(value == field.default, f"{field.name} {value!r} is {reason}")

    def span(self) -> AttentionSpan | None:
        """What queries see while learning. Raises ConfigError for a span that cannot be learnt under."""
        if self.attention_span is None:
            return None
        size = EngineConfig().page_size if self.page_size is None else self.page_size
        span = attention_span(self.attention_span, EngineConfig(page_size=size).page_size)
        _require(
            not isinstance(span, TopPagesSpan),
            f"attention_span {self.attention_span!r} cannot be learnt under: pages are chosen from bounds, "
            "of which there is no gradient, and a whole text is a prompt, which sees all; allowed: window, "
            "longformer, bigbird",
        )
        return span

    @property
    def step_tokens(self) -> int:
        """Targets of one update, where no block is filled up."""
        return self.batch * self.accumulate * self.sequence_length

    @property
    def num_steps(self) -> int:
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // self.step_tokens)

    @property
    def warmup_steps(self) -> int:
        return self.num_steps // 20 if self.warmup is None else self.warmup

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have as it was."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Settings)
            if field.name not in ANY_TIME
        }


def _choices(name: str) -> tuple[str, ...]:
    choices = {
        "dtype": ("f32", "bf16"),
        "train": get_args(Train),
        "to": ("safetensors", "orbax"),
        "save_dtype": ("float32", "bfloat16"),
    }
    return choices[name]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(right: bool, message: str) -> None:
    if not right:
        raise ConfigError(message)


def _check_range(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    bound = f"above {low:g}" if above else f"{low:g} or more"
    bound += "" if high == math.inf else f", at most {high:g}"
    right = number and (value > low if above else value >= low) and value <= high
    _require(right, f"{name} must be {bound}, got {value!r}")
