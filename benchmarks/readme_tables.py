"""The README's tables, from result files and quoted figures of others.

Knows the result files' fields and nothing of how they were measured. A table whose
records are not there yet is left out; figures are never typed.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import decode_goals, peers, provenance
from benchmarks.provenance import RESULTS, ROOT, Record, source

TINY = ROOT / "punica_jax" / "tiny_llama" / "results.json"
RIVALS = {
    "gather": "XLA gather",
    "ragged_dot": "`ragged_dot`",
    "loop": "loop over adapters",
    "group_swap": "group and swap",
}
PLOTS = {
    "latency": "Decode step against rows, by popularity",
    "throughput": "One mixed batch against a batch for each adapter",
    "adapters": "Overhead against the number of adapters",
    "order": "Order of a batch's rows",
    "roofline": "Roofline of the product",
}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


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


def _steps(results: Path) -> list[Record]:
    rows = [row for row in load(results, "decode") if row["ranks"] in ([], [16])]
    # One row has one adapter, whatever the popularity is called.
    rows = [
        row
        for row in rows
        if row["rows"] > 1 or row["popularity"] in ("none", "identical")
    ]
    return last_of(rows, "shape", "rows", "context", "popularity", "method")


def decode(results: Path) -> str:
    """Our decode steps, and the rivals of the same run."""
    rows = _steps(results)
    if not rows:
        return ""
    title = (
        "One decode step of a random model, bfloat16, rank 16 on all seven "
        "projections: medians of device time, milliseconds; the floor is all bytes "
        f"read once at 4.3 TB/s ({source(rows)}):"
    )
    methods = [method for method in RIVALS if any(r["method"] == method for r in rows)]
    columns = ["model", "rows", "context", "adapters", "floor", "step"]
    columns += ["over no adapter", *(RIVALS[method] for method in methods)]
    cells = []
    for row in rows:
        if row["method"] not in ("ours", "backbone"):
            continue
        keys = ("shape", "rows", "context", "popularity")
        same = {r["method"]: r for r in rows if all(r[k] == row[k] for k in keys)}
        over = f"{100 * (row['step_ms'] / row['backbone_ms'] - 1):+.1f} %"
        name = f"{row['popularity']} ({row['adapters']})" if row["adapters"] else "none"
        rivals = [
            f"{same[method]['step_ms']:.2f}" if method in same else ""
            for method in methods
        ]
        cells.append(
            [
                row["shape"],
                row["rows"],
                _context(row),
                name,
                f"{row['floor_ms']:.2f}",
                f"{row['step_ms']:.2f}",
                over if row["adapters"] else "",
                *rivals,
            ]
        )
    return f"{title}\n\n{markdown(columns, cells)}"


def _context(row: Record) -> str:
    return str(row["context"]).replace("..", " to ")


def ranks(results: Path) -> str:
    """Batches of mixed ranks against batches of the least of them."""
    rows = [row for row in load(results, "decode") if "rank_allowed_ms" in row]
    rows = last_of(rows, "shape", "rows", "context", "popularity", "ranks")
    if not rows:
        return ""
    title = (
        "Ranks mixed in one batch, against the same batch all of the least rank; "
        "`allowed` adds to it 2 % and the bytes of the higher ranks, milliseconds "
        f"({source(rows)}):"
    )
    columns = ["model", "rows", "adapters", "ranks", "least rank", "allowed", "mixed"]
    cells = [
        [
            row["shape"],
            row["rows"],
            f"{row['popularity']} ({row['adapters']})",
            ", ".join(map(str, row["ranks"])),
            f"{row['least_rank_ms']:.2f}",
            f"{row['rank_allowed_ms']:.2f}",
            f"{row['step_ms']:.2f}",
        ]
        for row in rows
    ]
    return f"{title}\n\n{markdown(columns, cells)}"


def engines(results: Path) -> str:
    """Other engines' quoted steps, ours beside them."""
    title = (
        "Other engines, milliseconds a decode step, vLLM's and ours the mean over "
        f"contexts {peers.SPAN.replace('..', ' to ')} "
        f"({peers.source(peers.END_TO_END)}):"
    )
    steps = [row for row in _steps(results) if row["context"] == peers.SPAN]
    quoted = peers.load(peers.END_TO_END)
    cells = []
    for shape, rows in sorted({(row["shape"], row["rows"]) for row in quoted}):
        same = {
            row["popularity"]: row["step_ms"]
            for row in steps
            if (row["shape"], row["rows"]) == (shape, rows)
            and row["method"] in ("ours", "backbone")
        }
        if same and rows == 1:
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
    return f"{title}\n\n{markdown(columns, cells)}"


