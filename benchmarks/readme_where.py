"""The README's tables of where a step's time goes, kernel by kernel.

Knows the fields of `benchmarks.where`'s records and nothing of how they were measured.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.provenance import Record
from benchmarks.readme_tables import (
    METHODS,
    caption,
    context_of,
    from_second_step,
    load,
    markdown,
    place_of,
)


def where(results: Path) -> str:
    """Where the time of one step goes, and went, by model and rows."""
    sizes: dict[str, dict[str, list[Record]]] = {}
    rows = sorted(load(results, "where"), key=place_of)
    for row in sorted(rows, key=_query_len):
        size = f"{row['shape']}, {row['rows']} rows, context {context_of(row)}"
        if _query_len(row) > 1:
            size = f"{row['shape']}, {row['rows']} chunks of {_query_len(row)} tokens"
            size += f" of prompts of {context_of(row)}"
        case = "no adapter" if row["popularity"] == "none" else row["popularity"]
        if row["method"] not in ("backbone", "ours"):
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
