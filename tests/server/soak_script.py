"""A server process for the soak: a small real model, and a route /soak that says what is held.

`python soak_script.py MODEL`. Not part of what is served: the route is added to the application of
`launch.serve` from outside. When all is closed, the last line of stderr is what the engine's books say.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from starlette.responses import JSONResponse

import jaxinfer.server.app as app_module
from jaxinfer import LLM
from jaxinfer.runtime.trace import release_freed_memory
from jaxinfer.server.launch import ServerConfig, serve

ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "page_size": 4,
    "num_pages": 25,  # the longest request alone takes all of it: others are preempted as they grow
}


def held(llm: LLM) -> dict[str, Any]:
    """Pages, tasks and bytes of this process."""
    release_freed_memory()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * 4096
    stats = llm.stats()
    names = ("pages_live", "running", "waiting", "preemptions", "compiles_after_warmup", "invariant_failures")
    return {name: stats[name] for name in names} | {
        "tasks": len(asyncio.all_tasks()),
        "resident": resident,
        "problems": llm.engine.check(),
    }


def main(model: str) -> None:
    """Serve until SIGTERM."""
    create_app = app_module.create_app
    llm = LLM(model, progress=False, **ENGINE)

    def with_route(*args: Any, **options: Any) -> Any:
        app = create_app(*args, **options)

        async def soak() -> JSONResponse:
            return JSONResponse(held(llm))

        app.add_api_route("/soak", soak)
        return app

    app_module.create_app = with_route
    try:
        config = ServerConfig(port=0, max_queue=16, drain_seconds=20, measure_machine=False)
        serve(lambda: llm, config)
    finally:
        books = {"pages_live": llm.stats()["pages_live"], "problems": llm.engine.check()}
        print(json.dumps(books), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
