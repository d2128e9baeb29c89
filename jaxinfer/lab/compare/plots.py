"""Pictures of a comparison, as small PNGs, from its results. matplotlib comes with `jaxinfer[plots]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.core import ConfigError
from jaxinfer.lab.compare import derive
from jaxinfer.lab.compare.recipe import FULL

COLOURS = ("#2f6fb2", "#d9822b", "#3d8b40", "#c23b3b", "#7b5aa6", "#8a6d3b", "#17a2b8", "#e377c2")
GREY, LIGHT = "#8a8f98", "#e4e6ea"
MARKERS = "osD^vP*X"
DPI = 80
ACROSS = 10
"""Heat maps beside one another."""


def check() -> None:
    """Raises ConfigError where no picture could be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the pictures of a comparison need matplotlib: pip install 'jaxinfer[plots]', or --no-plots"
        ) from None


def wanted(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The pictures that these cells give: file name -> what it shows."""
    found = {}
    quality, speeds = derive.done(rows), derive.done(rows, "speed")
    if quality:
        found["quality.png"] = "Quality against KV bytes a token, TPOT and largest batch"
    if any(row["tokens"] for row in quality):
        found["uptraining.png"] = "Quality against tokens of uptraining"
    if speeds:
        found["context.png"] = "Time and memory against context"
    if derive.done(rows, "similarity"):
        found["similarity.png"] = "Likeness of KV heads, keys above values"
    return found


def draw(value: dict[str, Any], output: Path) -> None:
    """Every picture that there are figures for. Raises OSError."""
    drawings = {
        "quality.png": _quality, "uptraining.png": _uptraining, "context.png": _context,
        "similarity.png": _similarity,
    }  # fmt: skip
    for name in wanted(value["cells"]):
        figure = drawings[name](value)
        figure.savefig(output / name, dpi=DPI, format="png", metadata={"Software": None})


def _figure(rows: int, columns: int, width: float, height: float, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes


def _plain(axis: Any) -> None:
    axis.grid(color=LIGHT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _by_name(names: Sequence[str | None]) -> dict[str | None, str]:
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


# ----------------------------------------------------------------------------- quality against its costs


def _quality(value: dict[str, Any]) -> Any:
    """Points of the best model of each variant and span; the front is a line through those on it."""
    rows = value["derived"]["best"]
    kinds = [("perplexity", "perplexity")]
    if any(row["accuracy"] for row in rows):
        kinds.append(("accuracy", "accuracy"))
    costs = [("kv_bytes_per_token", "KV bytes a token (bfloat16)", 1, False)]
    device = next((r["figures"]["device"] for r in derive.done(value["cells"], "speed")), None)
    if device is not None:
        costs += [
            ("tpot_s", f"TPOT on {device}, ms, predicted", 1e3, False),
            ("largest_batch", f"largest batch on {device}", 1, True),
        ]
    figure, axes = _figure(
        len(kinds),
        len(costs),
        4.2 * len(costs),
        3.2 * len(kinds) + 0.7,
        f"{value['name']}: quality against its costs",
    )
    colours = _by_name([row["variant"] for row in rows])
    spans = list(dict.fromkeys(row["span"] for row in rows))
    for line, (kind, name) in zip(axes, kinds, strict=True):
        for axis, (cost, label, scale, more_is_better) in zip(line, costs, strict=True):
            _plain(axis)
            known = [row for row in rows if row[cost] is not None and row[kind] is not None]
            for row in known:
                axis.plot(
                    row[cost] * scale, row[kind]["mean"], MARKERS[spans.index(row["span"]) % len(MARKERS)],
                    color=colours[row["variant"]], ms=6,
                )  # fmt: skip
            signed = [
                (
                    (-1 if more_is_better else 1) * row[cost],
                    (-1 if kind == "accuracy" else 1) * row[kind]["mean"],
                )
                for row in known
            ]
            front = [known[index] for index in derive.pareto_front(signed)]
            at = [row[cost] * scale for row in front], [row[kind]["mean"] for row in front]
            axis.plot(*at, "-", color=GREY, linewidth=1.0, zorder=0)
            axis.plot(*at, "o", mfc="none", mec="black", ms=11, mew=0.8)
            axis.set(xlabel=label, ylabel=name)
            if known and min(row[cost] for row in known) > 0:
                _logarithmic(axis)
    handles = [_dot(colour, name or "original") for name, colour in colours.items()]
    handles += [_dot(GREY, f"span {span}", MARKERS[place % 8]) for place, span in enumerate(spans)]
    handles.append(_dot("black", "on the Pareto front", "o", hollow=True))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def _logarithmic(axis: Any) -> None:
    """Powers of two are what contexts, heads and batches come in; where few fit, one more between two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log", base=2)
    least, most = axis.get_xlim()
    if most < 6 * least:
        axis.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 100 else f"{x:.4g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _dot(colour: str, name: str, marker: str = "o", *, hollow: bool = False) -> Any:
    from matplotlib.lines import Line2D

    inside = "none" if hollow else colour
    return Line2D([], [], color=colour, marker=marker, linestyle="", label=name, mfc=inside)


# ------------------------------------------------------------------------- quality against uptraining


def _uptraining(value: dict[str, Any]) -> Any:
    """The first span's nats by tokens: a panel a variant, a line a method, bands from the lowest seed to the
    highest; original and control beside them."""
    groups = [g for g in derive.groups(value["cells"]) if g["nats"] is not None]
    span = groups[0]["span"]
    groups = [group for group in groups if group["span"] == span]
    variants = list(dict.fromkeys(group["variant"] for group in groups if group["variant"]))
    colours = _by_name([group["method"] for group in groups if group["method"]])
    title = f"{value['name']}: quality against tokens of uptraining (span {span})"
    figure, axes = _figure(1, max(1, len(variants)), max(6.5, 4.4 * len(variants)), 4.2, title)
    for axis, variant in zip(axes[0], variants, strict=False):
        _plain(axis)
        for method, colour in colours.items():
            points = [g for g in groups if g["variant"] == variant and g["method"] == method]
            _lines(axis, points, colour, method)
        originals = [g for g in groups if g["role"] in ("original", "control")]
        _lines(axis, originals, GREY, "original, trained on", "--")
        axis.axhline(originals[0]["nats"]["mean"] if originals else 0.0, color=GREY, linewidth=0.8)
        least = min((g["tokens"] for g in groups if g["tokens"]), default=1)
        axis.set_xscale("symlog", linthresh=least)
        axis.set(title=variant, xlabel="tokens", ylabel="nats a token")
    if variants:
        axes[0][0].legend(frameon=False, fontsize="small")
    return figure


def _lines(
    axis: Any, points: Sequence[dict[str, Any]], colour: str, name: str | None, style: str = "-"
) -> None:
    """One for each span that models were trained under; what was not trained belongs to all of them."""
    trained = list(dict.fromkeys(derive.trained_span(g) for g in points if g["tokens"])) or [FULL]
    for place, span in enumerate(trained):
        own = [g for g in points if not g["tokens"] or derive.trained_span(g) == span]
        label = name if span == FULL else f"{name}, under {span}"
        _line(axis, own, colour, label, style if place == 0 else ":")


def _line(
    axis: Any, points: Sequence[dict[str, Any]], colour: str, name: str | None, style: str = "-"
) -> None:
    points = sorted(points, key=lambda group: group["tokens"])
    tokens = [group["tokens"] for group in points]
    spreads = [group["nats"] for group in points]
    axis.plot(tokens, [s["mean"] for s in spreads], style, marker="o", ms=4, color=colour, label=name)
    axis.fill_between(
        tokens, [s["lowest"] for s in spreads], [s["highest"] for s in spreads], color=colour, alpha=0.2,
        linewidth=0,
    )  # fmt: skip


# ----------------------------------------------------------------------------------- time and memory


def _context(value: dict[str, Any]) -> Any:
    """TTFT, TPOT and KV bytes by context: predicted above, measured here below."""
    rows = derive.timed(value["cells"])
    first = rows[0]["figures"]
    kinds = [("predicted", f"{first['device']}, predicted")]
    if any(row["figures"]["measured"] for row in rows):
        kinds.append(("measured", "here, measured"))
    panels = [
        ("ttft_s", "TTFT, ms", 1e3),
        ("tpot_s", "TPOT, ms", 1e3),
        ("kv_bytes", "KV of a sequence, MB", 1e-6),
    ]
    figure, axes = _figure(len(kinds), 3, 13.0, 3.6 * len(kinds) + 0.6, f"{value['name']}: by context")
    colours = _by_name([row["model"] for row in rows])
    spans = list(dict.fromkeys(row["span"] for row in rows))
    for line, (kind, where) in zip(axes, kinds, strict=True):
        for axis, (key, label, scale) in zip(line, panels, strict=True):
            _plain(axis)
            for row in rows:
                points = [(p["context"], p[key] * scale) for p in row["figures"][kind] if p[key] is not None]
                if points:
                    axis.plot(
                        *zip(*points, strict=True), "-" if row["span"] == spans[0] else "--",
                        marker=MARKERS[spans.index(row["span"]) % len(MARKERS)], ms=4,
                        color=colours[row["model"]],
                    )  # fmt: skip
            axis.set(xlabel="tokens of context", ylabel=label, title=where, ylim=(0, None))
            _logarithmic(axis)
    handles = [_dot(colour, name or "original") for name, colour in colours.items()]
    handles += [_dot(GREY, f"span {span}", MARKERS[place % 8]) for place, span in enumerate(spans)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


# ------------------------------------------------------------------------------------------- heads


def _similarity(value: dict[str, Any]) -> Any:
    """Cosines between KV heads, a column a layer: keys, and values below them."""
    found = derive.done(value["cells"], "similarity")[0]["figures"]
    layers = len(found["keys"])
    across = min(ACROSS, layers)
    rows = 2 * -(-layers // across)
    title = f"{value['name']}: cosines between the KV heads of each layer (keys, then values)"
    figure, axes = _figure(rows, across, 1.25 * across + 1.0, 1.35 * rows + 0.7, title)
    image = None
    for axis in axes.flat:
        axis.set_axis_off()
    for layer in range(layers):
        block, column = divmod(layer, across)
        for place, kind in enumerate(("keys", "values")):
            axis = axes[2 * block + place][column]
            axis.set_axis_on()
            image = axis.imshow(found[kind][layer], cmap="RdBu_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{kind[0].upper()} {layer}", fontsize="x-small")
    figure.colorbar(image, ax=axes, shrink=0.7)
    return figure
