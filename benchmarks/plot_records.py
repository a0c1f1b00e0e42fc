"""Which records a plot is made of: the last ones, of the device, of one run.

Knows records' fields; nothing of how they are drawn.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.provenance import Record
from benchmarks.readme_tables import counted_alike, is_of_device, is_whole

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


class NothingToDraw(ValueError):
    """A plot's records are not there."""


def choose(records: Records, benchmark: str, **fields: Any) -> list[Record]:
    """Return the last record of each case with these fields, if the device took it.

    Raises:
      NothingToDraw: there is none.
    """
    found = {
        str([record.get(name) for name in CASES[benchmark]]): record
        for record in records
        if record["benchmark"] == benchmark
        and all(record.get(name) == value for name, value in fields.items())
    }
    chosen = [one for one in found.values() if is_of_device(one)]
    if not chosen:
        wanted = ", ".join(f"{name} {value}" for name, value in fields.items())
        raise NothingToDraw(f"no records of {benchmark} {wanted}".strip())
    return chosen


def last_by(records: Records, *names: str) -> dict[Any, Record]:
    """Return the last record for each value of some fields, in order of value."""
    found = {tuple(record[name] for name in names): record for record in records}
    return {key[0] if len(names) == 1 else key: found[key] for key in sorted(found)}


def steps_at_512(records: Records, *methods: str) -> list[Record]:
    """Return the steps to draw beside each other."""
    records = [r for r in records if r["benchmark"] == "decode" and is_whole(r)]
    steps = [
        s for m in methods for s in choose(records, "decode", method=m, context=512)
    ]
    return counted_alike([step for step in steps if step["ranks"] in RANKS])


def runs_of(records: Records, benchmark: str) -> list[list[Record]]:
    """Return a benchmark's records by commit; the one that came last is the last."""
    runs: dict[str, list[Record]] = {}
    for record in (one for one in records if one["benchmark"] == benchmark):
        runs[record["commit"]] = [*runs.pop(record["commit"], []), record]
    return list(runs.values())
