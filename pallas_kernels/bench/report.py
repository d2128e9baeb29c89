"""The table for people."""

from __future__ import annotations

import sys

from pallas_kernels.bench.matmuls import PLAIN
from pallas_kernels.bench.rows import DENSE, Row

BAD = ("wrong", "failed")
PEERS = (DENSE, PLAIN, "torch")
"""Backends that are not ours: what is wrong with them is no failure of ours."""


def print_row(row: Row) -> None:
    """One row as it comes, so that whoever waits sees something."""
    if "copy" in row:
        line = f"copy {row['copy'] / 1e9:.1f} GB/s, matmul {row['matmul'] / 1e12:.2f} TFLOP/s"
    else:
        line = f"{row.get('case', row.get('kind'))}: {row.get('backend', '')} {row.get('status')}"
        line += f" {row['seconds'] * 1e6:.1f} us" if "seconds" in row else f" {row.get('reason', '')}"
    print(line, file=sys.stderr, flush=True)


def floor(row: Row, limits: dict[str, float | None]) -> tuple[float, str] | None:
    """(seconds that the row would take at the measured limits, which of them)."""
    if "bytes" not in row or not limits.get("copy") or not limits.get("matmul"):
        return None
    times = {
        "bandwidth": row["bytes"] / (limits["copy"] or 1),
        "matmul": row["operations"] / (limits["matmul"] or 1),
    }
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def print_table(rows: list[Row], limits: dict[str, float | None]) -> list[Row]:
    """Add to every row with a time its share of the floor and its ratios to the peers of the same shape,
    print them all, and give those that are wrong or failed though their backend says that it serves the
    case."""
    peers: dict[tuple[str, str], float] = {}
    for row in rows:
        name = row.get("backend", "")
        if "seconds" in row and name.startswith(PEERS):
            kind = "torch" if name.startswith("torch") else name
            at = (row["shape"], kind)
            peers[at] = min(row["seconds"], peers.get(at, float("inf")))
    bad = [row for row in rows if row.get("status") in BAD and not row.get("backend", "").startswith(PEERS)]
    print(
        f"{'case':32} {'backend':14} {'us':>10} {'% floor':>8} {'bound':>10} {'vs dense':>9} {'vs torch':>9}"
        "  error   note",
        file=sys.stderr,
    )
    refused: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        name, shape = row.get("backend", ""), row.get("shape", "")
        if row.get("status") == "refused":
            refused.setdefault((name, row.get("reason", "")), []).append(row.get("case", shape))
            continue
        cells = ["", "", "", "", ""]
        if "seconds" in row:
            cells[0] = f"{row['seconds'] * 1e6:.1f}"
            if (lowest := floor(row, limits)) is not None:
                row["floor_share"], row["bound"] = lowest[0] / row["seconds"], lowest[1]
                cells[1:3] = f"{100 * row['floor_share']:.1f}", row["bound"]
            for place, kind in ((3, DENSE), (3, PLAIN), (4, "torch")):
                if (shape, kind) in peers and not name.startswith(kind):
                    row[f"speedup_{kind.split()[0]}"] = peers[shape, kind] / row["seconds"]
                    cells[place] = f"{peers[shape, kind] / row['seconds']:.2f}x"
        error = f"{row['error']:.1e}" if "error" in row else ""
        note = row.get("reason", "") if row.get("status") != "ok" else ""
        note = f"{row['status']}: {note}" if note else ""
        note += "launch-bound" if row.get("launch_bound") else ""
        if row.get("kind") == "tune":
            name, note = f"{name} tune", note or f"recorded {row.get('recorded', 'nothing')}"
        print(
            f"{row.get('case', shape):32} {name:14} {cells[0]:>10} {cells[1]:>8} {cells[2]:>10} {cells[3]:>9}"
            f" {cells[4]:>9}  {error:7} {note[:110]}",
            file=sys.stderr,
        )
    for (name, reason), cases in refused.items():
        which = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        print(f"{name} refused {which}: {reason}", file=sys.stderr)
    return bad
