"""The README's tables of decode steps and their parts; figures of others beside them.

Knows the result files' fields and nothing of how they were measured.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import decode_goals, peers, readme_kernels, readme_where
from benchmarks.provenance import RESULTS, ROOT, Record
from benchmarks.readme_tables import (
    FLOOR,
    METHODS,
    by_record,
    caption,
    commits_of,
    context_of,
    counted_alike,
    from_second_step,
    host_note,
    is_of_device,
    is_whole,
    last_of,
    load,
    markdown,
    over_none,
    place_of,
)

RIVALS = ("gather", "ragged_dot", "loop", "group_swap")
OURS = ("backbone", "ours")
# What others' steps are known of.
_QUOTED = ("none", "identical", "distinct")
PLOTS = {
    "latency": "Decode step against rows, by popularity",
    "throughput": "One mixed batch against a batch for each adapter",
    "adapters": "Overhead against the number of adapters",
    "order": "Order of a batch's rows",
    "roofline": "Roofline of the product",
}


def _steps(results: Path) -> list[Record]:
    rows = [row for row in load(results, "decode") if row["ranks"] in ([], [16])]
    rows = [row for row in rows if is_whole(row)]
    # One row has one adapter, whatever the popularity is called.
    rows = [
        row
        for row in rows
        if row["rows"] > 1 or row["popularity"] in ("none", "identical")
    ]
    rows = last_of(rows, "shape", "rows", "context", "popularity", "method")
    return sorted(rows, key=place_of)


def _adapters(row: Record) -> str:
    return f"{row['popularity']} ({row['adapters']})" if row["adapters"] else "none"


def _allowed(row: Record, prefix: str = "") -> str:
    """Return what a step may take, and whether it does."""
    if f"{prefix}met" not in row:
        return ""
    met = "met" if row[f"{prefix}met"] else "missed"
    return f"{row[f'{prefix}allowed_ms']:.2f}: {met}"


def decode(results: Path) -> str:
    """Our decode steps, and the rivals of the same cases."""
    steps = counted_alike(_steps(results))
    cases = {place_of(row): row for row in steps if row["method"] in OURS}
    rivals = {
        (place_of(row), row["method"]): row
        for row in steps
        if row["method"] in RIVALS
        and (own := cases.get(place_of(row)))
        and from_second_step(own) == from_second_step(row)
    }
    methods = [name for name in RIVALS if any(name == method for _, method in rivals)]
    columns = ["model", "rows", "context", "adapters", "floor", "step", "over floor"]
    columns += ["over no adapter", "allowed", *(METHODS[method] for method in methods)]
    # A step that counts it is longer than the others of a table.
    note = " (first launch counted)" if any(map(from_second_step, steps)) else ""
    lines = []
    for case, row in cases.items():
        cells = [
            row["shape"],
            row["rows"],
            context_of(row),
            _adapters(row),
            f"{row['floor_ms']:.2f}",
            f"{row['step_ms']:.2f}{note if not from_second_step(row) else ''}",
            f"{row['step_ms'] / row['floor_ms']:.2f}",
            over_none(row),
            _allowed(row),
            *(_rival(row, rivals.get((case, method))) for method in methods),
        ]
        lines.append((row, cells))
    more = decode_goals.EXTRA_MS.values()
    title = (
        "One decode step of a random model, bfloat16, rank 16 on all seven "
        f"projections: medians of device time, milliseconds; the floor is {FLOOR}; "
        "`allowed` adds to the step without adapters their bytes and, by rows, "
        f"{min(more):g} to {max(more):g} ms; each is held against the step without "
        "adapters of its own run, which need not be the one shown"
    )
    return by_record(title, columns, lines, also=rivals.values())


def _rival(row: Record, rival: Record | None) -> str:
    """Return a rival's step, and in which way it is not as ours."""
    if rival is None:
        return ""
    notes = []
    if rival["commit"] != row["commit"]:
        notes.append(rival["commit"])
    overlaps = rival.get("overlaps", True)
    if overlaps != row.get("overlaps", True):
        notes.append("launches beside each other" if overlaps else "launches in order")
    if not is_of_device(rival):
        notes.append("the host's time")
    return f"{rival['step_ms']:.2f}" + (f" ({', '.join(notes)})" if notes else "")


def _mixed(results: Path) -> list[Record]:
    """Return the steps of mixed ranks."""
    rows = [row for row in load(results, "decode") if "rank_allowed_ms" in row]
    rows = [row for row in rows if is_whole(row)]
    return last_of(rows, "shape", "rows", "context", "popularity", "ranks")


def ranks(results: Path) -> str:
    """Batches of mixed ranks against batches of the least of them."""
    rows = _mixed(results)
    title = (
        "Ranks mixed in one batch, against the same batch all of the least rank, "
        "milliseconds; `allowed` adds to it "
        f"{100 * (decode_goals.RANK_SLACK - 1):.0f} % and the bytes of the higher ranks"
    )
    columns = ["model", "rows", "context", "adapters", "ranks"]
    columns += ["least rank", "mixed", "allowed"]
    lines = [
        (
            row,
            [
                row["shape"],
                row["rows"],
                context_of(row),
                _adapters(row),
                ", ".join(map(str, row["ranks"])),
                f"{row['least_rank_ms']:.2f}",
                f"{row['step_ms']:.2f}",
                _allowed(row, "rank_"),
            ],
        )
        for row in sorted(rows, key=place_of)
    ]
    return by_record(title, columns, lines)


