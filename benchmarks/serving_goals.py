"""What serving is to reach, and whether it does.

Pure functions of records; knows nothing of how they were measured.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks import peers

Record = dict[str, Any]

# Of the tokens per second of the backbone alone.
LEAST_OF_BACKBONE = {"distinct": 0.88, "identical": 0.96}
LEAST_OVER_SWAP = 12.0
LEAST_BUSY = 0.95
LEAST_ROOFLINE = 0.75
MOST_FIRST_MS = 350.0
# A cold adapter, to the first step that may use it.
MOST_COLD_MS = {"disk": 25.0, "host": 3.0}
MOST_OVER_COPY = 2.0
MOST_OVER_MEDIAN = 1.3


def goals(records: Sequence[Record]) -> list[Record]:
    """Return what the records say of each goal: wanted, measured, met."""
    return [
        {"benchmark": "serving_goal", **goal}
        for part in (_trace, _batch, _cold)
        for goal in part(records)
    ]


def _of(records: Sequence[Record], benchmark: str, **fields: Any) -> list[Record]:
    return [
        record
        for record in records
        if record["benchmark"] == f"serving_{benchmark}"
        and all(record[name] == value for name, value in fields.items())
    ]


def _goal(
    what: str, measured: float | None, *, least: float = 0.0, most: float = 0.0
) -> list[Record]:
    """Return one goal: at least, or at most, so much; none if nothing was measured."""
    if measured is None:
        return []
    met = measured >= least if least else measured <= most
    wanted = f">= {least:g}" if least else f"<= {most:g}"
    return [{"goal": what, "wanted": wanted, "measured": measured, "met": met}]


def _trace(records: Sequence[Record]) -> list[Record]:
    found: list[Record] = []
    # A whole trace ends with seats that nobody takes any more.
    for record in _of(records, "trace", method="mixed", whole=False):
        name = record["popularity"]
        rate = record["tokens_per_s"]
        for method, least in (
            ("backbone", LEAST_OF_BACKBONE.get(name)),
            ("group_swap", LEAST_OVER_SWAP if name == "distinct" else None),
        ):
            rivals = _of(records, "trace", method=method, whole=False)
            rivals = [one for one in rivals if one["popularity"] in (name, "none")]
            if least and rivals:
                what = f"{name}: tokens/s over {method.replace('_', ' ')}"
                found += _goal(what, rate / rivals[-1]["tokens_per_s"], least=least)
        found += _goal(f"{name}: device busy", record["busy"], least=LEAST_BUSY)
        found += _goal(
            f"{name}: of the memory roofline in decode",
            record["roofline"],
            least=LEAST_ROOFLINE,
        )
    return found


def _batch(records: Sequence[Record]) -> list[Record]:
    found: list[Record] = []
    for record in _of(records, "batch", popularity="distinct"):
        if (least := record.get("vllm_none_tokens_per_s")) is None:
            continue
        what = f"{record['rows']} requests, distinct"
        found += _goal(f"{what}: tokens/s", record["tokens_per_s"], least=least)
        found += _goal(
            f"{what}: all first tokens, ms", record["all_first_ms"], most=MOST_FIRST_MS
        )
    return found


def _cold(records: Sequence[Record]) -> list[Record]:
    found: list[Record] = []
    for record in _of(records, "cold"):
        if record["beside"]:
            what = f"loads from {record['tier']}"
            if "collector" in record:
                what += f", collector {record['collector']}"
            found += _goal(
                f"{what}: slowest decode step over the median",
                record["slowest_over_median"],
                most=MOST_OVER_MEDIAN,
            )
        else:
            what = f"cold adapter from {record['tier']}"
            found += _goal(
                f"{what}: ms to its first step",
                record["ms"],
                most=MOST_COLD_MS[record["tier"]],
            )
    for record in _of(records, "copy"):
        found += _goal(
            "adapter to the device, over a plain copy",
            record["stage_ms"] / record["copy_ms"],
            most=MOST_OVER_COPY,
        )
    return found


def vllm(shape: str, rows: int, popularity: str) -> Record:
    """Return what vLLM was measured at on the same batch, as fields of a record."""
    for row in peers.load(peers.WHOLE_RUNS):
        if (row["shape"], row["rows"]) == (shape, rows):
            return {
                "vllm_none_tokens_per_s": row["none_tokens_per_s"],
                "vllm_tokens_per_s": row[f"{popularity}_tokens_per_s"],
                "vllm_all_first_ms": row[f"{popularity}_all_first_ms"],
            }
    return {}
