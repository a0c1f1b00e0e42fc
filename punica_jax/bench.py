"""`punica-jax bench`: decode steps and one product, timed on whatever device there is.

The short form of the repository's `benchmarks/`. Knows nothing of requests, text or
files.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

from punica_jax.bench_model import SHAPES, SMALL, BenchModel, make_config
from punica_jax.pallas_kernels import LoraPool, lora, pack_adapters, segment_metadata
from punica_jax.pallas_kernels.shapes import segment_sizes

_CONTEXT = 128
_RANK = 16
# Sets of adapters that the product goes through, as a model has layers. Those of few
# rows stay in a GPU's caches.
_NUM_SETS = 8
# Calls that go through all sets, enqueued before one wait.
_NUM_CALLS = 20
_CAPTION = (
    "GB: weights, keys and values, and adapters, each read once, the least a step takes"
)


def gather_lora(y: Array, x: Array, index: Array, a: Array, b: Array, d_outs: Any):
    """Add each row's product by gathering its own A and B, as one writes it in JAX.

    Args:
      y: `[rows, d_out]`.
      x: `[rows, d_in]`.
      index: `i32[rows]`, each row's adapter.
      a: `[adapters, C, rank, d_in]`.
      b: `[adapters, d_out, rank]`.
      d_outs: width of each of the C modules' outputs.
    """

    def einsum(spec: str, left: Array, right: Array) -> Array:
        return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)

    v = einsum("nd,ncrd->ncr", x, a[index]).astype(x.dtype)
    b, start, columns = b[index], 0, []
    for c, width in enumerate(d_outs):
        columns.append(einsum("nr,nor->no", v[:, c], b[:, start : start + width]))
        start += width
    return (y.astype(jnp.float32) + jnp.concatenate(columns, axis=1)).astype(y.dtype)


def after(y: Array) -> Array:
    """Return zeros `[rows, 1]` for which XLA has to wait until `[rows, n]` is there.

    What they are added to waits, too, as a product in a model for the one before it;
    otherwise XLA computes several calls in one launch.
    """
    # XLA may not drop 0 * y: y may be infinite, and that a NaN.
    return jnp.zeros((), y.dtype) * y[:, :1]


def time_products(width: int, rows: int, dtype: Any, repeats: int) -> dict[str, float]:
    """Return seconds of `y += x A B`, every row another adapter: ours and a gather."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, width), dtype)
    shape = (_NUM_SETS, rows, _RANK, width)
    a_sets = 0.02 * jax.random.normal(keys[1], shape, dtype)
    b_sets = 0.02 * jax.random.normal(keys[2], shape, dtype).swapaxes(2, 3)
    slots = jnp.arange(rows, dtype=jnp.int32)
    segments = segment_metadata(slots, num_slots=rows)
    pools = [pack_adapters(a, b) for a, b in zip(a_sets, b_sets, strict=True)]
    stacks = [(a[:, None], b) for a, b in zip(a_sets, b_sets, strict=True)]

    def ours(y: Array, pool: LoraPool) -> Array:
        return lora(y, x, pool, segments)

    def gather(y: Array, stack: tuple[Array, Array]) -> Array:
        return gather_lora(y, x + after(y), slots, *stack, d_outs=(width,))

    times_s, outs = {}, {}
    methods: list[tuple[str, Callable[..., Array], list[Any]]] = [
        ("punica-jax", ours, pools),
        ("XLA gather", gather, stacks),
    ]
    for name, launch, sets in methods:

        @jax.jit
        def through_all(y, sets, launch=launch):
            for own in sets:
                y = launch(y, own)
            return y

        y = jnp.zeros((rows, width), dtype)
        outs[name] = np.asarray(through_all(y, sets).astype(jnp.float32))
        runs = []
        for _ in range(repeats):
            start, out = time.perf_counter(), y
            for _ in range(_NUM_CALLS):
                out = through_all(out, sets)
            out.block_until_ready()
            runs.append((time.perf_counter() - start) / (_NUM_CALLS * _NUM_SETS))
        times_s[name] = statistics.median(runs)
    ours_out, gathered = outs.values()
    error = np.linalg.norm(ours_out - gathered) / np.linalg.norm(gathered)
    # Both round y to the dtype after every set.
    assert error < 0.02, f"the two products differ by {error:.1e}"
    return times_s


