"""What it costs to have more adapters: 1 to 1000, in one batch's reach.

    python -m benchmarks.adapters [--counts 1 10 100 1000] [--shape 7B] [--rows 32]
        [--only op] [--out results/FILE.jsonl]

Rows spread evenly over the adapters while these are fewer than the rows; beyond, each
row uses another one, drawn anew for every step among all that are loaded. First one
product, of as many adapters as there are rows for, then the whole decode step, with
slots for the largest count throughout: the number in use is data and recompiles
nothing. 1000 adapters of a 7B model take 80 GB.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.decode import add_model_options, make_bench
from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.products import Product
from benchmarks.provenance import Log
from punica_jax.bench_model import BenchModel

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
_NUM_PAGES = 1024
_CONTEXT = 512
_RANK = 16


def draw(count: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Return each row's adapter below `count`: even, in a random order."""
    names = rng.permutation(count)[:rows]
    return rng.permutation(np.resize(names, rows))


def run_op(args: argparse.Namespace, log: Log, table: Table) -> None:
    """Time one product for each count that a batch may have."""
    product = Product.random(num_pages=_NUM_PAGES, width=args.width, rows=args.rows)
    for count in args.counts:
        if count > args.rows:
            continue
        names = draw(count, args.rows, np.random.default_rng(count))
        for method in ("segments", "gather"):
            record = {
                "benchmark": "adapters_op",
                "width": args.width,
                "rows": args.rows,
                "adapters": count,
                **product.time(names, method),
            }
            log.add(record)
            table.add_row(
                "product", method, str(count), f"{record['us']:.1f} us", "", ""
            )


def run_step(args: argparse.Namespace, log: Log, table: Table) -> None:
    """Time the decode step for each count, and without adapters."""
    most = max(args.counts)
    bench: BenchModel = make_bench(
        args.shape,
        args.layers,
        [args.rows],
        _CONTEXT,
        ranks=[_RANK] * most,
        max_rank=_RANK,
    )
    bare_s = 0.0
    for count in (0, *args.counts):
        rng = np.random.default_rng(count)
        slots = [
            draw(count, args.rows, rng) if count else np.full(args.rows, -1)
            for _ in range(args.steps)
        ]
        batches = [bench.batch(s, _CONTEXT) for s in slots]
        times = bench.time(
            batches,
            bench.pools if count else None,
            num_steps=args.steps,
            repeats=args.repeats,
        )
        step_s = times.median_s / len(batches)
        bare_s = bare_s or step_s
        in_batch = min(count, args.rows)
        adapter_s = bench.adapter_bytes([_RANK] * in_batch) / PEAK_BYTES_PER_S
        backbone = bench.backbone_bytes(args.rows, _CONTEXT) / PEAK_BYTES_PER_S
        log.add(
            {
                "benchmark": "adapters_step",
                "shape": args.shape,
                "layers": bench.config.num_layers,
                "rows": args.rows,
                "context": _CONTEXT,
                "adapters": count,
                "in_batch": in_batch,
                "step_ms": step_s * 1e3,
                "backbone_ms": bare_s * 1e3,
                "floor_ms": (backbone + adapter_s) * 1e3,
                "x_floor": step_s / (backbone + adapter_s),
            }
        )
        over = f"{100 * (step_s / bare_s - 1):+.1f} %"
        x_floor = f"{step_s / (backbone + adapter_s):.2f}"
        table.add_row(
            "step", "ours", str(count), f"{step_s * 1e3:.3f} ms", over, x_floor
        )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096, help="of the product")
    parser.add_argument("--steps", type=int, default=20, help="enqueued at a time")
    parser.add_argument("--repeats", type=int, default=9, help="the median counts")
    parser.add_argument("--only", choices=("op", "step"))
    Log.add_options(parser)
    args = parser.parse_args(words)
    log = Log(args)
    columns = ("what", "method", "adapters", "time", "over none", "x floor")
    table = Table(*columns, title=f"{args.rows} rows, adapters loaded")
    if args.only != "step":
        run_op(args, log, table)
    if args.only != "op":
        run_step(args, log, table)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
