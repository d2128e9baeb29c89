"""How a model is run: `EngineConfig`, whose fields are the command line's flags and the keywords of `LLM`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxinfer.config.spans import AttentionSpan, attention_span
from jaxinfer.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is run. Field names are the command-line flags and the keywords of `LLM`.

    Raises ConfigError for a value out of range, or one that this version does not implement.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and arithmetic; auto is bfloat16 on GPU and float32 on CPU."""
    max_model_len: int | None = None
    """Longest prompt + output of a request, in tokens; None is the model's own limit."""
    max_num_seqs: int | None = None
    """Most sequences that run together in one step; None is 32 on CPU and 256 on GPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, shared by decodes (served first) and prefill chunks; None is 512 on CPU and
    2048 on GPU."""
    page_size: int = 16
    """Tokens per KV page (Z)."""
    num_pages: int | None = None
    """Pages in the pool (M); None is as many as memory_utilization allows and the limits can use."""
    memory_utilization: float = 0.9
    """Share of the device's free memory that the pool may take; on CPU the pool also stays below 1 GiB
    (or one sequence of max_model_len, if that is more), since host memory is shared with everything else."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"] = "auto"
    """Of the pages; auto is `dtype`. int8 keeps a float32 scale for each token and KV head."""
    attention_backend: Literal["auto", "pallas_mosaic", "pallas_triton", "cudnn", "xla", "reference"] = "auto"
    """Which implementation of paged attention; auto takes the best that serves the device and shapes."""
    interpret_kernels: bool = False
    """Run the GPU kernels of the attention backend in JAX's interpreter, on any device: for tests, slowly."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto takes the default sampling of requests from the model's own generation_config.json."""
    seed: int | None = None
    """Seeds the draws of requests that bring no seed of their own; None takes one from the system."""
    compile_cache_dir: str | None = None
    """Where compiled programs are kept; None is $JAXINFER_CACHE/compile, "" keeps none."""
    warmup: Literal["full", "lazy"] = "lazy"
    """full compiles every program at start; lazy compiles each on its first use."""
    strict_compiles: bool = False
    """With warmup full: a program that is wanted and was not compiled at start is an error, not a wait."""
    enable_prefix_caching: bool = True
    """Keep the K/V of finished sequences as long as nobody needs their pages, for prompts that begin so."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is served first: who came first, or who states the lower `priority`."""
    async_scheduling: bool = True
    """Plan the next step while the device runs this one."""
    batch_invariant: bool = False
    """Ids and logprobs that do not depend on the batch, the chunks and the cache, to the last bit, on one
    type of device. Slower: every step runs in one shape (on CPU in a few), decodes as chunks."""
    trace: str | None = None
    """A file to which each step is written as it runs; None writes nothing."""
    quantization: Literal["int8", "int4", "fp8", None] = None
    """What the weights inside of layers are rounded to while the model loads: int8 and fp8 (e4m3) take a
    byte and share a scale per output, int4 half a byte with a scale for each 64 inputs (32 where 64 does not
    divide them). Embeddings, output head, norms and biases keep `dtype`. On CPU, int4 and fp8 save memory and
    cost time. On an NVIDIA GPU int4 uses a kernel of Pallas Triton, whose deprecation JAX announces."""
    attention_span: str | None = None
    """Which keys queries see, on a checkpoint that has no windows; None: what the checkpoint says. Of
    window:W, window:W,sinks:S, longformer:W,global:G, bigbird:W,global:G,random:R[,seed:X] and
    topk-pages:K[,skip:L][,from:P]; W, S and P in tokens, G, R and K in pages."""
    # Not served yet: any other value than these is refused by name.
    speculative: None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name, neutral in _NOT_SERVED.items():
            if getattr(self, name) != neutral:
                raise ConfigError(f"{name} is not supported yet; leave it at {neutral!r}")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                allowed = ", ".join(map(str, get_args(hint)))
                raise ConfigError(f"{name} {getattr(self, name)!r} is not one of {allowed}")
        for name, low, optional in (
            ("max_model_len", 2, True), ("max_num_seqs", 1, True), ("max_num_batched_tokens", 1, True),
            ("page_size", 1, False), ("num_pages", 2, True), ("seed", -(2**63), True),
        ):  # fmt: skip
            value = getattr(self, name)
            if optional and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
                raise ConfigError(f"{name} must be an integer of at least {low}, below 2^63; got {value!r}")
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise ConfigError(f"memory_utilization must lie in (0, 1], got {share!r}")
        if not isinstance(self.compile_cache_dir, (str, type(None))):
            raise ConfigError(f"compile_cache_dir must be a path as text, got {self.compile_cache_dir!r}")
        if not isinstance(self.trace, (str, type(None))) or self.trace == "":
            raise ConfigError(f"trace must be the path of a file, got {self.trace!r}")
        for name in (
            "strict_compiles",
            "enable_prefix_caching",
            "async_scheduling",
            "batch_invariant",
            "interpret_kernels",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.strict_compiles and self.warmup != "full":
            raise ConfigError(
                f"strict_compiles needs warmup 'full', got {self.warmup!r}: every program would be refused"
            )
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        self.span()

    def span(self) -> AttentionSpan | None:
        """What `attention_span` says, for pages of `page_size` tokens."""
        return None if self.attention_span is None else attention_span(self.attention_span, self.page_size)

    def on(self, platform: str) -> EngineConfig:
        """The same with every value that depends on the `platform` ("cpu", "gpu") stated."""
        gpu = platform != "cpu"
        dtype = ("bfloat16" if gpu else "float32") if self.dtype == "auto" else self.dtype
        return dataclasses.replace(
            self,
            dtype=dtype,
            kv_cache_dtype=dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            max_num_seqs=self.max_num_seqs or (256 if gpu else 32),
            max_num_batched_tokens=self.max_num_batched_tokens or (2048 if gpu else 512),
        )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from keywords; an unknown one is refused with the list of known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ConfigError(
                f"unknown engine option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**kwargs)


_NOT_SERVED: dict[str, Any] = {
    "speculative": None,
    "tensor_parallel_size": 1,
}