def engines(results: Path) -> str:
    """Other engines' quoted steps, ours beside them."""
    title = (
        "Other engines, milliseconds a decode step, vLLM's and ours the mean over "
        f"contexts {peers.SPAN.replace('..', ' to ')}; ours of the device, and by the "
        "clock from the first tokens of a whole run to its last, as vLLM's"
    )
    steps = [
        row
        for row in counted_alike(_steps(results))
        if row["context"] == peers.SPAN and row["method"] in OURS
    ]
    by_clock: dict[tuple[str, int], dict[str, Record]] = {}
    for row in load(results, "serving_batch"):
        if "vllm_tokens_per_s" in row:  # the run that vLLM's steps are of
            runs = by_clock.setdefault((row["shape"], row["rows"]), {})
            runs[row["popularity"]] = row
    shown: list[Record] = []
    quoted = peers.load(peers.END_TO_END)
    cells = []
    for shape, rows in sorted({(row["shape"], row["rows"]) for row in quoted}):
        ours = [row for row in steps if (row["shape"], row["rows"]) == (shape, rows)]
        shown += ours
        same = {row["popularity"]: row["step_ms"] for row in ours}
        if rows == 1 and "identical" in same:
            same["distinct"] = same["identical"]
        if same:
            own = [same.get(name) for name in _QUOTED]
            named = [f"**{ms:.2f}**" if ms else "" for ms in own]
            label = "**punica-jax**, a step"
            cells.append([shape, rows, label, *named, commits_of(ours)])
        if clocked := by_clock.get((shape, rows)):
            shown += clocked.values()
            named = [
                f"**{_clocked_ms(clocked[name]):.2f}**" if name in clocked else ""
                for name in _QUOTED
            ]
            label = "**punica-jax**, its engine"
            cells.append([shape, rows, label, *named, commits_of(clocked.values())])
        for row in quoted:
            if (row["shape"], row["rows"]) == (shape, rows):
                figures = [row[f"{name}_ms"] for name in _QUOTED]
                named = ["" if ms is None else f"{ms:g}" for ms in figures]
                cells.append([shape, rows, row["engine"], *named, ""])
    columns = ["model", "rows", "engine", "no adapter", "identical", "distinct"]
    columns += ["commits"]
    others = f"others: {peers.source(peers.END_TO_END)}"
    return f"{caption(title, shown, others)}\n\n{markdown(columns, cells)}"


def _clocked_ms(run: Record) -> float:
    """Return the mean step of a whole run after all of its first tokens."""
    whole_ms = 1e3 * run["rows"] * run["num_new"] / run["tokens_per_s"]
    return (whole_ms - run["all_first_ms"]) / (run["num_new"] - 1)


def around(results: Path) -> str:
    """What the host does before a step and the device after it, and their goals."""
    launches = last_of(load(results, "dispatch"), "layers", "rows")
    draws = last_of(load(results, "sampling"), "rows", "case", "vocab")
    steps = [step for step in load(results, "decode") if is_whole(step)]
    lines: list[tuple[Record, list[Any]]] = []
    shown: list[Record] = []
    for row in launches:
        what = f"host's launch of a step, {row['layers']} layers"
        judged = _judged(decode_goals.judge_launch(row))
        us = f"{1e3 * row['launch_ms']:.0f}"
        lines.append((row, [what, row["rows"], us, *judged]))
    for row in draws:
        what = f"{row['case']}, vocabulary of {row['vocab']}"
        step = decode_goals.step_drawn_from(row, steps)
        shown += [] if step is None else [step]
        judged = _judged(decode_goals.judge_sampling(row, steps))
        us = f"{row['us']:.0f}{host_note(row)}"
        lines.append((row, [what, row["rows"], us, *judged]))
    title = (
        "Around a step: its launch by the host, and choosing its tokens, as a share of "
        "the 7B step of as many rows without adapters, with an output head for that "
        "vocabulary"
    )
    columns = ["what", "rows", "us", "of a step", "goal"]
    return by_record(title, columns, lines, also=shown)


def _judged(row: Record) -> list[str]:
    share = f"{100 * row['share']:.2f} %" if "share" in row else ""
    goal = ""
    if "met" in row:
        goal = f"{row['goal']}: {'met' if row['met'] else 'missed'}"
    return [share, goal]


def goals(results: Path) -> str:
    """What decode is to reach, and whether it does."""
    products = last_of(load(results, "sgmv"), "cell")
    judged = [row for row in products if {"ours_us", "ours_error"} & row.keys()]
    steps = counted_alike(_steps(results))
    found = decode_goals.goals(steps, judged, _mixed(results))
    if not found:
        return ""
    shown = [record for goal in found for record in goal.records]
    cells = [
        [
            goal.what,
            goal.wanted,
            goal.measured,
            "yes" if goal.met else "no",
            commits_of(goal.records),
        ]
        for goal in found
    ]
    columns = ["goal", "wanted", "measured", "met", "commit"]
    title = (
        f"Goals of decode; a step's floor is {FLOOR}, and a rival's time for a product "
        "does not count where it is of calls that did not wait for one another, or "
        "the host's and longer than ours"
    )
    return f"{caption(title, shown)}\n\n{markdown(columns, cells)}"


def plots(results: Path) -> str:
    lines = [
        f"![{title}]({os.path.relpath(results / f'{name}.png', ROOT)})"
        for name, title in PLOTS.items()
        if (results / f"{name}.png").exists()
    ]
    return "\n".join(lines)


def measured(results: Path = RESULTS) -> str:
    """Return the whole section of what was measured."""
    parts: list[Callable[[Path], str]] = [
        goals,
        decode,
        engines,
        ranks,
        *readme_kernels.PARTS,
        around,
        readme_where.where,
        plots,
    ]
    return "\n\n".join(text for part in parts if (text := part(results)))
