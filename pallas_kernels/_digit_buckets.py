"""What the values of a chunk come to in each bucket of a digit: counts, or weights.

Runs inside kernels, but for the order of values. Knows keys, digits and weights;
nothing of launches or of what is searched.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from punica_jax.pallas_kernels._page_tiles import load

# Below the key of every value, NaN included.
LEAST_KEY = -(2**31)
# Counts of a chunk fit into 16 bits.
MAX_CHUNK = 2**15
# The reciprocal of what is above is subnormal, which a CPU takes for 0.
MAX_TEMPERATURE = 2.0**125


class Weighing(NamedTuple):
    """What weighs a value: `exp((value - top) / temperature)`, 0 below a key.

    Attributes:
      top: `f32[rows]`, the greatest value, which weighs 1 at any temperature.
      temperature: `f32[rows]`.
      floor: `i32[rows]`, the least key that weighs anything; None for all.
    """

    top: Array
    temperature: Array
    floor: Array | None = None


def order_keys(values: Array) -> Array:
    """Return `i32` keys that are ordered as `f32` values are, equal where they are.

    No difference is lost: not that of subnormals, which a CPU takes for zeros.
    """
    # A sign and a magnitude, as one number: -0.0 is 0.
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, jnp.int32(LEAST_KEY) - bits, bits)


class Tile(NamedTuple):
    """Neighbours of a row, four a thread: loads of 16 bytes.

    Attributes:
      values: `f32[1, lanes]`.
      inside: `bool[1, lanes]`, which are the row's; None for all.
    """

    values: Array
    inside: Array | None


def read_chunk(
    values_ref,  # f32[rows, vocab]
    row: Array,
    start: Array,
    chunk: int,
    lanes: int,
) -> list[Tile]:
    """Load a chunk; all of it is on its way before the first of it is waited for."""
    vocab = values_ref.shape[1]
    lane = jnp.arange(lanes, dtype=jnp.int32)[None, :]
    places = [start + step * lanes + lane for step in range(chunk // lanes)]
    insides = [None if vocab % chunk == 0 else place < vocab for place in places]
    return [
        Tile(load(values_ref.at[row, place], inside), inside)
        for place, inside in zip(places, insides, strict=True)
    ]


def digit_in(tile: Tile, found: Array, shift: Array) -> Array:
    """Return values' digits; what is in no bucket of `found` has one above all others.

    Above as unsigned numbers: a key below `found` is far beyond the last bucket. (But
    far below a floor, which need not end in zeros, it may have any, and weighs 0.)
    """
    key = order_keys(tile.values)
    return lax.shift_right_logical(key - found, jnp.broadcast_to(shift, key.shape))


def folded(
    digits: list[tuple[Array, Tile]], num_buckets: int
) -> tuple[tuple[Array, Tile], Array]:
    """Return a tile of what a chunk has in buckets, and whether no lane has two of it.

    Then the tile's sums are the chunk's, bit for bit.
    """
    digit, value = jnp.full_like(digits[0][0], num_buckets), digits[0][1].values
    count = jnp.zeros_like(digit)
    for other, tile in digits:
        here = (other >= 0) & (other < num_buckets)
        if tile.inside is not None:
            here &= tile.inside
        digit = jnp.where(here, other, digit)
        value = jnp.where(here, tile.values, value)
        count += here.astype(count.dtype)
    # (JAX 0.12 lowers no maximum over two axes.)
    return (digit, Tile(value, None)), jnp.max(count.reshape(-1)) < 2


def counts_in(digits: list[tuple[Array, Tile]], num_buckets: int) -> Array:
    """Return `f32[buckets]`: how many values of a chunk each has.

    Eight buckets share a 32-bit word, 4 bits each: one shift and one addition count a
    value for all of them, where a comparison with each takes 2 or 3 instructions.
    """
    fields = min(num_buckets, 8)
    width = fields.bit_length() - 1
    bucket = jnp.arange(num_buckets, dtype=jnp.int32)[None, :]
    # Of a word, a sum over lanes takes two fields at once, of 16 bits: i and i + 4.
    pair = jnp.arange(4, dtype=jnp.int32)[:, None]
    counts = jnp.zeros((num_buckets,), jnp.int32)
    for word in range(num_buckets // fields):
        pairs = jnp.zeros((4, digits[0][0].size), jnp.int32)
        # Eight at most, as a field of 4 bits holds.
        for first in range(0, len(digits), 8):
            packed = jnp.zeros(digits[0][0].shape, jnp.int32)
            for digit, tile in digits[first : first + 8]:
                one = _shift_left(1, 4 * (digit & (fields - 1)))
                here = _shift_right(digit, width) == word
                if tile.inside is not None:
                    here &= tile.inside
                packed += jnp.where(here, one, 0)
            pairs += _shift_right(packed, 4 * pair) & 0x000F000F
        sums = pairs.sum(axis=1, dtype=jnp.int32)[:, None]
        field = bucket & (fields - 1)
        count = _shift_right(sums, 16 * _shift_right(field, 2)) & 0xFFFF
        mine = (_shift_right(bucket, width) == word) & ((field & 3) == pair)
        counts += jnp.where(mine, count, 0).sum(axis=0, dtype=count.dtype)
    return counts.astype(jnp.float32)


def _shift_left(value: Any, places: Any) -> Array:
    return lax.shift_left(*jnp.broadcast_arrays(jnp.int32(value), jnp.int32(places)))


def _shift_right(value: Any, places: Any) -> Array:
    """Shift right; what comes in is 0, for negative numbers too."""
    value, places = jnp.broadcast_arrays(jnp.int32(value), jnp.int32(places))
    return lax.shift_right_logical(value, places)


def weights_in(
    digits: list[tuple[Array, Tile]], num_buckets: int, weigh: Callable[..., Array]
) -> Array:
    """Return `f32[buckets]`: what the values of a chunk weigh in each.

    Eight buckets at a time: with a sum for each of 32 a thread has 168 registers, not
    76, and an SM of an H200 has room for 3 programs, not 6.
    """
    weighed = [(digit, weigh(tile)) for digit, tile in digits]
    bucket = jnp.arange(num_buckets, dtype=jnp.int32)[None, :]
    fields = min(num_buckets, 8)
    total = jnp.zeros((num_buckets,), jnp.float32)
    for first in range(0, num_buckets, fields):
        some = jnp.arange(fields, dtype=jnp.int32)[:, None] + first
        sums = jnp.zeros((fields, digits[0][0].size), jnp.float32)
        for digit, weight in weighed:
            sums += jnp.where(digit == some, weight, 0.0)
        row = sums.sum(axis=1)
        if fields == num_buckets:
            return row
        total += jnp.where(bucket == some, row[:, None], 0.0).sum(axis=0)
    return total


def weighing_of(row: Array, weighing: Weighing) -> Callable[[Tile], Array]:
    """Return what weighs a tile's values, 0 outside of the row.

    Args:
      weighing: of refs.
    """
    top = weighing.top[row]
    rate = math.log2(math.e) / jnp.minimum(weighing.temperature[row], MAX_TEMPERATURE)
    floor = None if weighing.floor is None else weighing.floor[row]

    def weigh(tile):
        distance = tile.values - top
        # At a tiny temperature the rate is infinite, and 0 times it is a 1.
        weight = jnp.exp2(jnp.where(distance == 0, 0.0, distance * rate))
        if floor is not None:
            weight = jnp.where(order_keys(tile.values) >= floor, weight, 0.0)
        if tile.inside is not None:
            weight = jnp.where(tile.inside, weight, 0.0)
        return weight

    return weigh
