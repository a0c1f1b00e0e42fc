"""The largest key that enough of a row reaches, digit by digit: Pallas Triton kernels.

Knows launches and sums; nothing of how a chunk's values are sorted into buckets
(`_digit_buckets`), of tokens or filters, nor of what else finds limits (`_thresholds`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._digit_buckets import (
    LEAST_KEY,
    Weighing,
    counts_in,
    digit_in,
    folded,
    order_keys,
    read_chunk,
    weighing_of,
    weights_in,
)
from punica_jax.pallas_kernels._digit_config import COUNTING, WEIGHING, DigitConfig
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call
from punica_jax.pallas_kernels._page_tiles import load, mask_of

# Above it, counts are no longer exact in float32.
MAX_VOCAB = 2**24
# The key of the least number that is not subnormal.
_LEAST_NORMAL = 1 << 23


class _Search(NamedTuple):
    """What is known of a row's limit.

    Attributes:
      found: `i32[]`, the key's digits so far, the others 0.
      above: `f32[]`, the sum of what those digits are too small for.
      target: `f32[]`, the sum to reach; a share's is 0 before anything is summed up.
    """

    found: Array
    above: Array
    target: Array


@compiled_once
def largest_reaching(
    values: Array,
    goal: Array,
    weighing: Weighing | None = None,
    *,
    name: str,
    config: DigitConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Launch the search for the largest key from which on a row's values reach a goal.

    One launch a digit: its programs decide the digit before, by that launch's sums,
    and sum up what lies in each bucket of their own. A chunk that has nothing in the
    bucket that is left is not read again; a row of which nothing is asked is not read
    at all. All that weighs lies between a row's floor and its greatest value: digits
    above the highest bit of their difference are 0, and need no sums.

    Args:
      values: `f32[rows, vocab]`.
      goal: without weights `i32[rows]`, how many values; 0 or less asks for nothing.
        With weights `f32[rows]`, above 0, which share of all; 1 or more is everything.
      weighing: the weights, or None to count.
      name: of the launches.

    Returns:
      `i32[rows]`; the floor, or `LEAST_KEY` without one, where nothing is asked for,
      where everything is, and where everything is not enough.
    """
    if config is None:
        config = COUNTING if weighing is None else WEIGHING
    rows, vocab = values.shape
    assert vocab <= MAX_VOCAB, vocab
    chunk = min(config.chunk, pl.next_power_of_2(vocab))
    options = [] if weighing is None else [x for x in weighing if x is not None]
    shape = functools.partial(jax.ShapeDtypeStruct, (rows,))
    found, number = shape(jnp.int32), shape(jnp.float32)
    grid = rows, pl.cdiv(vocab, chunk)
    has_floor = weighing is not None and weighing.floor is not None
    state: list[Array] = []
    for index, (bits, shift) in enumerate(
        zip(config.digits, config.shifts, strict=True)
    ):
        # From the second on, launches of the same widths that read and fold in the same
        # way are one program to the compiler: the shift is data.
        state = pallas_call(
            functools.partial(
                _digit_kernel,
                num_options=len(options),
                num_inputs=len(state),
                chunk=chunk,
                lanes=min(chunk, 128 * config.num_warps),
                eager=index < config.num_eager,
                folds=has_floor or index >= config.num_eager,
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*grid, 1 << bits), jnp.float32),
                *(found, number, number),
            ],
            grid=grid,
            compiler_params=plgpu.CompilerParams(
                num_warps=config.num_warps, num_stages=1
            ),
            interpret=interpret,
            name=f"{name}_digit",
        )(np.full((1,), shift, np.int32), values, goal, *options, *state)
    return pallas_call(
        _limit_kernel,
        out_shape=found,
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name=f"{name}_limit",
    )(goal, *state)


def _digit_kernel(
    shift_ref,  # i32[1]
    values_ref,  # f32[rows, vocab]
    goal_ref,  # i32[rows], or f32[rows]: a share
    *refs,  # f32[rows], f32[rows], i32[rows] of `Weighing`; the last launch's; outputs
    num_options: int,
    num_inputs: int,
    chunk: int,
    lanes: int,
    eager: bool,
    folds: bool,
):
    row, part = pl.program_id(0), pl.program_id(1)
    options, refs = refs[:num_options], refs[num_options:]
    inputs, (sums_ref, *search_refs) = refs[:num_inputs], refs[num_inputs:]
    num_buckets = sums_ref.shape[2]
    bucket = jnp.arange(num_buckets, dtype=jnp.int32)
    shift, goal = shift_ref[0], goal_ref[row]
    place = shift + num_buckets.bit_length() - 1  # of the last launch's digit
    weighing = Weighing(*options) if options else None
    start = _Start.of(goal, weighing, row)
    read = functools.partial(read_chunk, values_ref, row, part * chunk, chunk, lanes)

    def sums_of(digits):
        if weighing is None:
            return counts_in(digits, num_buckets)
        return weights_in(digits, num_buckets, weighing_of(row, weighing))

    def store(sums):
        plgpu.store(sums_ref.at[row, part, bucket], sums)

    def skip():
        store(jnp.zeros((num_buckets,), jnp.float32))

    def store_search(search):
        @pl.when(part == 0)
        def _():
            for ref, value in zip(search_refs, search, strict=True):
                plgpu.store(ref.at[row], value)

    def sum_up(found, tiles=None):
        here = read() if tiles is None else tiles
        digits = [(digit_in(tile, found, shift), tile) for tile in here]
        if folds:
            tile, fits = folded(digits, num_buckets)
            store(lax.cond(fits, lambda: sums_of([tile]), lambda: sums_of(digits)))
        else:
            store(sums_of(digits))

    def decide():
        tiles = read() if eager else None
        search, busy = _decide(*inputs, goal=goal, row=row, part=part, place=place)
        store_search(search)
        lax.cond(busy, functools.partial(sum_up, search.found, tiles), skip)

    def go_on():
        if eager:
            decide()
            return
        # A chunk that had nothing in any bucket is out, whichever of them it is; all
        # that its program reads is that. The row's first one decides for the next.
        needed = (part == 0) | (jnp.sum(_sums_of(inputs[0], row, part)) != 0)
        lax.cond(needed, decide, skip)

    def begin():
        store_search(_Search(start.key, jnp.float32(0), jnp.float32(0)))
        lax.cond(start.reaches(shift), functools.partial(sum_up, start.key), skip)

    if inputs:
        lax.cond(start.reaches(place), go_on, begin)
    else:
        begin()


