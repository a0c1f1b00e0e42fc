"""Serving on one device, by an engine's own thread: `python -m benchmarks.serving`.

    [--shape 7B] [--parts trace batch cold churn] [--popularity distinct ...]
        [--seconds 20] [--whole] [--out results/FILE.jsonl]

A random model behind the loop, the scheduler and the adapters' residence of `Engine`;
clients of an event loop ask for one request after the other and take their pieces.

- `trace`: the paper's text generation, 32 requests in flight; first those that would be
  in flight at some moment, so that the window is steady from its first step. Against
  the backbone alone (programs without LoRA) and against one adapter at a time, the
  largest group first. `--whole` answers the trace from its first request to its last.
- `batch`: 32 requests of 512 and 128 new tokens at once, start to end; three times,
  the middle one counts.
- `cold`: from asking for an adapter until a step can use it, from disk (its pages
  cached by the system) and from the host's tier, alone and beside requests that decode.
- `churn`: 1000 adapters on disk, few slots, against the same requests where nothing
  needs to be loaded.

Python's collector is kept from what is there once the programs are compiled, as
docs/engine.md has a server do. Tokens are counted as steps give them. The floor of a
step is its bytes, each read once at the copy rate measured on an H200. The device is
known to be busy where it had not ended a step when the host came to wait for it: `busy`
is at least so much.
"""

import argparse
import dataclasses
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.decode import add_model_options
from benchmarks.provenance import Log
from benchmarks.serving_adapters import RANK, write_adapters
from benchmarks.serving_cases import Cases
from benchmarks.serving_goals import goals
from benchmarks.serving_model import WatchedRunner
from benchmarks.serving_trace import LAWS
from punica_jax.batch import Batch, Buckets
from punica_jax.bench_model import PAGE_SIZE, SHAPES, BenchModel, make_config
from punica_jax.engine import NUM_SPARE
from punica_jax.pallas_kernels.shapes import Popularity
from punica_jax.sizes import Sizes

POPULARITIES: tuple[Popularity, ...] = ("distinct", "uniform", "skewed", "identical")
_BATCH: tuple[Popularity | None, ...] = (None, "identical", "distinct")
# As vLLM's default for its `LLM` on such a card (vllm-project/vllm#12369): 32 prompts
# of 512 tokens are one step so, and three of 8192 rows, the last one for sixteen rows.
_MAX_STEP_ROWS = 16384
_BATCH_COLUMNS = ("all_first_ms", "vllm_tokens_per_s", "vllm_all_first_ms")
_COLUMNS = {
    "trace": (
        *("popularity", "method", "whole", "tokens_per_s", "adapters_per_step"),
        *("decode_ms", "floor_ms", "roofline", "busy", "host_ms", "longest_step_ms"),
    ),
    "batch": ("popularity", "rows", "tokens_per_s", *_BATCH_COLUMNS),
    "cold": ("tier", "beside", "ms", "median_ms", "slowest_ms", "slowest_over_median"),
    "copy": (
        *("adapter_bytes", "is_locked", "stage_ms", "begin_ms"),
        *("copy_ms", "place_ms"),
    ),
    "churn": (
        *("law", "method", "tokens_per_s", "num_warm", "warm_p50_ms", "warm_p99_ms"),
        *("num_cold", "cold_p50_ms", "cold_p99_ms"),
    ),
    "goal": ("goal", "wanted", "measured", "met"),
}


def _step_rows(args: argparse.Namespace) -> int:
    return min(_MAX_STEP_ROWS, args.seats * args.max_len)


def make_bench(args: argparse.Namespace) -> tuple[BenchModel, Sizes]:
    """Make the model, and say how much of everything it is served with."""
    config = make_config(SHAPES[args.shape])
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    sizes = Sizes(
        max_model_len=args.max_len,
        max_seats=args.seats,
        num_slots=max(args.slots, args.seats),
        max_rank=RANK,
        page_size=PAGE_SIZE,
        num_spare=NUM_SPARE,
        max_step_rows=_step_rows(args),
    )
    bench = BenchModel(
        config,
        max_rows=args.seats,
        max_context=args.max_len,
        ranks=[RANK] * sizes.num_device_slots,
        num_seats=args.seats,
        make_runner=WatchedRunner,
    )
    return bench, sizes


