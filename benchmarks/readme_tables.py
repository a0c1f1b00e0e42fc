"""How the README's tables are written, and the tiny model's.

Knows where records are and what they say of themselves; nothing of what was measured.
A table whose records are not there yet is left out; figures are never typed.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.provenance import ROOT, Record, source

TINY = ROOT / "punica_jax" / "tiny_llama" / "results.json"
FLOOR = f"all bytes read once at {PEAK_BYTES_PER_S / 1e12:g} TB/s"
POPULARITIES = ("none", "identical", "uniform", "skewed", "distinct")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def caption(title: str, records: Iterable[Record], quoted: str = "") -> str:
    """Return a table's title, and who measured what is in it."""
    parts = [text for text in (source(records), quoted) if text]
    return f"{title} ({'; '.join(parts)}):"


def by_record(columns: Sequence[str], lines: Sequence[tuple[Record, list[Any]]]) -> str:
    """Return a table of a record a line, with their commits if they differ."""
    if len({record["commit"] for record, _ in lines}) == 1:
        return markdown(columns, [cells for _, cells in lines])
    cells = [[*cells, record["commit"]] for record, cells in lines]
    return markdown([*columns, "commit"], cells)


def load(results: Path, benchmark: str) -> list[Record]:
    """Return the records of one benchmark."""
    return [row for row in provenance.load(results) if row["benchmark"] == benchmark]


def last_of(rows: Iterable[Record], *keys: str) -> list[Record]:
    """Return the last record of each case, in the order of the first."""
    return list({str([row[key] for key in keys]): row for row in rows}.values())


def tiny() -> str:
    tasks = json.loads(TINY.read_text())["tasks"]
    return markdown(
        ["adapter", "rank", "modules", "with adapter", "base alone"],
        [
            [
                name,
                row["rank"],
                ", ".join(target.removesuffix("_proj") for target in row["targets"]),
                f"{100 * row['held_out']:.1f} %",
                f"{100 * row['base']:.1f} %",
            ]
            for name, row in tasks.items()
        ],
    )
