"""The README's tables of decode steps and their parts; figures of others beside them.

Knows the result files' fields and nothing of how they were measured.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import decode_goals, peers, readme_kernels
from benchmarks.provenance import RESULTS, ROOT, Record
from benchmarks.readme_tables import (
    FLOOR,
    METHODS,
    POPULARITIES,
    by_record,
    caption,
    counted_alike,
    from_second_step,
    host_note,
    is_of_device,
    last_of,
    load,
    markdown,
    over_none,
)

RIVALS = ("gather", "ragged_dot", "loop", "group_swap")
OURS = ("backbone", "ours")
PLOTS = {
    "latency": "Decode step against rows, by popularity",
    "throughput": "One mixed batch against a batch for each adapter",
    "adapters": "Overhead against the number of adapters",
    "order": "Order of a batch's rows",
    "roofline": "Roofline of the product",
}


def _place(row: Record) -> tuple[Any, ...]:
    """Sort by model, rows, context, popularity."""
    context = tuple(int(part) for part in str(row["context"]).split(".."))
    popularity = POPULARITIES.index(row["popularity"])
    return row["shape"], row["rows"], context, popularity


def _steps(results: Path) -> list[Record]:
    rows = [row for row in load(results, "decode") if row["ranks"] in ([], [16])]
    # One row has one adapter, whatever the popularity is called.
    rows = [
        row
        for row in rows
        if row["rows"] > 1 or row["popularity"] in ("none", "identical")
    ]
    rows = last_of(rows, "shape", "rows", "context", "popularity", "method")
    return sorted(rows, key=_place)


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
    cases = {_place(row): row for row in steps if row["method"] in OURS}
    rivals = {
        (_place(row), row["method"]): row
        for row in steps
        if row["method"] in RIVALS
        and (own := cases.get(_place(row)))
        and from_second_step(own) == from_second_step(row)
    }
    methods = [name for name in RIVALS if any(name == method for _, method in rivals)]
    columns = ["model", "rows", "context", "adapters", "floor", "step", "over floor"]
    columns += ["over no adapter", "allowed", *(METHODS[method] for method in methods)]
    lines = []
    for case, row in cases.items():
        cells = [
            row["shape"],
            row["rows"],
            _context(row),
            _adapters(row),
            f"{row['floor_ms']:.2f}",
            f"{row['step_ms']:.2f}",
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
        f"{min(more):g} to {max(more):g} ms"
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


def _context(row: Record) -> str:
    return str(row["context"]).replace("..", " to ")


def ranks(results: Path) -> str:
    """Batches of mixed ranks against batches of the least of them."""
    rows = [row for row in load(results, "decode") if "rank_allowed_ms" in row]
    rows = last_of(rows, "shape", "rows", "context", "popularity", "ranks")
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
                _context(row),
                _adapters(row),
                ", ".join(map(str, row["ranks"])),
                f"{row['least_rank_ms']:.2f}",
                f"{row['step_ms']:.2f}",
                _allowed(row, "rank_"),
            ],
        )
        for row in sorted(rows, key=_place)
    ]
    return by_record(title, columns, lines)


def engines(results: Path) -> str:
    """Other engines' quoted steps, ours beside them."""
    title = (
        "Other engines, milliseconds a decode step, vLLM's and ours the mean over "
        f"contexts {peers.SPAN.replace('..', ' to ')}"
    )
    steps = [
        row
        for row in counted_alike(_steps(results))
        if row["context"] == peers.SPAN and row["method"] in OURS
    ]
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
            own = [same.get(name) for name in ("none", "identical", "distinct")]
            named = [f"**{ms:.2f}**" if ms else "" for ms in own]
            cells.append([shape, rows, "**punica-jax**", *named])
        for row in quoted:
            if (row["shape"], row["rows"]) == (shape, rows):
                figures = [row[f"{n}_ms"] for n in ("none", "identical", "distinct")]
                named = ["" if ms is None else f"{ms:g}" for ms in figures]
                cells.append([shape, rows, row["engine"], *named])
    columns = ["model", "rows", "engine", "no adapter", "identical", "distinct"]
    others = f"others: {peers.source(peers.END_TO_END)}"
    return f"{caption(title, shown, others)}\n\n{markdown(columns, cells)}"


def where(results: Path) -> str:
    """Where the time of one step goes, and went, by model and rows."""
    sizes: dict[str, dict[str, list[Record]]] = {}
    rows = sorted(load(results, "where"), key=_place)
    for row in sorted(rows, key=_query_len):
        size = f"{row['shape']}, {row['rows']} rows, context {_context(row)}"
        if _query_len(row) > 1:
            size = f"{row['shape']}, {row['rows']} chunks of {_query_len(row)} tokens"
            size += f" of prompts of {_context(row)}"
        case = "no adapter" if row["popularity"] == "none" else row["popularity"]
        if row["method"] in RIVALS:
            case = f"{case}, {METHODS[row['method']]}"
        sizes.setdefault(size, {}).setdefault(case, []).append(row)
    if not sizes:
        return ""
    shown: list[Record] = []
    parts = []
    for size, cases in sizes.items():
        profiles = {case: _now_and_before(rows) for case, rows in cases.items()}
        shown += [
            r for found in profiles.values() for one in found for r in one.values()
        ]
        parts.append(f"{size}:\n\n{_profiled(profiles)}")
    title = (
        "Where the time goes, microseconds of one step by the profiler, in "
        "brackets at the first commit that was profiled; kernels that run beside each "
        "other count in full, gaps are when nothing ran"
    )
    return "\n\n".join([caption(title, shown), *parts])