def warm_up(bench: BenchModel, sizes: Sizes) -> None:
    """Compile the steps; nobody draws here, so what draws tokens is left out.

    Python's collector is kept from what is there then.
    """
    buckets = list(Buckets(sizes.max_seats, sizes.max_rows))
    for bucket, _ in bench.runner.compile(buckets, sizes.pages_per_seq):
        bench.runner.step(Batch.of([], bucket, sizes.pages_per_seq))
    gc.collect()
    gc.freeze()


def run_trace(cases: Cases, args: argparse.Namespace, add: Callable[..., None]) -> None:
    """Replay the paper's workload: backbone first, then each popularity."""
    bench = cases.bench
    # A program without adapters' products is another one: compiled here.
    adapters: Any = bench.runner.adapters
    pools, adapters.pools = adapters.pools, None
    warm_up(bench, cases.sizes)
    wholes = (False, True) if args.whole else (False,)
    for whole in wholes:
        add("trace", method="backbone", **cases.trace(None, whole=whole))
    adapters.pools = pools
    warm_up(bench, cases.sizes)
    for popularity in args.popularity:
        for whole in wholes:
            add("trace", method="mixed", **cases.trace(popularity, whole=whole))
        add("trace", method="group_swap", **cases.group_swap(popularity))


def run(args: argparse.Namespace, add: Callable[..., None]) -> None:
    bench, sizes = make_bench(args)
    cases = Cases(
        bench,
        sizes,
        seconds=args.seconds,
        swap_steps=args.swap_steps,
        num_requests=args.requests,
    )
    if "trace" in args.parts:
        run_trace(cases, args, add)
    else:
        warm_up(bench, sizes)
    if "batch" in args.parts:
        for popularity in _BATCH:
            fields = cases.batch(popularity, *args.batch, shape=args.shape)
            add("batch", **fields)
    if not {"cold", "churn"} & set(args.parts):
        return
    with tempfile.TemporaryDirectory(prefix="punica-jax-") as name:
        folder = Path(name)
        count = max(args.adapters, args.loads + args.seats)
        write_adapters(folder, bench.config, bench.dtype, count)
        if "cold" in args.parts:
            add("copy", **cases.copy(folder))
            for beside in (0, args.seats - 1):
                for record in cases.cold(folder, args.loads, beside):
                    add("cold", **record)
        if "churn" in args.parts:
            for law in LAWS:
                for where in (None, folder):
                    fields = cases.churn(where, law, args.adapters, args.slots)
                    add("churn", **fields)


def show(records: Sequence[dict[str, Any]]) -> None:
    for part, columns in _COLUMNS.items():
        rows = [one for one in records if one["benchmark"] == f"serving_{part}"]
        if rows:
            table = Table(*columns, title=f"serving: {part}")
            for row in rows:
                table.add_row(*(_cell(row.get(column)) for column in columns))
            Console(width=150).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parts = ("trace", "batch", "cold", "churn")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seats", type=int, default=32, help="requests in flight")
    parser.add_argument("--max-len", type=int, default=2048, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    group = parser.add_argument_group("trace, batch")
    group.add_argument(
        "--popularity", nargs="+", choices=POPULARITIES, default=POPULARITIES
    )
    group.add_argument("--requests", type=int, default=1024, help="of the whole trace")
    group.add_argument("--whole", action="store_true", help="answer all of it, too")
    group.add_argument("--swap-steps", type=int, default=200, help="of the baseline")
    group.add_argument(
        "--batch", type=int, nargs=2, default=(512, 128), metavar=("PROMPT", "NEW")
    )
    group = parser.add_argument_group("cold, churn")
    group.add_argument("--loads", type=int, default=20, help="cold adapters")
    group.add_argument("--adapters", type=int, default=1000, help="on disk")
    group.add_argument("--slots", type=int, default=32, help="on the device, for them")
    Log.add_options(parser)
    args = parser.parse_args(words)
    if "batch" in args.parts and sum(args.batch) > args.max_len:
        parser.error(f"--batch must fit --max-len {args.max_len}, got {args.batch}")
    log = Log(args)

    def add(part: str, **fields: Any) -> None:
        where = {"shape": args.shape, "seats": args.seats, "max_len": args.max_len}
        where |= {"max_step_rows": _step_rows(args), "collector": "frozen"}
        log.add({"benchmark": f"serving_{part}", **where, **fields})

    try:
        run(args, add)
    finally:
        gc.unfreeze()
    for goal in goals(log.records):
        log.add({"shape": args.shape, **goal})
    show(log.records)


if __name__ == "__main__":
    main()