class _Start(NamedTuple):
    """Where a row's search begins.

    Attributes:
      key: `i32[]`, below which nothing counts.
      span: `i32[]`, as an unsigned number: how far above it the greatest key lies.
      is_asked: `bool[]`, whether there is anything to search for.
    """

    key: Array
    span: Array
    is_asked: Array

    @classmethod
    def of(cls, goal: Array, weighing: Weighing | None, row: Array) -> "_Start":
        """Return that of a row.

        Args:
          goal: of `largest_reaching`; one row's.
          weighing: of refs.
        """
        is_asked = goal > 0 if weighing is None else goal < 1.0
        key, span = jnp.int32(LEAST_KEY), jnp.int32(-1)
        if weighing is not None and weighing.floor is not None:
            key, top = weighing.floor[row], order_keys(weighing.top[row])
            # Whoever found it may take subnormal numbers for zeros.
            top = jnp.where(abs(top) < _LEAST_NORMAL, _LEAST_NORMAL, top)
            span = top - key
        return cls(key, span, is_asked)

    def reaches(self, place: Array) -> Array:
        """Whether a digit whose lowest bit is there can be more than 0."""
        return self.is_asked & (lax.shift_right_logical(self.span, place) != 0)


def _limit_kernel(
    goal_ref,  # as `_digit_kernel`'s
    sums_ref,  # f32[rows, chunks, buckets]
    found_ref,  # i32[rows]
    above_ref,  # f32[rows]
    target_ref,  # f32[rows]
    limit_ref,  # i32[rows]
):
    row = pl.program_id(0)
    search = _Search(found_ref[row], above_ref[row], target_ref[row])
    totals = search.above + _totals(sums_ref, row)
    target = _target(search, goal_ref[row], totals)
    limit = search.found + _digit_of(totals, target)
    plgpu.store(limit_ref.at[row], limit)


def _decide(
    sums_ref,  # f32[rows, chunks, buckets]
    *search_refs,
    goal: Array,
    row: Array,
    part: Array,
    place: Array,
) -> tuple[_Search, Array]:
    """Decide the last launch's digit, and whether a chunk has values in its bucket.

    Args:
      place: `i32[]`, of the digit's lowest bit.
    """
    bucket = jnp.arange(sums_ref.shape[2], dtype=jnp.int32)
    own = _sums_of(sums_ref, row, part)
    search = _Search(*(ref[row] for ref in search_refs))
    totals = search.above + _totals(sums_ref, row)
    target = _target(search, goal, totals)
    digit = _digit_of(totals, target)
    # Totals fall as digits rise: the greatest that is too small is the next digit's.
    above = jnp.max(jnp.where(bucket > digit, totals, search.above))
    found = search.found + lax.shift_left(digit, place)
    busy = jnp.sum(jnp.where(bucket == digit, own, 0.0)) != 0
    return _Search(found, above, target), busy


def _target(search: _Search, goal: Array, totals: Array) -> Array:
    """Return the sum to reach; a share's is known when all has been summed up once."""
    if not jnp.issubdtype(goal.dtype, jnp.floating):
        return goal.astype(jnp.float32)
    bucket = jnp.arange(totals.size, dtype=jnp.int32)
    # From the first bucket of the first digit on lies everything.
    whole = jnp.sum(jnp.where(bucket == 0, totals, 0.0))
    return jnp.where(search.target > 0, search.target, goal * whole)


def _sums_of(
    sums_ref,  # f32[rows, chunks, buckets]
    row: Array,
    part: Array,
) -> Array:
    bucket = jnp.arange(sums_ref.shape[2], dtype=jnp.int32)
    return plgpu.load(sums_ref.at[row, part, bucket])


def _totals(
    sums_ref,  # f32[rows, chunks, buckets]
    row: Array,
) -> Array:
    """Return `f32[buckets]`: the row's sum of each bucket and all above it."""
    _, num_parts, num_buckets = sums_ref.shape
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)[:, None]
    bucket = jnp.arange(num_buckets, dtype=jnp.int32)
    shape = part.size, bucket.size
    mask = None if part.size == num_parts else mask_of(shape, part < num_parts)
    sums = load(sums_ref.at[row, part, bucket[None, :]], mask).sum(axis=0)
    from_there = bucket[:, None] >= bucket[None, :]
    return jnp.where(from_there, sums[:, None], 0.0).sum(axis=0)


def _digit_of(totals: Array, target: Array) -> Array:
    """Return the greatest digit that reaches its target; 0 if none does."""
    bucket = jnp.arange(totals.size, dtype=jnp.int32)
    # A share that float32 takes for nothing is a part of the greatest value's weight.
    reached = (bucket > 0) & (totals >= target) & (totals > 0)
    return jnp.sum(reached, dtype=jnp.int32)