def products(results: Path) -> str:
    """The product alone against others' kernels and against JAX's own means."""
    rows = last_of(load(results, "sgmv"), "cell")
    rows = [row for row in rows if "ours_us" in row and row.get("peer_us")]
    if not rows:
        return ""
    title = (
        "One product `y += x A B`, our time over theirs: geometric mean, and in how "
        f"many cells ours is faster ({source(rows)}; peers: "
        f"{peers.source(peers.KERNELS)}):"
    )
    rivals = {"peer": "best existing kernel"}
    rivals |= {name: RIVALS[name] for name in ("gather", "ragged_dot", "loop")}
    cells = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        line: list[Any] = [suite]
        for name in rivals:
            ratios = [
                row["ours_us"] / row[f"{name}_us"]
                for row in rows
                if row["suite"] == suite and row.get(f"{name}_us")
            ]
            won = sum(ratio < 1 for ratio in ratios)
            mean = statistics.geometric_mean(ratios) if ratios else 0.0
            line.append(f"{mean:.2f} ({won} of {len(ratios)})" if ratios else "")
        cells.append(line)
    return f"{title}\n\n{markdown(['suite', *rivals.values()], cells)}"


def where(results: Path) -> str:
    """Where the time of one decode step goes; a column for each profile."""
    keys = ("shape", "rows", "popularity", "method", "commit")
    rows = last_of(load(results, "where"), *keys, "group")
    if not rows:
        return ""
    profiles = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    figures = {(*(row[key] for key in keys), row["group"]): row for row in rows}
    columns = ["kernels"]
    for shape, num_rows, popularity, method, commit in profiles:
        adapters = "no adapter" if popularity == "none" else f"{popularity}, {method}"
        columns.append(f"{shape}, {num_rows} rows, {adapters}, {commit}")
    cells = []
    for group in dict.fromkeys(row["group"] for row in rows):
        line = [figures.get((*profile, group), {"us": 0.0}) for profile in profiles]
        if any(row["us"] for row in line):
            cells.append([group, *(f"{row['us']:.0f}" for row in line)])
    totals = (
        next(row["step_us"] for key, row in figures.items() if key[:-1] == profile)
        for profile in profiles
    )
    cells.append(["step", *(f"{us:.0f}" for us in totals)])
    title = (
        "Where the time goes, microseconds of one decode step by the profiler; kernels "
        "that run beside each other count in full, gaps are when nothing ran "
        f"({source(rows)}):"
    )
    return f"{title}\n\n{markdown(columns, cells)}"


def around(results: Path) -> str:
    """What the host does before a step and the device after it, and their goals."""
    launches = last_of(load(results, "dispatch"), "layers", "rows")
    draws = last_of(load(results, "sampling"), "rows", "case", "vocab")
    if not launches and not draws:
        return ""
    steps = load(results, "decode")
    cells = []
    for row in launches:
        what = f"host's launch of a step, {row['layers']} layers"
        judged = decode_goals.judge_launch(row)
        cells.append([what, row["rows"], f"{1e3 * row['launch_ms']:.0f}", judged])
    for row in draws:
        what = f"{row['case']}, vocabulary of {row['vocab']}"
        judged = decode_goals.judge_sampling(row, steps)
        cells.append([what, row["rows"], f"{row['us']:.0f}", judged])
    cells = [[*line, *_judged(row)] for *line, row in cells]
    title = (
        "Around a step: its launch by the host, and choosing its tokens, as a share of "
        "the 7B step of as many rows without adapters, with an output head for that "
        f"vocabulary ({source([*launches, *draws])}):"
    )
    columns = ["what", "rows", "us", "of a step", "goal", "commit"]
    return f"{title}\n\n{markdown(columns, cells)}"


def _judged(row: Record) -> list[str]:
    share = f"{100 * row['share']:.1f} %" if "share" in row else ""
    goal = ""
    if "met" in row:
        goal = f"{row['goal']}: {'met' if row['met'] else 'missed'}"
    return [share, goal, row["commit"]]


def plots(results: Path) -> str:
    lines = [
        f"![{title}]({(results / f'{name}.png').relative_to(ROOT)})"
        for name, title in PLOTS.items()
        if (results / f"{name}.png").exists()
    ]
    return "\n".join(lines)


def measured(results: Path = RESULTS) -> str:
    """Return the whole section of what was measured."""
    parts: list[Callable[[Path], str]] = [
        decode,
        engines,
        ranks,
        products,
        around,
        where,
        plots,
    ]
    return "\n\n".join(text for part in parts if (text := part(results)))
