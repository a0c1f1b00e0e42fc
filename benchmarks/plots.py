"""Draw what the result files hold: `python -m benchmarks.plots [--results DIR]`.

Reads the files that the README's tables are made of and writes a PNG for each plot
beside them. Where several records say the same, the last one counts. Knows records;
nothing of how they were measured, and no figure of its own.
"""

import argparse
import collections
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.provenance import RESULTS, Record, load, source
from benchmarks.readme_tables import POPULARITIES

Records = Sequence[Record]

# What tells one case of a benchmark from another.
CASES = {
    "decode": ("shape", "rows", "context", "popularity", "method", "ranks"),
    "sgmv": ("cell",),
    "ceilings": (),
    "adapters_step": ("shape", "rows", "adapters"),
    "adapters_op": ("width", "rows", "adapters", "method"),
    "order": ("width", "rows", "popularity", "order", "method"),
}
# Decode steps of other ranks are another matter.
RANKS = ([], [16])
METHOD_NAMES = {
    "ours": "punica-jax",
    "segments": "punica-jax (segments)",
    "per_row": "a segment for every row",
    "gather": "XLA gather",
    "ragged_dot": "ragged_dot",
    "loop": "loop over adapters",
    "group_swap": "group by adapter and swap",
    "backbone": "backbone alone",
}


class NothingToDraw(ValueError):
    """A plot's records are not there."""


def choose(records: Records, benchmark: str, **fields: Any) -> list[Record]:
    """Return the last record of each case that has these fields.

    Raises:
      NothingToDraw: there is none.
    """
    found = {
        str([record.get(name) for name in CASES[benchmark]]): record
        for record in records
        if record["benchmark"] == benchmark
        and all(record.get(name) == value for name, value in fields.items())
    }
    if not found:
        wanted = ", ".join(f"{name} {value}" for name, value in fields.items())
        raise NothingToDraw(f"no records of {benchmark} {wanted}".strip())
    return list(found.values())


def last_by(records: Records, *names: str) -> dict[Any, Record]:
    """Return the last record for each value of some fields, in order of value."""
    found = {tuple(record[name] for name in names): record for record in records}
    return {key[0] if len(names) == 1 else key: found[key] for key in sorted(found)}


