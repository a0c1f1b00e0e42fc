"""Fill the README's tables from results: `python -m benchmarks.readme [--check]`.

Knows the result files' fields and nothing of how they were measured.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
TINY = ROOT / "punica_jax" / "tiny_llama" / "results.json"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def records(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def source(rows: Sequence[dict[str, Any]]) -> str:
    """Say where records were measured; all of one file must agree."""
    keys = ("device", "jax", "commit", "date")
    (values,) = {tuple(row[key] for key in keys) for row in rows}
    device, version, commit, date = values
    return f"{device}, JAX {version}, commit {commit}, {date}"


def tiny_table() -> str:
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


def decode_table() -> str:
    rows = records("decode_h200.jsonl")
    title = (
        "One decode step of a random model, bfloat16, rank 16 on all seven "
        f"projections, context {rows[0]['context']}; the floor is all bytes read once "
        f"at 4.3 TB/s ({source(rows)}):"
    )
    columns = ["model", "rows", "adapters", "step", "over no adapter", "floor"]
    cells = [
        [
            row["shape"],
            row["rows"],
            f"{row['popularity']} ({row['adapters']})" if row["adapters"] else "none",
            f"{row['step_ms']:.2f} ms",
            f"{100 * (row['step_ms'] / row['backbone_ms'] - 1):+.1f} %",
            f"{row['floor_ms']:.2f} ms",
        ]
        for row in rows
    ]
    return f"{title}\n\n{markdown(columns, cells)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "tiny": tiny_table,
    "measured": decode_table,
}


def filled(text: str) -> str:
    """Return the README with every section made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
        content = make()
        text, count = pattern.subn(lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text)
        assert count == 1, f"README.md must have one section {name!r}, has {count}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    old = README.read_text()
    new = filled(old)
    if args.check:
        sys.exit(0 if new == old else "README.md is stale: python -m benchmarks.readme")
    README.write_text(new)


if __name__ == "__main__":
    main()
