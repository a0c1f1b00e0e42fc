"""Draw what the result files hold: `python -m benchmarks.plots [--results DIR]`.

Reads the files that the README's tables are made of and writes a PNG for each plot
beside them. Where several records say the same, the last one counts. Knows records;
nothing of how they were measured, and no figure of its own.
"""

import argparse
import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from benchmarks.plot_records import (
    NothingToDraw,
    Records,
    choose,
    last_by,
    runs_of,
    steps_at_512,
)
from benchmarks.provenance import RESULTS, Record, load, source
from benchmarks.readme_tables import METHODS, POPULARITIES
from benchmarks.serving_goals import LEAST_OVER_SWAP

_SIZES = ("shape", "rows", "popularity")
MARKS = "osD^vP"
DASHES = ("-", "--", "-.", ":", (0, (1, 3)), (0, (6, 1)))


def panels(
    titles: Sequence[str],
    title: str,
    records: Records,
    size: tuple[float, float] = (6.4, 4.8),
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes in two columns, under one title and every source."""
    columns = min(2, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[len(titles) :]:
        unused.remove()
    sources = source(records).replace("; ", "\n")
    figure.suptitle(f"{title}\n{sources}", fontsize="medium")
    for axis, panel in zip(axes, titles, strict=False):
        axis.set_title(panel, fontsize="medium")
        axis.grid(alpha=0.3)
    return figure, axes[: len(titles)]


def draw_latency(records: Records) -> Figure:
    """Latency of a decode step against rows, a line for each popularity."""
    steps = steps_at_512(records, "backbone", "ours")
    names = sorted({step["shape"] for step in steps})
    figure, axes = panels([f"{name} shape" for name in names], "Decode step", steps)
    for axis, name in zip(axes, names, strict=True):
        shown = [step for step in steps if step["shape"] == name]
        for i, popularity in enumerate(POPULARITIES):
            own = [step for step in shown if step["popularity"] == popularity]
            if any(step["adapters"] for step in own):
                # One row has one adapter, whatever the popularity is called.
                own += [step for step in shown if step["rows"] == step["adapters"] == 1]
            if own:
                line = last_by(own, "rows")
                axis.plot(
                    list(line),
                    [step["step_ms"] for step in line.values()],
                    # The later ones are thinner, so that they hide none below.
                    linewidth=2.7 - 0.4 * i,
                    color=f"C{i}",
                    linestyle=DASHES[i],
                    marker=MARKS[i],
                    markersize=10,
                    fillstyle="none",
                    label=popularity,
                )
        floors = last_by([step for step in shown if not step["adapters"]], "rows")
        lowest = [step["floor_ms"] for step in floors.values()]
        label = "none, all bytes once"
        axis.plot(list(floors), lowest, "k-", marker="_", linewidth=1, label=label)
        highest = max(step["step_ms"] for step in shown)
        axis.set(xlabel="rows", ylabel="ms a step", ylim=(0, 1.1 * highest))
        axis.set_xticks(sorted({step["rows"] for step in shown}))
        axis.legend(loc="lower right")
    return figure


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
    [(family, _)] = collections.Counter(map(family_of, cells)).most_common(1)
    cells = [record for record in cells if family_of(record) == family]
    cells.sort(key=lambda record: (record["rows"], record["bytes"]))
    titles = (f"y += x A B, {family}", "its points: operations, bytes, our time")
    figure, (axis, beside) = panels(
        titles, "Roofline", [ceilings, *cells], size=(6.8, 7.2)
    )
    bandwidth, peak = ceilings["bytes_per_s"], ceilings["flops_per_s"]
    ridge = peak / bandwidth
    at = [(r["flops"] / r["bytes"], r["flops"] / r["ours_us"] * 1e-6) for r in cells]
    left, right = min(x for x, _ in at) / 2, max(ridge, *(x for x, _ in at)) * 2
    axis.plot(
        [left, ridge, right],
        [left * bandwidth / 1e12, peak / 1e12, peak / 1e12],
        "k-",
        label=f"reads {bandwidth / 1e12:.3g} TB/s, product {peak / 1e12:.3g} TFLOP/s",
    )
    popularities = [record["popularity"] for record in cells]
    for name, mark in zip(
        sorted({*popularities}), itertools.cycle(MARKS), strict=False
    ):
        own = [point for p, point in zip(popularities, at, strict=True) if p == name]
        axis.plot(*zip(*own, strict=True), mark, label=spread_of(name))
    axis.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    axis.legend(fontsize="small", loc="lower right")
    number(figure, axis, at)
    beside.axis("off")
    for i, record in enumerate(cells):
        rows = f"{record['rows']:4} {'row' if record['rows'] == 1 else 'rows'}, "
        rows = f"{rows + spread_of(record['popularity']):<23}"
        work = f"{record['flops'] / 1e6:6.4g} MFLOP  {record['bytes'] / 1e6:6.4g} MB"
        place = 0.0, 1 - (i + 0.5) / len(cells)
        text = f"{i + 1:2}  {rows}{work}  {record['ours_us']:5.1f} us"
        beside.text(*place, text, family="monospace", size=9, va="center")
    return figure


def spread_of(popularity: str) -> str:
    return popularity.replace("seg", "segments: ")


def number(figure: Figure, axis: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Number points from 1; those that would overlap share a place."""
    figure.draw_without_rendering()  # lays out: places are known from here
    style = {"textcoords": "offset points", "va": "center", "size": 9}
    numbers = [
        axis.annotate(str(i), point, (7, 0), **style)
        for i, point in enumerate(points, 1)
    ]

    def box(one: Annotation) -> Bbox:
        extents = one.get_window_extent()
        mark = axis.transData.transform(one.xy)
        return Bbox.union([extents, Bbox([mark - 6, mark + 6])])

    def overlapping() -> Iterator[tuple[Annotation, Annotation]]:
        for one, other in itertools.combinations(numbers, 2):
            if box(one).overlaps(box(other)):
                # The one to the right has more room.
                yield (one, other) if one.xy > other.xy else (other, one)

    while pair := next(overlapping(), None):
        kept, other = pair
        shared = f"{kept.get_text()}, {other.get_text()}".split(", ")
        kept.set_text(", ".join(sorted(shared, key=int)))
        numbers.remove(other)
        other.remove()


def draw_adapters(records: Records) -> Figure:
    """Overhead against the number of adapters, of the step and of one product."""
    points: list[Record] = []
    with contextlib.suppress(NothingToDraw):
        for step in choose(records, "adapters_step"):
            if step["adapters"]:
                over = 100 * (step["step_ms"] / step["backbone_ms"] - 1)
                point = {"method": "ours", "height": over, "unit": "% over no adapter"}
                panel = f"decode step, {step['shape']}, {step['rows']} rows"
                points.append(step | point | {"panel": panel, "of": "loaded"})
    with contextlib.suppress(NothingToDraw):
        for product in choose(records, "adapters_op"):
            point = {"height": product["us"], "unit": "us a product", "of": "in use"}
            points.append(
                product | point | {"panel": f"one product, {size_of(product)}"}
            )
    if not points:
        raise NothingToDraw("no records of adapters_step, nor of adapters_op")
    names = list(dict.fromkeys(point["panel"] for point in points))
    figure, axes = panels(names, "Overhead by adapters", points)
    for axis, name in zip(axes, names, strict=True):
        own = [point for point in points if point["panel"] == name]
        for method, mark in zip(METHODS, itertools.cycle(MARKS), strict=False):
            line = last_by([p for p in own if p["method"] == method], "adapters")
            if line:
                heights = [point["height"] for point in line.values()]
                axis.plot(list(line), heights, marker=mark, label=plain(method))
        axis.set(xscale="log", xlabel=f"adapters {own[0]['of']}", ylabel=own[0]["unit"])
        axis.set_ylim(0, 1.1 * max(point["height"] for point in own))
        axis.legend(loc="lower right")
    return figure


def size_of(product: Record) -> str:
    return f"{product['rows']} rows, {product['width']} wide"


def draw_order(records: Records) -> Figure:
    """The straw man: AABCCC against any other order, segments against rows."""
    cells = choose(records, "order")
    cells.sort(key=lambda cell: POPULARITIES.index(cell["popularity"]))
    found: dict[str, list[Record]] = {}
    for cell in cells:
        found.setdefault(f"{cell['popularity']}, {size_of(cell)}", []).append(cell)
    figure, axes = panels(list(found), "Order of a batch's rows", cells)
    orders = ("sorted", "shuffled", "interleaved")
    for axis, own in zip(axes, found.values(), strict=True):
        methods = [name for name in METHODS if any(r["method"] == name for r in own)]
        for i, method in enumerate(methods):
            by_order = last_by([r for r in own if r["method"] == method], "order")
            shown = [order for order in orders if order in by_order]
            at = [orders.index(o) + (i - len(methods) / 2 + 0.5) * 0.25 for o in shown]
            heights = [by_order[order]["us"] for order in shown]
            axis.bar(at, heights, 0.25, label=plain(method))
        axis.set_xticks(range(len(orders)), ["AABCCC (sorted)", "shuffled", "ABCABC"])
        axis.set(ylabel="us a product")
        axis.margins(y=0.2)
        axis.legend(fontsize="small", loc="upper right", ncols=3)
    return figure


def plain(method: str) -> str:
    """Return a method's name outside of Markdown."""
    return METHODS[method].replace("`", "")


def draw_throughput(records: Records) -> Figure:
    """Tokens a second, in one run, of a mixed batch and of a batch for each adapter."""
    methods = ("ours", "group_swap")
    mixed: dict[Any, Record] = {}
    swap: dict[Any, Record] = {}
    for run in runs_of(records, "decode"):
        with contextlib.suppress(NothingToDraw):
            steps = steps_at_512(run, *methods)
            ours, theirs = (
                last_by([s for s in steps if s["method"] == m], *_SIZES)
                for m in methods
            )
            both = ours.keys() & theirs.keys()
            mixed |= {case: ours[case] for case in both}
            swap |= {case: theirs[case] for case in both}
    both = mixed.keys()
    if not both:
        raise NothingToDraw("no run of decode has records of ours and of group_swap")
    sizes = sorted({(shape, rows) for shape, rows, _ in both})
    title = "Throughput of one mixed batch, and over that of a batch for each adapter\n"
    title += f"(Punica's paper: {LEAST_OVER_SWAP:g}x, 32 rows with an adapter each)"
    every = [found[case] for found in (mixed, swap) for case in both]
    figure, axes = panels(
        [f"{shape}, {rows} rows" for shape, rows in sizes], title, every
    )
    for axis, size in zip(axes, sizes, strict=True):
        shown = [name for name in POPULARITIES if (*size, name) in both]
        for side, method, found in ((-0.2, "mixed", mixed), (0.2, "group_swap", swap)):
            heights = [found[(*size, name)]["tokens_per_s"] for name in shown]
            at = [place + side for place in range(len(shown))]
            axis.bar_label(axis.bar(at, heights, 0.4, label=plain(method)), fmt="%.0f")
        for place, name in enumerate(shown):
            ours, theirs = (f[(*size, name)]["tokens_per_s"] for f in (mixed, swap))
            text, top = f"{ours / theirs:.3g}x", (place, max(ours, theirs))
            axis.annotate(text, top, (0, 18), textcoords="offset points", ha="center")
        axis.set_xticks(range(len(shown)), shown)
        axis.set(ylabel="tokens/s", xlim=(-0.7, len(shown) - 0.3))
        axis.margins(y=0.35)
        axis.legend(loc="upper right", ncols=2)
    return figure


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
