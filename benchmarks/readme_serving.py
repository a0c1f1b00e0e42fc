"""The README's tables of serving, and others' quoted figures beside them.

Knows the fields of `benchmarks.serving`'s records and nothing of how they were
measured.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.provenance import RESULTS, Record
from benchmarks.readme_tables import (
    FLOOR,
    METHODS,
    POPULARITIES,
    by_record,
    last_of,
    load,
)
from benchmarks.scheduling import GOAL_MS

# Rows of a step in records that do not say it.
_FIRST_STEP_ROWS = 2048
WHERE = {"all_there": "on the device", "loaded": "on disk"}
QUEUES = {
    "first_come": "first come, first served",
    "latency": "latency targets",
    "fair_share": "fair share",
}
WAITING = {
    "full": "for a seat",
    "tenants": "for a seat, each a tenant of its own",
    "missing": "for an adapter, each another one",
    "shared": "with one beginning, and sit down as rows are left",
}


def _beside(
    ours: float, theirs: float | None, best: Callable[..., float]
) -> tuple[str, str]:
    """Return our figure and another's, the better one bold."""
    better = best(value for value in (ours, theirs) if value is not None)
    own, other = _number(ours), _number(theirs)
    return f"**{own}**" if better == ours else own, (
        f"**{other}**" if other and better == theirs else other
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _window(row: Record) -> str:
    """Return which requests, or steps, a trace's record is of."""
    if row["method"] == "group_swap":
        return f"first {row['steps']} steps"
    return "all" if row["whole"] else "steady"


def trace(results: Path) -> str:
    """The paper's workload: one mixed batch, no adapters at all, one at a time."""
    keys = ("shape", "seats", "whole", "popularity", "method")
    rows = last_of(load(results, "serving_trace"), *keys)

    def place(row: Record) -> tuple[Any, ...]:
        popularity = POPULARITIES.index(row["popularity"])
        return (
            *(row[key] for key in keys[:3]),
            popularity,
            [*METHODS].index(row["method"]),
        )

    columns = ["model", "in flight", "requests", "adapters", "method", "tokens/s"]
    columns += ["decode step", "of the roofline", "busy"]
    lines = [
        (
            row,
            [
                row["shape"],
                row["seats"],
                _window(row),
                row["popularity"],
                METHODS[row["method"]],
                _number(row["tokens_per_s"]),
                _number(row["decode_ms"], 2),
                _percent(row["roofline"]),
                _percent(row["busy"]),
            ],
        )
        for row in sorted(rows, key=place)
    ]
    title = (
        "The paper's text generation by an engine's own thread, in steady state or all "
        "requests from first to last, the baseline in its first steps, where groups "
        "are largest; the decode step in milliseconds, its share of the memory "
        f"roofline ({FLOOR}), and for how much of the time the device was busy at least"
    )
    return by_record(title, columns, lines)


def batch(results: Path) -> str:
    """Requests that come at once, start to end, beside vLLM's."""
    keys = ("shape", "rows", "prompt_len", "num_new", "popularity")
    rows = last_of(load(results, "serving_batch"), *keys)

    def place(row: Record) -> tuple[Any, ...]:
        return *(row[key] for key in keys[:4]), POPULARITIES.index(row["popularity"])

    columns = ["model", "requests", "tokens of each", "rows of a step", "runs"]
    columns += ["adapters", "tokens/s", "vLLM's", "all first tokens, ms", "vLLM's"]
    lines = [
        (
            row,
            [
                row["shape"],
                row["rows"],
                f"{row['prompt_len']} + {row['num_new']}",
                row.get("max_step_rows", _FIRST_STEP_ROWS),
                row.get("runs", 1),
                row["popularity"],
                *_beside(row["tokens_per_s"], row.get("vllm_tokens_per_s"), max),
                *_beside(row["all_first_ms"], row.get("vllm_all_first_ms"), min),
            ],
        )
        for row in sorted(rows, key=place)
    ]
    title = (
        "Requests that come at once, start to end, and until all of them have their "
        "first token; of several runs the one of the middle time"
    )
    quoted = f"vLLM's: {peers.source(peers.WHOLE_RUNS)}"
    return by_record(title, columns, lines, quoted=quoted)


def cold(results: Path) -> str:
    """Adapters that have to be loaded first, alone and beside others."""
    rows = last_of(load(results, "serving_cold"), "shape", "beside", "tier")
    columns = ["model", "adapter from", "beside", "to its first step", "slowest"]
    columns += ["decode step", "slowest over it"]
    lines = [
        (
            row,
            [
                row["shape"],
                row["tier"],
                row["beside"],
                _number(row["ms"], 1),
                _number(row["slowest_load_ms"], 1),
                _number(row.get("median_ms"), 2),
                _slowest(row),
            ],
        )
        for row in sorted(rows, key=lambda row: (row["shape"], row["beside"]))
    ]
    title = (
        "Cold adapters, from disk (their pages cached by the system) and from the "
        "host's memory, alone and beside requests that decode: milliseconds from "
        "asking until a step with one can begin, its copy through, median and slowest; "
        "the others' median decode step, and the slowest during a load over it "
        "(frozen: Python's collector leaves alone what was there before)"
    )
    return by_record(title, columns, lines)


def _slowest(row: Record) -> str:
    number = _number(row.get("slowest_over_median"), 2)
    return f"{number} ({row['collector']})" if number and "collector" in row else number


def copy(results: Path) -> str:
    """An adapter's bytes on their way to the device."""
    rows = last_of(load(results, "serving_copy"), "shape")

    def took(num_bytes: int, ms: float) -> str:
        return f"{ms:.2f} ms, {num_bytes / ms * 1e-6:.1f} GB/s"

    columns = ["model", "adapter", "to the device", "begun in, ms", "plain copy"]
    lines = [
        (
            row,
            [
                row["shape"],
                f"{row['adapter_bytes'] / 1e6:.1f} MB",
                took(row["adapter_bytes"], row["stage_ms"]),
                _number(row.get("begin_ms"), 2),
                took(row["adapter_bytes"], row["copy_ms"]),
            ],
        )
        for row in sorted(rows, key=lambda row: row["shape"])
    ]
    title = (
        "An adapter's copy from host memory to the device, what of it the engine's "
        "thread takes to begin it, and as many bytes copied"
    )
    return by_record(title, columns, lines)


def churn(results: Path) -> str:
    """Many more adapters than slots, against the same where nothing is loaded."""
    keys = ("shape", "adapters", "slots", "law", "method")
    rows = last_of(load(results, "serving_churn"), *keys)
    columns = ["model", "adapters", "slots", "popularity", "adapters are", "tokens/s"]
    columns += ["warm", "p50 / p99", "cold", "p50 / p99"]
    lines = [
        (
            row,
            [
                *(row[key] for key in keys[:4]),
                WHERE[row["method"]],
                _number(row["tokens_per_s"]),
                *_first_tokens(row, "warm"),
                *_first_tokens(row, "cold"),
            ],
        )
        for row in sorted(rows, key=lambda row: [row[key] for key in keys])
    ]
    title = (
        "The same lengths with more adapters than slots: requests whose adapter was on "
        "the device (warm) or not (cold) when they came, and milliseconds to their "
        "first token"
    )
    return by_record(title, columns, lines)


def _first_tokens(row: Record, kind: str) -> list[str]:
    """Return how many requests there were, and when their first tokens came."""
    if not row[f"num_{kind}"]:
        return ["0", ""]
    times = [f"{row[f'{kind}_p{percent}_ms']:.0f}" for percent in (50, 99)]
    return [str(row[f"num_{kind}"]), " / ".join(times)]


def clusters(results: Path) -> str:
    """Engines on several devices."""
    rows = last_of(load(results, "cluster_scaling"), "shape", "layers", "engines")
    columns = ["model", "engines", "requests", "decode step", "tokens/s"]
    lines = [
        (
            row,
            [
                row["shape"],
                row["engines"],
                row["engines"] * row["seats"],
                _number(row["step_ms"], 2),
                _number(row["tokens_per_s"]),
            ],
        )
        for row in sorted(rows, key=lambda row: (row["shape"], row["engines"]))
    ]
    title = (
        "Engines on several devices in one process, all seats taken, each request "
        "under an adapter of its own; milliseconds of a step of each"
    )
    return by_record(title, columns, lines)


def moves(results: Path) -> str:
    """What a request that moves between engines waits for."""
    columns = ["model", "requests", "tokens of each", "median", "slowest"]
    columns.append("between tokens else")
    lines = [
        (
            row,
            [
                *(row[key] for key in ("shape", "requests", "tokens")),
                *(_number(row[key], 0) for key in ("median_ms", "slowest_ms")),
                _number(row["usual_ms"], 1),
            ],
        )
        for row in last_of(load(results, "cluster_move"), "shape", "layers")
    ]
    title = (
        "All requests of one engine at once go on at another, computed again there: "
        "milliseconds that their callers wait for the next piece"
    )
    return by_record(title, columns, lines)


def scheduling(results: Path) -> str:
    """What a step costs the host, however many devices there are."""
    path = results / "scheduling_cpu.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if (row["running"], row["waiting"]) == (256, 1000)]
    rows = last_of(rows, "policy", "case")
    columns = ["policy", "others wait", "rows chosen", "goal", "met", "all of it"]
    table = [
        (
            row,
            [
                QUEUES[row["policy"]],
                WAITING[row["case"]],
                _number(row["schedule_ms"], 2),
                f"{GOAL_MS:g}",
                "yes" if row["schedule_ms"] < GOAL_MS else "no",
                _number(row["step_ms"], 2),
            ],
        )
        for row in rows
    ]
    title = (
        "Host time of one step at 256 running and 1,000 waiting requests, median "
        "milliseconds on one core: to choose its rows, and all that the host does for "
        "it but for its arrays"
    )
    cpus = ", ".join(sorted({row["cpu"] for row in rows}))
    return by_record(title, columns, table, quoted=cpus)


def goals(results: Path) -> str:
    """What serving is to reach, and whether it does."""
    rows = last_of(load(results, "serving_goal"), "shape", "goal")
    lines = [
        (
            row,
            [
                row["shape"],
                row["goal"],
                row["wanted"],
                f"{row['measured']:.4g}",
                "yes" if row["met"] else "no",
            ],
        )
        for row in sorted(rows, key=lambda row: row["shape"])
    ]
    columns = ["model", "goal", "wanted", "measured", "met"]
    return by_record("Goals of serving", columns, lines)


def measured(results: Path = RESULTS) -> str:
    """Return the whole section of what was measured."""
    parts: list[Callable[[Path], str]]
    parts = [trace, batch, cold, copy, churn, clusters, moves, scheduling, goals]
    return "\n\n".join(text for part in parts if (text := part(results)))
