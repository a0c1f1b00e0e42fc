"""What the device reaches: a large sum and a large product.

    python -m benchmarks.ceilings [--size-mb 1024] [--width 8192] [--out FILE]

Knows nothing of our kernels; a roofline is drawn under these figures.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from benchmarks.device_time import compile_step, measure
from benchmarks.provenance import Log
from punica_jax.bench import after

_CALLS = 4
_ROW_WIDTH = 4096


def read_bytes_per_s(num_bytes: int) -> float:
    """Return bytes read a second by sums of rows: a decode step hardly writes."""

    def launch(sums, x):
        # Of the sums before: nothing is read until those are there.
        return (x.astype(jnp.float32) + after(sums[:, None])).sum(axis=1)

    shape = max(1, num_bytes // (2 * _ROW_WIDTH)), _ROW_WIDTH
    operands = [(jnp.full(shape, n, jnp.bfloat16),) for n in range(_CALLS)]
    carries = [jnp.zeros(shape[0], jnp.float32)]
    times, _ = measure(compile_step(launch, carries, operands), carries, operands)
    return operands[0][0].nbytes / times.median_s


def product_flops_per_s(width: int) -> float:
    """Return operations a second of `x @ w`, bfloat16, random, all `width` wide."""

    def launch(x, w):
        # Scaled, so that values stay finite through all calls.
        return x @ w

    keys = jax.random.split(jax.random.key(0), 1 + _CALLS)
    x, *ws = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    scale = jnp.bfloat16(width**-0.5)
    carries, operands = [x], [(w * scale,) for w in ws]
    times, _ = measure(compile_step(launch, carries, operands), carries, operands)
    return 2 * width**3 / times.median_s


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mb", type=int, default=1024, help="summed at a time")
    parser.add_argument("--width", type=int, default=8192, help="of the product")
    Log.add_options(parser)
    args = parser.parse_args(words)
    Log(args).add(
        {
            "benchmark": "ceilings",
            "read_mb": args.size_mb,
            "width": args.width,
            "bytes_per_s": read_bytes_per_s(args.size_mb * 10**6),
            "flops_per_s": product_flops_per_s(args.width),
        }
    )


if __name__ == "__main__":
    main()
