"""Whether the order of a batch's rows matters, and what segments save.

    python -m benchmarks.order [--width 4096] [--rows 64] [--out results/FILE.jsonl]

One batch of adapters A, B, C, ... as AABCCC (sorted), shuffled, and ABCABC
(interleaved), by three methods of `products`. A straw man for anything that needs equal
adapters side by side.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.products import METHODS, Product
from benchmarks.provenance import Log
from punica_jax.pallas_kernels.shapes import Popularity, segment_sizes

# Of one adapter, and of one for each row, there are no orders.
POPULARITIES: tuple[Popularity, ...] = ("uniform", "skewed")
ORDERS = ("sorted", "shuffled", "interleaved")


def arrange(sizes: Sequence[int], order: str) -> np.ndarray:
    """Return each row's adapter, 0 to `len(sizes) - 1`."""
    grouped = np.repeat(np.arange(len(sizes)), sizes)
    if order == "shuffled":
        return np.random.default_rng(0).permutation(grouped)
    if order == "interleaved":
        # Everyone's first row, then everyone's second: sorted by place in its group.
        place = np.concatenate([np.arange(size) for size in sizes])
        return grouped[np.argsort(place, kind="stable")]
    return grouped


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pages", type=int, default=1024, help="adapters to draw from")
    parser.add_argument("--popularity", nargs="+", choices=POPULARITIES)
    Log.add_options(parser)
    args = parser.parse_args(words)
    log = Log(args)
    product = Product.random(num_pages=args.pages, width=args.width, rows=args.rows)
    table = Table("adapters", "order", *METHODS, title=f"us, {args.rows} rows")
    for popularity in args.popularity or POPULARITIES:
        sizes = segment_sizes(popularity, args.rows)
        for order in ORDERS:
            names = arrange(sizes, order)
            cells = []
            for method in METHODS:
                record = {
                    "benchmark": "order",
                    "width": args.width,
                    "rows": args.rows,
                    "popularity": popularity,
                    "order": order,
                    **product.time(names, method),
                }
                log.add(record)
                cells.append(f"{record['us']:.1f}")
            table.add_row(f"{popularity} ({len(sizes)})", order, *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