def main(
    shape_name: str = SMALL.name, rows: int = 8, console: Console | None = None
) -> None:
    """Time decode steps and the product alone, and print two tables.

    Args:
      shape_name: one of `SHAPES`.
      rows: sequences of the batch.
      console: where to print; standard output by default.

    Raises:
      ValueError: the shape is unknown, or there are no rows, or too many for the
        device.
    """
    if shape_name not in SHAPES:
        raise ValueError(
            f"--shape must be one of {', '.join(SHAPES)}, got {shape_name!r}"
        )
    if rows < 1:
        raise ValueError(f"--rows must be at least 1, got {rows}")
    try:
        _bench(shape_name, rows, console or Console())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = f"--rows must fit the device, with an adapter for each, got {rows}"
        raise ValueError(f"{text}: {str(error).splitlines()[0]}") from error


def _bench(shape_name: str, rows: int, console: Console) -> None:
    on_cpu = jax.default_backend() == "cpu"
    # XLA's CPU products of bfloat16 are conversions and products of float32.
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    config = make_config(SHAPES[shape_name])
    with console.status("Making a random model and its adapters"):
        bench = BenchModel(
            config,
            max_rows=rows,
            max_context=_CONTEXT,
            ranks=[_RANK] * rows,
            max_rank=_RANK,
            dtype=dtype,
        )
    num_steps, repeats = (4, 5) if on_cpu else (20, 9)
    where = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {bench.dtype.name}"
    where += f", implementation {bench.runner.implementation}"
    title = (
        f"One decode step: {shape_name} shape, {config.num_layers} layers, "
        f"{rows} rows, context {_CONTEXT}, rank {_RANK}\n{where}"
    )
    columns = ("adapters", "ms", "over none", "tokens/s", "GB", "GB/s")
    steps = Table(*columns, title=title, caption=_CAPTION)
    base_s = 0.0
    for popularity in (None, "identical", "distinct"):
        sizes = segment_sizes(popularity, rows) if popularity else []
        slots = np.repeat(np.arange(len(sizes)), sizes) if sizes else [-1] * rows
        label = f"{popularity} ({len(sizes)})" if popularity else "none"
        with console.status(f"Decoding, adapters: {label}"):
            times = bench.time(
                [bench.batch(slots, _CONTEXT)],
                bench.pools if popularity else None,
                num_steps=num_steps,
                repeats=repeats,
            )
        base_s = base_s or times.median_s
        num_bytes = bench.backbone_bytes(rows, _CONTEXT)
        num_bytes += bench.adapter_bytes([_RANK] * len(sizes))
        steps.add_row(
            label,
            f"{times.median_s * 1e3:.3f}",
            f"{100 * (times.median_s / base_s - 1):+.1f} %",
            f"{rows / times.median_s:.0f}",
            f"{num_bytes / 1e9:.3f}",
            f"{num_bytes / times.median_s / 1e9:.1f}",
        )
    with console.status("Timing the product alone"):
        products = time_products(config.hidden_size, rows, dtype, repeats)
    title = (
        f"y += x A B: {config.hidden_size} -> {config.hidden_size}, rank {_RANK}, "
        f"{rows} rows, every row another adapter"
    )
    table = Table("method", "us", "of the gather", "GB/s", title=title)
    num_bytes = 2 * rows * _RANK * config.hidden_size * bench.dtype.itemsize
    for name, seconds in products.items():
        ratio, speed = seconds / products["XLA gather"], num_bytes / seconds / 1e9
        table.add_row(name, f"{seconds * 1e6:.1f}", f"{ratio:.2f}", f"{speed:.1f}")
    console.print(steps)
    console.print(table)
