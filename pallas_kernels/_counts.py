"""Counts by which programs of one launch know what others of it have stored.

They are an operand that holds zeros before a launch and after it, and is counted in
place: launches that share it must not run beside each other.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

# Each in a cache line of its own: 32 rows of 32 adapters take 8.9 us so in `_pair`, and
# 9.8 with all counts side by side.
_STRIDE = 32


def counts_of(zeros: Array) -> Array:
    """Return counts that are zero, `i32[n, stride]`.

    Args:
      zeros: `i32[n]`; computed of an operand, for a literal XLA might let others share.
    """
    return jnp.broadcast_to(zeros[:, None], (zeros.size, _STRIDE))


def count_stored(counts_ref: Any, number: Array, *, interpret: bool) -> Array:
    """Count a program that has stored its part; return how many had before.

    What it stored is seen by whoever counts later.
    """
    if not interpret:  # where a program has no threads that have to meet
        plgpu.debug_barrier()
    return plgpu.atomic_add(counts_ref, (number, jnp.int32(0)), jnp.int32(1))


def set_to_zero(counts_ref: Any, number: Array) -> None:
    """Have a count as the next launch needs it."""
    plgpu.atomic_min(counts_ref, (number, jnp.int32(0)), jnp.int32(0))
