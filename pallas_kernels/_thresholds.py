"""Where a filter cuts each row: the k-th largest value, the nucleus.

Knows values and weights; nothing of tokens or of which filters there are. Nothing is
sorted: a limit is found digit by digit, each digit by one pass over the row.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32

from punica_jax.pallas_kernels._digit_buckets import (
    LEAST_KEY,
    MAX_TEMPERATURE,
    Weighing,
    order_keys,
)
from punica_jax.pallas_kernels._digit_search import largest_reaching
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._operands import require

# Bits of a key that one pass decides off NVIDIA GPUs.
_DIGIT_BITS = 4
_NUM_DIGITS = 32 // _DIGIT_BITS


def kth_largest(
    values: Float32[Array, "rows vocab"],
    k: Int32[Array, "rows"],
    *,
    implementation: str | None = None,
) -> Int32[Array, "rows"]:
    """Find the k-th largest value of each row.

    *Semantics*: `sort(order_keys(values[i]))[-k[i]]`. A row is searched alone: what
    others hold changes nothing.

    Args:
      values: a NaN is above all others, or, with a sign, below.
      k: 0 or less is off: that row is not searched.
      implementation: see `resolve`.

    Returns:
      The value's key, see `order_keys`; where k is off, or more than there are values,
      the least int32, below every key.

    Raises:
      ValueError: a shape or dtype is another one.
    """
    _check(values, {"k": (k, jnp.int32)})
    implementation = resolve(implementation)
    if implementation != "xla":
        return largest_reaching(
            values,
            k,
            name="kth_largest",
            interpret=implementation == "pallas_interpret",
        )
    keys = order_keys(values)
    ones = jnp.ones_like(keys)
    found = _largest(lambda limits: _sums_from(ones, keys, limits) >= k[:, None], keys)
    return jnp.where(k > 0, found, LEAST_KEY)


def _check(values: Array, of_rows: dict[str, tuple[Array, Any]]) -> None:
    if values.ndim != 2 or values.dtype != jnp.float32 or 0 in values.shape:
        raise ValueError(
            "values must be float32[rows, vocab], neither of them 0, got "
            f"{values.dtype}{list(values.shape)}"
        )
    for name, (operand, dtype) in of_rows.items():
        require(name, operand, values.shape[:1], jnp.dtype(dtype))


def nucleus(
    values: Float32[Array, "rows vocab"],
    share: Float32[Array, "rows"],
    temperature: Float32[Array, "rows"],
    *,
    floor: Int32[Array, "rows"] | None = None,
    implementation: str | None = None,
) -> Int32[Array, "rows"]:
    """Find the largest value from which on a row's values hold a share of its weight.

    *Semantics*: `v` weighs `exp((v - max(values[i])) / temperature[i])`; the row's
    weight is that of the values whose keys are `floor[i]` or more. A row is searched
    alone: what others hold changes nothing.

    Args:
      values: a row may have `-inf`, which weighs nothing, but not only that.
      share: above 0; met to within the rounding of a float32 sum. 1 or more is off:
        that row is not searched.
      temperature: positive and finite; above `2**125` it is that. A row without one
        gets any limit.
      floor: keys, as `kth_largest` returns them; None is below every key.
      implementation: see `resolve`.

    Returns:
      The value's key, see `order_keys`, or where sums were rounded a number between it
      and the next lower value's: a filter keeps the same. The floor, or the least
      int32, below every key, where the share is off, and where the rounded sum of
      everything does not reach it.

    Raises:
      ValueError: a shape or dtype is another one.
    """
    of_rows = {
        "share": (share, jnp.float32),
        "temperature": (temperature, jnp.float32),
        "floor": (floor, jnp.int32),
    }
    _check(values, {name: own for name, own in of_rows.items() if own[0] is not None})
    implementation = resolve(implementation)
    top = jnp.max(values, axis=-1)
    if implementation != "xla":
        return largest_reaching(
            values,
            share,
            Weighing(top, temperature, floor),
            name="nucleus",
            interpret=implementation == "pallas_interpret",
        )
    keys = order_keys(values)
    distance = values - top[:, None]
    # At a tiny temperature 0 / 0 is a 1.
    temperature = jnp.minimum(temperature, MAX_TEMPERATURE)
    scaled = jnp.where(distance == 0, jnp.float32(0), distance / temperature[:, None])
    weights = jnp.exp(scaled)
    if floor is not None:
        weights = jnp.where(keys >= floor[:, None], weights, jnp.float32(0))
    target = share * jnp.sum(weights, axis=-1)

    def reached(limits: Array) -> Array:
        sums = _sums_from(weights, keys, limits)
        # A share that float32 takes for nothing is part of the greatest one's weight.
        return (sums >= target[:, None]) & (sums > 0)

    least = LEAST_KEY if floor is None else floor
    return jnp.where(share < 1, jnp.maximum(_largest(reached, keys), least), least)


def _largest(
    reached: Callable[[Int32[Array, "rows limits"]], Bool[Array, "rows limits"]],
    keys: Int32[Array, "rows vocab"],
) -> Int32[Array, "rows"]:
    """Return the largest number that is reached, where smaller ones are too."""
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.int32)[None]

    def decide(index: Array, found: Array) -> Array:
        shift = 32 - _DIGIT_BITS - _DIGIT_BITS * jnp.asarray(index, jnp.int32)
        limits = found[:, None] + (digits << shift)
        digit = jnp.sum(reached(limits), axis=-1, dtype=jnp.int32)
        return found + (digit << shift)

    def search(unroll: bool) -> Array:
        first = jnp.full_like(keys[:, 0], LEAST_KEY)
        return lax.fori_loop(0, _NUM_DIGITS, decide, first, unroll=unroll)

    # Unrolled, all passes are nodes of one CUDA graph. A CPU gains nothing by that, and
    # compiles three times as long.
    return lax.platform_dependent(
        cuda=lambda: search(unroll=True), default=lambda: search(unroll=False)
    )


def _sums_from(values: Array, keys: Array, limits: Array) -> Array:
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
