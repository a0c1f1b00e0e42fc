"""Mixed-adapter products for any JAX or Flax code, without pools or segments.

Knows dense stacks of adapters only.
"""

import itertools

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from punica_jax import pallas_kernels


def lora(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    a: Float[Array, "slots rank d_in"],
    b: Float[Array, "slots d_out rank"],
    slots: Int[Array, "rows"],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """Add to every row of `y` its own adapter's product.

    *Semantics*: `y[i] + x[i] a[slots[i]]^T b[slots[i]]^T` (Punica, section 4);
    rows with slot -1 keep `y`. Reverse-mode differentiable in `y`, `x`, `a` and `b`.

    The adapters are packed into rank pages and the rows are sorted on every call: one
    copy of `a` and `b`. A server keeps a `LoraPool` and makes the segments once a step
    instead. (How XLA may not be told to run few rows: see `pallas_kernels.lora`.)

    Args:
      y: base output; d_out a multiple of 8.
      x: input, same float32, bfloat16 or float16 as the others; d_in a multiple of 8.
      a: A of each adapter, as PEFT stores it.
      b: B of each adapter, times its scale (alpha / rank).
      slots: adapter of each row; -1, or anything that is no slot, for none.
      implementation: see `pallas_kernels.resolve`; None chooses by device.

    Returns:
      `y` with the products added, in its dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    named = {"y": y, "x": x, "a": a, "b": b, "slots": slots}
    y, x, a, b, slots = itertools.starmap(pallas_kernels.as_array, named.items())
    if y.ndim != 2 or slots.shape != y.shape[:1]:
        raise ValueError(
            f"y must be [rows, d_out] and slots i32[rows], got y {y.shape} and slots "
            f"{slots.shape}"
        )
    if not slots.size:
        if x.ndim != 2 or x.size:
            raise ValueError(f"x must be [0, d_in], as y has no rows, got {x.shape}")
        # Products need a row: one of no adapter comes, and goes again.
        y, x = (jnp.pad(array, ((0, 1), (0, 0))) for array in (y, x))
        idle = jnp.pad(slots, (0, 1), constant_values=-1)
        return lora(y, x, a, b, idle, implementation=implementation)[:0]
    pool = pallas_kernels.pack_adapters(a, b)
    segments = pallas_kernels.segment_metadata(
        slots, num_slots=pool.num_slots, implementation=implementation
    )
    return pallas_kernels.lora(y, x, pool, segments, implementation=implementation)
