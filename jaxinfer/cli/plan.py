"""`jaxinfer plan`: which wall binds, from the numbers of a model and the sheet of a device."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxinfer.cli.planning import DeviceFlags

PLAN_HELP = (
    "A built-in shape (llama3-8b, ...), a config.json or its folder, or any MODEL of the other commands."
)


@dataclass(frozen=True)
class Plan:
    """What fits, which wall binds, predicted TTFT and TPOT, and what each remedy buys. Reads no weights."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help=PLAN_HELP)]
    context: int | None = None
    """Prompt tokens of each request; 2048, or what the model allows beside the output, when left out."""
    batch: int = 8
    """Requests that run together."""
    output: int = 256
    """New tokens of each request."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step: the longest chunk of a prompt; the engine's own default when left out."""
    page_size: int = 16
    """Tokens of a page of K/V."""
    memory_utilization: float = 0.9
    """Share of the memory left by the weights that the pool takes."""
    attention_span: str | None = None
    """What queries see: as the flag of `serve`."""
    json: bool = False
    """As one JSON object."""
    plot: Annotated[str | None, arg(metavar="FILE")] = None
    """Write the roofline, and TTFT and TPOT against the context, as a picture. Needs the extra [plots]."""
    on: DeviceFlags = field(default_factory=DeviceFlags)

    def run(self) -> int:
        from jaxinfer.config import EngineConfig
        from jaxinfer.planner import Workload, plan, remedies
        from jaxinfer.planner.report import as_data, as_text
        from jaxinfer.shapes import model_shape

        config = model_shape(self.model)
        engine = EngineConfig(
            max_num_batched_tokens=self.max_num_batched_tokens, page_size=self.page_size,
            attention_span=self.attention_span,
        )  # fmt: skip
        target = self.on.resolve(config, engine)
        budget = engine.on(target.sheet.platform)
        assert budget.max_num_batched_tokens is not None
        context = self.context
        if context is None:
            context = max(1, min(2048, config.max_position - self.output))
        workload = Workload(
            context=context, batch=self.batch, output=self.output,
            max_num_batched_tokens=budget.max_num_batched_tokens,
            memory_utilization=self.memory_utilization,
        )  # fmt: skip
        made = plan(
            self.model, target.costs, target.sheet, workload, target.time, expectation=target.expectation,
            pool_limit_bytes=target.pool_limit_bytes,
        )  # fmt: skip
        changes = remedies(made, target.time_of)
        if self.plot is not None:
            from jaxinfer.planner.plots import save_plot

            save_plot(made, Path(self.plot), target.time_of)
        print(json.dumps(as_data(made, changes), allow_nan=False) if self.json else as_text(made, changes))
        if not self.json and workload.length > config.longest_position:
            print(f"(this model is made for {config.longest_position} tokens)")
        return 0