def _query_len(row: Record) -> int:
    return row.get("query_len", 1)  # older records are of decode steps


def _now_and_before(rows: Sequence[Record]) -> list[dict[str, Record]]:
    """Return the last commit's groups and, if there are others, the first one's."""
    commits: dict[str, dict[str, Record]] = {}
    for row in rows:
        commits.setdefault(row["commit"], {})[row["group"]] = row
    now = commits.pop(rows[-1]["commit"])
    return [now, *list(commits.values())[:1]]


def _profiled(cases: Mapping[str, Sequence[Mapping[str, Record]]]) -> str:
    """Return a table with a column for each case, the longest groups first."""
    longest: dict[str, float] = {}
    for profile in itertools.chain(*cases.values()):
        for group, row in profile.items():
            longest[group] = max(row["us"], longest.get(group, 0.0))

    def bracketed(of: Callable[[Mapping[str, Record]], str]) -> list[str]:
        pairs = [[of(profile) for profile in found] for found in cases.values()]
        return [
            f"{now} ({before[0]})" if before and before[0] else now
            for now, *before in pairs
        ]

    def time_of(group: str) -> Callable[[Mapping[str, Record]], str]:
        def time(profile: Mapping[str, Record]) -> str:
            record = profile.get(group)
            if record is None or (group == "gaps" and not from_second_step(record)):
                return ""
            return f"{record['us']:.0f}"

        return time

    def step_of(profile: Mapping[str, Record]) -> str:
        record = next(iter(profile.values()))
        return f"{record['step_us']:.0f}" if from_second_step(record) else ""

    commits = bracketed(lambda profile: next(iter(profile.values()))["commit"])
    columns = ["kernels", *map(", ".join, zip(cases, commits, strict=True))]
    shown = [group for group, us in longest.items() if us]
    shown.sort(key=lambda group: (group == "gaps", -longest[group]))
    cells = [[group, *bracketed(time_of(group))] for group in shown]
    return markdown(columns, [*cells, ["step", *bracketed(step_of)]])


def around(results: Path) -> str:
    """What the host does before a step and the device after it, and their goals."""
    launches = last_of(load(results, "dispatch"), "layers", "rows")
    draws = last_of(load(results, "sampling"), "rows", "case", "vocab")
    steps = load(results, "decode")
    lines: list[tuple[Record, list[Any]]] = []
    for row in launches:
        what = f"host's launch of a step, {row['layers']} layers"
        judged = _judged(decode_goals.judge_launch(row))
        us = f"{1e3 * row['launch_ms']:.0f}"
        lines.append((row, [what, row["rows"], us, *judged]))
    for row in draws:
        what = f"{row['case']}, vocabulary of {row['vocab']}"
        judged = _judged(decode_goals.judge_sampling(row, steps))
        us = f"{row['us']:.0f}{host_note(row)}"
        lines.append((row, [what, row["rows"], us, *judged]))
    title = (
        "Around a step: its launch by the host, and choosing its tokens, as a share of "
        "the 7B step of as many rows without adapters, with an output head for that "
        "vocabulary"
    )
    columns = ["what", "rows", "us", "of a step", "goal"]
    return by_record(title, columns, lines)


def _judged(row: Record) -> list[str]:
    share = f"{100 * row['share']:.1f} %" if "share" in row else ""
    goal = ""
    if "met" in row:
        goal = f"{row['goal']}: {'met' if row['met'] else 'missed'}"
    return [share, goal]


def goals(results: Path) -> str:
    """What decode is to reach, and whether it does."""
    products = last_of(load(results, "sgmv"), "cell")
    judged = [row for row in products if {"ours_us", "ours_error"} & row.keys()]
    found = decode_goals.goals(_steps(results), judged)
    if not found:
        return ""
    shown = [record for goal in found for record in goal.records]
    cells = [
        [
            goal.what,
            goal.wanted,
            goal.measured,
            "yes" if goal.met else "no",
            ", ".join(sorted({record["commit"] for record in goal.records})),
        ]
        for goal in found
    ]
    columns = ["goal", "wanted", "measured", "met", "commit"]
    title = (
        f"Goals of decode; a step's floor is {FLOOR}, and a rival's time for a product "
        "does not count where it is the host's, or of calls that did not wait for one "
        "another"
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
        where,
        plots,
    ]
    return "\n\n".join(text for part in parts if (text := part(results)))
