"""Where a filter cuts each row: the k-th largest value, the nucleus.

Knows keys, weights and limits; nothing of temperatures or tokens. Nothing is sorted: a
limit is found digit by digit, each digit by one pass over the row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

# Bits of a key that one pass decides. Four take 15 limits: about as much arithmetic as
# a GPU does while it reads the row from its L2.
_DIGIT_BITS = 4
_NUM_DIGITS = 32 // _DIGIT_BITS


def order_keys(values: Float32[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Return integers that are ordered as the values are, equal where they are.

    No difference is lost: not that of subnormals, which a CPU takes for zeros.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits == sign, jnp.uint32(0), bits)  # -0.0 equals 0.0
    return jnp.where(bits < sign, bits | sign, ~bits)


def kth_largest(
    keys: UInt32[Array, "rows vocab"], k: Int32[Array, "rows"]
) -> UInt32[Array, "rows"]:
    """Return the k-th largest key of each row, for 1 <= k <= vocab."""

    def reached(limits: Array) -> Array:
        return _sums_from(jnp.ones_like(keys, jnp.int32), keys, limits) >= k[:, None]

    return _largest(reached, keys)


def nucleus(
    keys: UInt32[Array, "rows vocab"],
    weights: Float32[Array, "rows vocab"],
    share: Float32[Array, "rows"],
) -> UInt32[Array, "rows"]:
    """Return the largest key from which on the keys hold a share of the weights.

    Args:
      keys: of the order.
      weights: 0 or more, with a positive finite sum; need not add up to 1.
      share: above 0. Met to within the rounding of a float32 sum.
    """
    target = share * jnp.sum(weights, axis=-1)
    return _largest(
        lambda limits: _sums_from(weights, keys, limits) >= target[:, None], keys
    )


def _largest(
    reached: Callable[[UInt32[Array, "rows limits"]], Bool[Array, "rows limits"]],
    keys: UInt32[Array, "rows vocab"],
) -> UInt32[Array, "rows"]:
    """Return the largest number that is reached, where smaller ones are too."""
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)[None]

    def decide(index: Array, found: Array) -> Array:
        shift = jnp.uint32(32 - _DIGIT_BITS) - _DIGIT_BITS * index.astype(jnp.uint32)
        limits = found[:, None] | (digits << shift)
        digit = jnp.sum(reached(limits), axis=-1, dtype=jnp.uint32)
        return found | (digit << shift)

    def search(unroll: bool) -> Array:
        first = jnp.zeros_like(keys[:, 0])
        return lax.fori_loop(0, _NUM_DIGITS, decide, first, unroll=unroll)

    # Unrolled, all passes are nodes of one CUDA graph. A CPU gains nothing by that, and
    # compiles three times as long.
    return lax.platform_dependent(
        cuda=lambda: search(unroll=True), default=lambda: search(unroll=False)
    )


def _sums_from(
    values: Array, keys: UInt32[Array, "rows vocab"], limits: Array
) -> jax.Array:
    """Return `sum(values where keys >= limit)` for each of a row's limits.

    One reduction of as many operands as there are limits reads the row once; separate
    sums are several times slower on a CPU, in compiling too.
    """
    zero = jnp.zeros((), values.dtype)
    parts = [
        jnp.where(keys >= limits[:, i, None], values, zero)
        for i in range(limits.shape[1])
    ]

    def add(left, right):
        return tuple(a + b for a, b in zip(left, right, strict=True))

    return jnp.stack(lax.reduce(parts, [zero] * len(parts), add, (1,)), axis=-1)
