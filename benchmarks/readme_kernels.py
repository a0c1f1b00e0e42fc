"""The README's tables of products, attention, and what a product depends on.

Knows the result files' fields and nothing of how they were measured.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.attention import PEAK_FLOPS_PER_S
from benchmarks.decode_goals import deciding_us
from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.provenance import Record
from benchmarks.readme_tables import (
    FLOOR,
    METHODS,
    POPULARITIES,
    by_record,
    caption,
    host_note,
    last_of,
    load,
    markdown,
    over_none,
)
from punica_jax.pallas_kernels import MAX_PROJECT_ROWS

_ADAPTERS_FLOOR = (
    "in brackets over the floor, which is A and B of the adapters in the batch, read "
    f"once at {PEAK_BYTES_PER_S / 1e12:g} TB/s"
)


def products(results: Path) -> str:
    """The product alone against others' kernels and against JAX's own means."""
    rows = last_of(load(results, "sgmv"), "cell")
    rows = [row for row in rows if "ours_us" in row and row.get("peer_us")]
    if not rows:
        return ""
    title = (
        "One product `y += x A B`, our time over theirs: geometric mean, and in how "
        "many cells ours is faster; rivals' times left out that are of calls that did "
        "not wait for one another, or the host's, unless they are shorter than ours: "
        "the device's is no longer"
    )
    others = f"peers: {peers.source(peers.KERNELS)}"
    rivals = {"peer": "best existing kernel"}
    rivals |= {name: METHODS[name] for name in ("gather", "ragged_dot", "loop")}
    suites = dict.fromkeys(row["suite"] for row in rows)
    lines = {name: [row for row in rows if row["suite"] == name] for name in suites}
    cells = [
        [name, *(_ratios(suite, "ours", rival) for rival in rivals)]
        for name, suite in {**lines, "all": rows}.items()
    ]
    of_steps = [row for row in rows if "ours_rows_us" in row]
    if of_steps:
        ratios = (_ratios(of_steps, "ours_rows", rival) for rival in rivals)
        cells.append([f"as in a step of up to {MAX_PROJECT_ROWS} rows", *ratios])
    columns = ["suite", *rivals.values()]
    known = [any(column) for column in zip(*cells, strict=True)]
    lines = (list(itertools.compress(line, known)) for line in (columns, *cells))
    return f"{caption(title, rows, others)}\n\n{markdown(next(lines), lines)}"


def _ratios(rows: Iterable[Record], ours: str, rival: str) -> str:
    ratios = [
        row[f"{ours}_us"] / theirs
        for row in rows
        if (theirs := deciding_us(row, rival, ours))
    ]
    won = sum(ratio < 1 for ratio in ratios)
    if not ratios:
        return ""
    return f"{statistics.geometric_mean(ratios):.2f} ({won} of {len(ratios)})"


def loaded(results: Path) -> str:
    """What it costs a step that more adapters are loaded."""
    rows = last_of(load(results, "adapters_step"), "shape", "rows", "adapters")
    lines = [
        (
            row,
            [
                row["shape"],
                row["rows"],
                row["adapters"],
                row["in_batch"],
                f"{row['floor_ms']:.2f}",
                f"{row['step_ms']:.2f}",
                f"{row['step_ms'] / row['floor_ms']:.2f}",
                over_none(row),
            ],
        )
        for row in sorted(rows, key=lambda r: (r["shape"], r["rows"], r["adapters"]))
    ]
    title = (
        "One decode step by adapters loaded, of which each step's rows use others, "
        f"milliseconds; the floor is {FLOOR}"
    )
    columns = ["model", "rows", "loaded", "in the batch", "floor", "step"]
    columns += ["over floor", "over no adapter"]
    return by_record(title, columns, lines)


def adapters(results: Path) -> str:
    """One product by how many adapters its rows have."""
    title = f"One product by its rows' adapters, microseconds, {_ADAPTERS_FLOOR}"
    keys = ("width", "rows", "adapters")
    rows = load(results, "adapters_op")
    rows.sort(key=lambda row: [row[key] for key in keys])
    return _by_method(title, keys, rows)


def order(results: Path) -> str:
    """One product by the order of a batch's rows."""
    title = f"One product by the order of its rows, microseconds, {_ADAPTERS_FLOOR}"
    rows = load(results, "order")
    rows.sort(
        key=lambda r: (r["width"], r["rows"], POPULARITIES.index(r["popularity"]))
    )
    return _by_method(title, ("width", "rows", "popularity", "order"), rows)


def _by_method(title: str, keys: tuple[str, ...], rows: list[Record]) -> str:
    """Return a table with a line for each case and a column for each method."""
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in keys), {})[row["method"]] = row
    methods = [name for name in METHODS if any(name in case for case in cases.values())]
    lines = []
    for case, found in cases.items():
        first = next(iter(found.values()))
        times = [_us(found[name]) if name in found else "" for name in methods]
        lines.append((first, [*case, f"{first['floor_us']:.1f}", *times]))
    columns = [*keys, "floor", *(METHODS[name] for name in methods)]
    also = (row for found in cases.values() for row in found.values())
    return by_record(title, columns, lines, also=also)


def _us(row: Record) -> str:
    over = f"{row['us'] / row['floor_us']:.1f}"
    return f"{row['us']:.1f} ({over}){host_note(row)}"


def attention(results: Path) -> str:
    """Paged attention of one layer."""
    rows = last_of(load(results, "attention"), "case")
    lines = [
        (
            row,
            [
                row["case"].split("-")[0].upper(),
                row["seqs"],
                row["query_len"],
                _contexts(row),
                f"{row['floor_us']:.1f}",
                f"{row['us']:.1f}",
                f"{row['us'] / row['floor_us']:.2f}",
            ],
        )
        for row in rows
    ]
    columns = ["model", "sequences", "rows of each", "context", "floor", "kernels"]
    title = (
        "Attention of one layer, microseconds by the profiler; the floor is "
        f"{FLOOR}, or all operations at {PEAK_FLOPS_PER_S / 1e12:g} TFLOP/s where that "
        "is longer"
    )
    return by_record(title, [*columns, "over floor"], lines)


def _contexts(row: Record) -> str:
    if row.get("prompt_len"):
        return f"{row['kv_len']}, and a prompt of {row['prompt_len']}"
    if not row.get("num_long"):
        return f"{row['kv_len']}"
    return f"{row['num_long']} of {row['long_len']}, else {row['kv_len']}"


def ceilings(results: Path) -> str:
    """What the device reaches."""
    lines = [
        (
            row,
            [
                f"{row['read_mb']} MB",
                f"{row['bytes_per_s'] / 1e12:.2f}",
                f"{row['width']} x {row['width']}",
                f"{row['flops_per_s'] / 1e12:.0f}",
            ],
        )
        for row in last_of(load(results, "ceilings"))
    ]
    columns = ["sums of", "TB/s read", "product of", "TFLOP/s"]
    title = f"What the device reaches; floors are {FLOOR} all the same"
    return by_record(title, columns, lines)


PARTS: tuple[Callable[[Path], str], ...] = (
    products,
    loaded,
    adapters,
    order,
    attention,
    ceilings,
)
