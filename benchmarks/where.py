"""Where the time of one step goes, kernel by kernel.

    python -m benchmarks.where [--shape 7B] [--rows 32] [--cases none distinct]
        [--methods ours gather] [--out results/FILE.jsonl] [--kernels 20]
    python -m benchmarks.where --rows 4 --query-len 512  # 4 prompts' prefill

The profiler's figures: each kernel a little longer than it is alone. Kernels that run
beside each other count in full, so that groups may add up to more than `busy`; `gaps`
is when nothing ran. Off GPUs it shows operations of XLA's host threads instead.
"""

import argparse
import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.decode import (
    METHODS,
    Case,
    adapters_of,
    add_model_options,
    batches_of,
    make_bench,
)
from benchmarks.provenance import Log
from benchmarks.timeline import (
    Event,
    busy_ns,
    kernel_key,
    record,
    self_times_ns,
    sources,
)
from punica_jax.bench_model import BenchModel

OTHER = "activations, residuals, other"
# By a kernel's own name, where it has one: ours, and the libraries' products.
_BY_NAME = (
    (
        "base products, with what follows",
        r"lora_project_(gated|rotary)|lora_gated_product",
    ),
    ("base products, with shrink", r"lora_project"),
    ("norms", r"rms_norm"),
    ("shrink", r"lora_shrink"),
    ("expand", r"lora_expand"),
    ("rotary and cache writes, with expand", r"lora_rotary"),
    ("SiLU and product, with expand", r"lora_gated"),
    ("attention, with what is before it", r"paged_attention_decode_rotary"),
    ("attention", r"paged_attention"),
    ("segments", r"segment_metadata"),
    ("base products", r"nvjet|gemm|cublas|cutlass|splitK|matmul"),
)
# By the innermost function of ours that made a part of it; the first group of which it
# has a part wins: a product with something fused to it is a product. All that is
# `lora_normed`'s own is the call of the norm.
_BY_FUNCTION = (
    ("shrink", r"\bshrink$"),
    (
        "expand",
        r"\b(expand|_?lora|lora_(?!normed)\w+|gather_lora|launch_\w+|Stack\.add)$",
    ),
    ("attention", r"\b(paged_attention|_attend|\w*_attention)$"),
    ("base products", r"\b(matmul_rows|linear|LoraLinear\.__call__|Llama\.logits)$"),
    ("cache writes", r"\b(CachedAttention\.\w+|SeqTable\.\w+|store_rows)$"),
    ("sampling", r"\b(sample|most_likely|draw)\b"),
    ("segments", r"\bsegment_metadata\b"),
    (
        "norms and rotary",
        r"\b(rms_norm|RMSNorm\.__call__|lora_normed|rotate|rotary|rotary_tables)$",
    ),
    (OTHER, r"\bgated$"),
)
GROUPS = (*dict((*_BY_FUNCTION, *_BY_NAME, (OTHER, ""))), "gaps")

Stacks = Sequence[tuple[str, ...]]


def group_of(name: str, stacks: Stacks = ()) -> str:
    """Say what a kernel is for.

    Args:
      name: the kernel's, or the operation's.
      stacks: the functions that its parts came from, innermost first.
    """
    for group, pattern in _BY_NAME:
        if re.search(pattern, name):
            return group
    found = {_of_functions(stack) for stack in stacks}
    return next((group for group, _ in _BY_FUNCTION if group in found), OTHER)


def _of_functions(stack: Iterable[str]) -> str:
    for function in stack:
        # Of `sample.<locals>.draw` each part may say it.
        names = [function.replace(".<locals>", ""), *function.split(".<locals>.")]
        for group, pattern in _BY_FUNCTION:
            if any(re.search(pattern, name) for name in names):
                return group
    return OTHER