def panels(titles: Sequence[str], title: str, records: Records) -> list[Axes]:
    """Return a figure's axes side by side, under one title and every source."""
    figure = Figure(figsize=(6.4 * len(titles), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    sources = source(records).replace("; ", "\n")
    figure.suptitle(f"{title}\n{sources}", fontsize="medium")
    for axis, panel in zip(axes, titles, strict=True):
        axis.set_title(panel, fontsize="medium")
        axis.grid(alpha=0.3)
    return list(axes)


def figure_of(axes: Sequence[Axes]) -> Figure:
    figure = axes[0].get_figure(root=True)
    assert figure is not None
    return figure


def shapes_of(records: Records) -> list[str]:
    return sorted({record["shape"] for record in records})


def draw_latency(records: Records) -> Figure:
    """Latency of a decode step against rows, a line for each popularity."""
    steps = choose(records, "decode", context=512)
    steps = [r for r in steps if r["method"] in ("ours", "backbone")]
    steps = [r for r in steps if r["ranks"] in RANKS]
    names = shapes_of(steps)
    axes = panels([f"{name} shape" for name in names], "Decode step", steps)
    for axis, name in zip(axes, names, strict=True):
        for popularity in POPULARITIES:
            own = [r for r in steps if r["popularity"] == popularity]
            if popularity != "none":
                # One row has one adapter, whatever the popularity is called.
                own += [r for r in steps if r["rows"] == r["adapters"] == 1]
            own = last_by([r for r in own if r["shape"] == name], "rows")
            if own:
                line = [record["step_ms"] for record in own.values()]
                axis.plot(list(own), line, marker="o", label=popularity)
        floors: dict[int, float] = {}
        for record in (r for r in steps if r["shape"] == name):
            most = max(record["floor_ms"], floors.get(record["rows"], 0.0))
            floors[record["rows"]] = most
        floors = dict(sorted(floors.items()))
        label = "all bytes once, most adapters"
        axis.plot(list(floors), list(floors.values()), "k--", label=label)
        axis.set(xlabel="rows", ylabel="ms a step", ylim=(0, None))
        axis.legend()
    return figure_of(axes)


def family_of(record: Record) -> str:
    d_outs = "+".join(map(str, record["d_outs"]))
    return f"{record['d_in']} -> {d_outs}, rank {record['rank']}"


def draw_roofline(records: Records) -> Figure:
    """Operations a second against operations a byte, under measured ceilings."""
    [ceilings] = choose(records, "ceilings")
    cells = [r for r in choose(records, "sgmv") if "ours_us" in r and "flops" in r]
    if not cells:
        raise NothingToDraw("no records of sgmv with flops")
    # The most measured product, so that points differ by rows and adapters alone.
    families = collections.Counter(family_of(record) for record in cells)
    family = families.most_common(1)[0][0]
    cells = [record for record in cells if family_of(record) == family]
    [axis] = panels([f"y += x A B, {family}"], "Roofline", [ceilings, *cells])
    bandwidth, peak = ceilings["bytes_per_s"], ceilings["flops_per_s"]
    ridge = peak / bandwidth
    reach = [r["flops"] / r["bytes"] for r in cells]
    left, right = min(reach) / 2, max([*reach, ridge]) * 2
    axis.plot(
        [left, ridge, right],
        [left * bandwidth / 1e12, peak / 1e12, peak / 1e12],
        "k-",
        label=f"copy {bandwidth / 1e12:.3g} TB/s, product {peak / 1e12:.3g} TFLOP/s",
    )
    marks = {"distinct": "o", "uniform": "s", "skewed": "^", "identical": "D"}
    for popularity in sorted({record["popularity"] for record in cells}):
        own = [record for record in cells if record["popularity"] == popularity]
        intensity = [record["flops"] / record["bytes"] for record in own]
        reached = [record["flops"] / record["ours_us"] * 1e-6 for record in own]
        axis.plot(intensity, reached, marks.get(popularity, "v"), label=popularity)
        for record, at in zip(own, zip(intensity, reached, strict=True), strict=True):
            work = f"{record['flops'] / 1e6:.3g} MFLOP, {record['bytes'] / 1e6:.3g} MB"
            axis.annotate(
                f"{record['rows']} {popularity}: {work}",
                at,
                xytext=(6, -3),
                textcoords="offset points",
                fontsize=6,
            )
    axis.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    axis.legend(fontsize="small", loc="upper left")
    return figure_of([axis])


def draw_adapters(records: Records) -> Figure:
    """Overhead against the number of adapters, of the step and of one product."""
    what = {"adapters_step": "decode step", "adapters_op": "one product"}
    found: dict[str, list[Record]] = {}
    for name in what:
        with contextlib.suppress(NothingToDraw):
            found[name] = choose(records, name)
    if not found:
        raise NothingToDraw(f"no records of {', nor of '.join(what)}")
    titles = [f"{what[name]}, {own[-1]['rows']} rows" for name, own in found.items()]
    every = [record for own in found.values() for record in own]
    axes = panels(titles, "Overhead by adapters loaded", every)
    for axis, (name, own) in zip(axes, found.items(), strict=True):
        if name == "adapters_step":
            key, label = "shape", "% over no adapter"
        else:
            key, label = "method", "us a product"
        for value in sorted({record[key] for record in own}):
            line = last_by(
                [r for r in own if r[key] == value and r["adapters"]], "adapters"
            )
            heights = [
                100 * (r["step_ms"] / r["backbone_ms"] - 1)
                if "step_ms" in r
                else r["us"]
                for r in line.values()
            ]
            named = METHOD_NAMES.get(value, value)
            axis.plot(list(line), heights, marker="o", label=named)
        axis.set(xscale="log", xlabel="adapters loaded", ylabel=label)
        axis.legend()
    return figure_of(axes)


def draw_order(records: Records) -> Figure:
    """The straw man: AABCCC against any other order, segments against rows."""
    cells = choose(records, "order")
    names = [p for p in POPULARITIES if any(r["popularity"] == p for r in cells)]
    axes = panels(names, f"Order of {cells[-1]['rows']} rows", cells)
    orders = ("sorted", "shuffled", "interleaved")
    for axis, name in zip(axes, names, strict=True):
        own = [r for r in cells if r["popularity"] == name]
        methods = [m for m in METHOD_NAMES if any(r["method"] == m for r in own)]
        for i, method in enumerate(methods):
            by_order = last_by([r for r in own if r["method"] == method], "order")
            shown = [order for order in orders if order in by_order]
            at = [orders.index(o) + (i - len(methods) / 2 + 0.5) * 0.25 for o in shown]
            heights = [by_order[order]["us"] for order in shown]
            axis.bar(at, heights, 0.25, label=METHOD_NAMES[method])
        labels = ["AABCCC (sorted)", "shuffled", "ABCABC"]
        axis.set_xticks(range(len(orders)), labels)
        axis.set(ylabel="us a product")
        axis.legend(fontsize="small")
    return figure_of(axes)


def draw_throughput(records: Records) -> Figure:
    """Tokens a second of one mixed batch, and of a batch for each adapter."""
    steps = [
        record
        for method in ("ours", "group_swap")
        for record in choose(records, "decode", method=method, context=512)
        if record["ranks"] in RANKS
    ]
    keys = sorted({(record["shape"], record["rows"]) for record in steps})
    axes = panels([f"{s}, {n} rows" for s, n in keys], "Throughput", steps)
    names = POPULARITIES[1:]
    for axis, key in zip(axes, keys, strict=True):
        for i, method in enumerate(("ours", "group_swap")):
            own = [
                record
                for record in steps
                if (record["shape"], record["rows"], record["method"]) == (*key, method)
            ]
            found = last_by(own, "popularity")
            shown = [name for name in names if name in found]
            at = [names.index(name) + 0.4 * i - 0.2 for name in shown]
            heights = [found[name]["tokens_per_s"] for name in shown]
            label = "one mixed batch" if method == "ours" else METHOD_NAMES[method]
            bars = axis.bar(at, heights, 0.4, label=label)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_xticks(range(len(names)), names)
        axis.set(ylabel="tokens/s")
        axis.legend(fontsize="small")
    return figure_of(axes)


PLOTS: dict[str, Callable[[Records], Figure]] = {
    "latency": draw_latency,
    "roofline": draw_roofline,
    "adapters": draw_adapters,
    "order": draw_order,
    "throughput": draw_throughput,
}


def draw_all(records: Records, folder: Path) -> list[str]:
    """Write what can be drawn; returns a line for each plot."""
    lines = []
    for name, draw in PLOTS.items():
        path = folder / f"{name}.png"
        try:
            draw(records).savefig(path, dpi=150)
            lines.append(f"{name}: {path}")
        except NothingToDraw as error:
            lines.append(f"{name}: skipped, {error}")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder")
    args = parser.parse_args(words)
    print("\n".join(draw_all(load(args.results), args.results)))


if __name__ == "__main__":
    main()
