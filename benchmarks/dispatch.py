"""Host time of one decode step's launch: `python -m benchmarks.dispatch`.

A model of 32 layers, narrow, so that the device is never what is waited for. Each
launch is timed alone, after a wait: what the host needs to hand a step over.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.decode import Case
from benchmarks.provenance import Log
from punica_jax.bench_model import BenchModel, make_config
from punica_jax.pallas_kernels.shapes import LLAMA_2_7B


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=200)
    Log.add_options(parser)
    args = parser.parse_args(words)
    config = dataclasses.replace(
        make_config(LLAMA_2_7B),
        num_layers=args.layers,
        hidden_size=128,
        intermediate_size=256,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=256,
    )
    case = Case(rows=args.rows, contexts=(512,), popularity="uniform")
    bench = BenchModel(config, max_rows=args.rows, max_context=640, ranks=[16] * 32)
    batch, runner = bench.batch(case.slots, 512), bench.runner
    for _ in range(3):
        runner.step(batch)
    launches, totals = [], []
    for _ in range(args.repeats):
        start = time.perf_counter()
        launched = runner.forward(batch)
        launches.append(time.perf_counter() - start)
        launched.likely.block_until_ready()
        totals.append(time.perf_counter() - start)
    record = {
        "benchmark": "dispatch",
        "layers": config.num_layers,
        "rows": args.rows,
        "launch_ms": float(np.median(launches)) * 1e3,
        "launch_p90_ms": float(np.quantile(launches, 0.9)) * 1e3,
        "step_ms": float(np.median(totals)) * 1e3,
    }
    Log(args).add(record)


if __name__ == "__main__":
    main()
