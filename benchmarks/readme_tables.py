"""How the README's tables are written, and the tiny model's.

Knows where records are and what they say of themselves; nothing of what was measured.
A table whose records are not there yet is left out; figures are never typed.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.device_time import PEAK_BYTES_PER_S, is_host_bound
from benchmarks.provenance import ROOT, Record, source
from punica_jax.pallas_kernels import shapes

TINY = ROOT / "punica_jax" / "tiny_llama" / "results.json"
FLOOR = f"all bytes read once at {PEAK_BYTES_PER_S / 1e12:g} TB/s"
# None, then by how many adapters 32 rows have.
POPULARITIES = (
    "none",
    *sorted(shapes.POPULARITIES, key=lambda p: len(shapes.segment_sizes(p, 32))),
)
METHODS = {
    "backbone": "backbone alone",
    "ours": "punica-jax",
    "mixed": "one mixed batch",
    "segments": "punica-jax (segments)",
    "per_row": "a segment for every row",
    "gather": "XLA gather",
    "ragged_dot": "`ragged_dot`",
    "loop": "loop over adapters",
    "group_swap": "group and swap",
}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def caption(title: str, records: Iterable[Record], quoted: str = "") -> str:
    """Return a table's title, and who measured what is in it."""
    parts = [text for text in (source(records), quoted) if text]
    return f"{title} ({'; '.join(parts)}):"


def by_record(
    title: str,
    columns: Sequence[str],
    lines: Sequence[tuple[Record, list[Any]]],
    *,
    also: Iterable[Record] = (),
    quoted: str = "",
) -> str:
    """Return a table with a caption, a record a line; nothing where there are none.

    Args:
      title: see `caption`; and so `quoted`.
      columns: their names; `commit` is one more if the lines' differ.
      lines: each record with its cells.
      also: other records that cells are of.
    """
    if not lines:
        return ""
    records = [record for record, _ in lines]
    table = [cells for _, cells in lines]
    if len({record["commit"] for record in records}) > 1:
        columns = [*columns, "commit"]
        table = [[*cells, record["commit"]] for record, cells in lines]
    return f"{caption(title, [*records, *also], quoted)}\n\n{markdown(columns, table)}"


def load(results: Path, benchmark: str) -> list[Record]:
    """Return the records of one benchmark."""
    return [row for row in provenance.load(results) if row["benchmark"] == benchmark]


def last_of(rows: Iterable[Record], *keys: str) -> list[Record]:
    """Return the last record of each case, in the order of the first."""
    return list({str([row[key] for key in keys]): row for row in rows}.values())


def commits_of(records: Iterable[Record]) -> str:
    """Return the commits that some records are of."""
    return ", ".join(sorted({record["commit"] for record in records}))


def is_whole(step: Record) -> bool:
    """Tell whether a step is of all layers of its model, and no try-out of a few."""
    num_layers = shapes.MODEL_SHAPES[step["shape"]].num_layers
    return step.get("layers", num_layers) == num_layers


def is_of_device(record: Record) -> bool:
    """Tell whether a record's time, or ours in it, is not that of the host."""
    times = (("us", "launch_us"), ("ours_us", "ours_launch_us"))
    times += (("step_ms", "launch_ms"),)
    return not any(
        is_host_bound(record[time], record.get(launch, 0.0))
        for time, launch in times
        if time in record
    )


def host_note(record: Record) -> str:
    """Return what stands behind a time that is the host's."""
    return "" if is_of_device(record) else " (the host)"


def from_second_step(record: Record) -> bool:
    """Tell whether a step's time is without the launch of the first one of a run.

    The device waits for that one only: older records count it to all steps.
    """
    return record.get("from_second_step", False)


def counted_alike(steps: Sequence[Record]) -> list[Record]:
    """Leave out steps that count a first launch beside others that do not.

    Others are of the same model, rows and context.
    """

    def beside(step: Record) -> tuple[Any, ...]:
        return step["shape"], step["rows"], step["context"]

    newer = {beside(step) for step in steps if from_second_step(step)}
    return [s for s in steps if from_second_step(s) or beside(s) not in newer]


def place_of(row: Record) -> tuple[Any, ...]:
    """Return what steps are sorted by: model, rows, context, popularity."""
    context = tuple(int(part) for part in str(row["context"]).split(".."))
    popularity = POPULARITIES.index(row["popularity"])
    return row["shape"], row["rows"], context, popularity


def context_of(row: Record) -> str:
    return str(row["context"]).replace("..", " to ")


def over_none(step: Record) -> str:
    """Return how much longer a step takes than without adapters; nothing if it is."""
    if not step["adapters"]:
        return ""
    return f"{100 * (step['step_ms'] / step['backbone_ms'] - 1):+.1f} %"


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
