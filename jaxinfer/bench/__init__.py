"""Measuring an engine under load: what was asked when, what came back when, and what that says.

    load = poisson(4.0, 200, Prompts(Lengths.parse("512")), Lengths.parse("lognormal:128,0.6"), seed=0)
    records = drive(llm.engine, load, RealClock())
    summary = Summary.of(records, Objective.parse("ttft_p95=500ms,tpot_p95=50ms"))

A `Load` says when requests should arrive and how long they are; it is data, made from a seed. `drive` puts it
to any engine, by any clock: a real one measures, a virtual one under a simulated runner predicts. Over HTTP,
`http_target` puts the same load to a server. Either way the outcome is one `RequestRecord` a request, from
which all figures follow.
"""

from jaxinfer.bench.drive import Clock, RealClock, drive
from jaxinfer.bench.lengths import Lengths
from jaxinfer.bench.load import Arrival, Load, Prompts, at_once, closed, constant, poisson, read_trace
from jaxinfer.bench.records import Log, Objective, RequestRecord, Summary, read_log

__all__ = [
    "Arrival",
    "Clock",
    "Lengths",
    "Load",
    "Log",
    "Objective",
    "Prompts",
    "RealClock",
    "RequestRecord",
    "Summary",
    "at_once",
    "closed",
    "constant",
    "drive",
    "poisson",
    "read_log",
    "read_trace",
]
