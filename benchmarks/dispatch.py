"""Host time of one decode step's launch: `python -m benchmarks.dispatch`.

A model of 32 layers, narrow, so that the device is never what is waited for. Each
launch is timed alone, after a wait: what the host needs to hand a step over.
"""

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.decode import (
    MAX_CONTEXT,
    PAGE_SIZE,
    fill_pools,
    make_batch,
    make_config,
)
from punica_jax.models import Llama
from punica_jax.pallas_kernels.shapes import segment_sizes
from punica_jax.runner import Runner

REPEATS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    config = dataclasses.replace(
        make_config("7B"),
        num_layers=args.layers,
        hidden_size=128,
        intermediate_size=256,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=256,
    )
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    runner = Runner(
        model,
        num_kv_pages=args.rows * (MAX_CONTEXT // PAGE_SIZE),
        page_size=PAGE_SIZE,
        num_slots=32,
        num_rank_pages=32,
        max_rank=64,
    )
    fill_pools(runner, 32)
    batch = make_batch(args.rows, segment_sizes("uniform", args.rows), 512)
    for _ in range(3):
        runner.step(batch)
    launches, totals = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        tokens = runner.launch(batch)
        launches.append(time.perf_counter() - start)
        tokens.block_until_ready()
        totals.append(time.perf_counter() - start)
        # As `LLM` does: the next step then writes where this one wrote, and a CUDA
        # graph whose buffers have not moved is launched as it is.
        del tokens
    record = {
        "benchmark": "dispatch",
        "layers": config.num_layers,
        "rows": args.rows,
        "launch_ms": float(np.median(launches)) * 1e3,
        "launch_p90_ms": float(np.quantile(launches, 0.9)) * 1e3,
        "step_ms": float(np.median(totals)) * 1e3,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