def summarise(
    events: Sequence[Event],
    by_operation: Mapping[str, Stacks],
    num_steps: int,
    start_ns: float | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the step's groups, and its kernels, each with microseconds and counts.

    Args:
      events: of `num_steps` equal steps, one after the other.
      by_operation: what `timeline.sources` gives.
      num_steps: how many.
      start_ns: when the step before them had ended; None if there was none.
    """
    if not events:
        return [], []
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event, own_ns in zip(events, self_times_ns(events), strict=True):
        kernels[event.name].append(own_ns)
    rows = [
        {
            "kernel": name,
            "group": group_of(name, by_operation.get(kernel_key(name), ())),
            "us": sum(times) / num_steps * 1e-3,
            "launches": len(times) / num_steps,
        }
        for name, times in kernels.items()
    ]
    if start_ns is None:
        start_ns = min(event.start_ns for event in events)
    span_ns = max(event.end_ns for event in events) - start_ns
    groups = {group: {"us": 0.0, "launches": 0.0} for group in GROUPS}
    for row in rows:
        groups[row["group"]]["us"] += row["us"]
        groups[row["group"]]["launches"] += row["launches"]
    groups["gaps"]["us"] = (span_ns - busy_ns(events)) / num_steps * 1e-3
    span_us = span_ns / num_steps * 1e-3
    table = [
        {"group": name, **values, "step_us": span_us, "share": values["us"] / span_us}
        for name, values in groups.items()
    ]
    return table, sorted(rows, key=lambda row: -row["us"])


def without_first(
    events: Sequence[Event], num_steps: int
) -> tuple[list[Event], float | None]:
    """Return the events of all but the first of equal steps, and when that had ended.

    The device waits for its launch, as for no other's. Kernels are counted by name:
    what came once beside the steps is in none of them.
    """
    by_name: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_name[event.name].append(event)
    first = {
        id(event) for own in by_name.values() for event in own[: len(own) // num_steps]
    }
    ends_ns = [event.end_ns for event in events if id(event) in first]
    others = [event for event in events if id(event) not in first]
    return others, max(ends_ns, default=None)


def profile(
    bench: BenchModel, case: Case, method: str, num_steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Profile some steps of a case; see `summarise`."""
    runner = bench.runner
    [batch] = batches_of(bench, case, method)
    runner.adapters.pools = adapters_of(bench, case, method)
    runner.step(batch)
    by_operation = sources(runner.lower(batch).compile().as_text() or "")

    def run():
        for _ in range(num_steps):
            runner.forward(batch)
        return runner.forward(batch)

    run()
    events, start_ns = without_first(record(run), num_steps + 1)
    return summarise(events, by_operation, num_steps, start_ns)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--rows", type=int, default=32, help="sequences")
    parser.add_argument("--context", type=int, default=512, help="tokens of each")
    parser.add_argument(
        "--query-len", type=int, default=1, help="rows of each; 1 is a decode step"
    )
    cases = ("none", "identical", "uniform", "skewed", "distinct")
    parser.add_argument(
        "--cases", nargs="+", choices=cases, default=["none", cases[-1]]
    )
    methods = [name for name in METHODS if name != "group_swap"]
    parser.add_argument("--methods", nargs="+", choices=methods, default=["ours"])
    parser.add_argument("--steps", type=int, default=5, help="profiled at a time")
    parser.add_argument("--kernels", type=int, default=12, help="longest ones shown")
    Log.add_options(parser)
    args = parser.parse_args(words)
    if not 1 <= args.query_len <= args.context:
        parser.error(
            f"--query-len must be 1 to --context = {args.context}, got {args.query_len}"
        )
    log, console = Log(args), Console(width=120)
    bench = make_bench(
        args.shape, args.layers, [args.rows], args.context, ranks=[16] * args.rows
    )
    for name in args.cases:
        case = Case(
            rows=args.rows,
            contexts=(args.context,),
            query_len=args.query_len,
            popularity=None if name == "none" else name,
        )
        for method in args.methods if case.popularity else ["backbone"]:
            groups, kernels = profile(bench, case, method, args.steps)
            size = f"{args.rows} x {args.query_len} rows"
            title = f"{args.shape}, {size}, adapters: {name}, {method}"
            table = Table("group", "us a step", "launches", "share", title=title)
            for row in groups:
                about = {
                    "benchmark": "where",
                    "shape": args.shape,
                    "layers": bench.config.num_layers,
                    "rows": args.rows,
                    "query_len": args.query_len,
                    "context": args.context,
                    "popularity": name,
                    "method": method,
                    "from_second_step": True,
                }
                log.add({**about, **row})
                us, share = f"{row['us']:.0f}", f"{100 * row['share']:.1f} %"
                table.add_row(row["group"], us, f"{row['launches']:.0f}", share)
            console.print(table)
            longest = Table("kernel", "group", "us a step", "launches")
            for row in kernels[: args.kernels]:
                counts = f"{row['us']:.1f}", f"{row['launches']:.0f}"
                longest.add_row(row["kernel"], row["group"], *counts)
            console.print(longest)


if __name__ == "__main__":
    main()
