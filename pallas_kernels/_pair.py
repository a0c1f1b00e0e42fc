"""Shrink and expand of a few rows in one launch: less than the latency of two.

A shrink's programs are the launch's first. Those of the expand look up their pages, and
ask for B and y, while these still work; then they wait for their own tile's. (In a
crowd they wait first: hardly one begins so early.) A GPU begins programs in the order
of their numbers, so whoever is waited for runs already
(as a scan in one pass has it: Merrill and Garland, 2016). The sums and their order are
those of two launches. Knows pools and segments as arrays; nothing of models.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._counts import count_stored, counts_of, set_to_zero
from punica_jax.pallas_kernels._expand import expand, expand_config_of, expand_kernel
from punica_jax.pallas_kernels._launch import compiled_once, given, pallas_call
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import DEFAULT_BLOCK_ROWS, Segments
from punica_jax.pallas_kernels._sgmv_config import (
    MAX_PROJECT_ROWS,
    Crowd,
    ExpandConfig,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink import shrink, shrink_kernel

# For a shrink two would do, and an expand to many columns has eight: 64 rows of 8
# adapters to 4096 columns take 6.6 us so, with two 7.1, with eight 7.0; in two launches
# 7.3 (one H100).
_NUM_WARPS = 4
# With 512, as an expand of its own has, 64 rows of 8 adapters to 11008 columns take 8.4
# us, not 7.4, of 64 adapters 22.4, not 20.6; in two launches 9.2 and 20.5.
_MAX_BLOCK_N = 256
# Where many tiles have an adapter a program takes the columns of so many: what each
# begins with, from its tile to v, takes longer than to read its share of B. 64 rows of
# 64 adapters of rank 16 to 3 x 4096 columns take 27.6 us so, 31.0 without, and with two
# or four 29.4, 29.1; of rank 64 to 11008 columns 51.9, 57.6, 52.1, 54.3. Few adapters
# pay for it: 8 of rank 64 to 11008 columns take 14.1, not 13.2 (one H100).
# To few columns it takes those of two: 64 rows of one adapter of rank 64 to 4096 take
# 8.4 us, not 8.8, of 64 of rank 16, 11008 wide, 19.4, not 20.4.
_SHARES = 3
_FEW_SHARES, _FEW_COLUMNS = 2, 4096
# If so many programs are left: with 352, 32 rows of 32 adapters of rank 16 to 4096
# columns take 11.0 us, not 9.5.
_LEAST_PROGRAMS = 400
# To few, of single pages: with 512 those take 10.4. (Of rank 64 18.9, not 19.7.)
_LEAST_SMALL_PROGRAMS = 580
# Of their columns at once, where adapters may have several pages: with 256 the memory
# for copies leaves room for two programs instead of five, and those 8 take 15.4 us.
_MAX_CROWD_BLOCK_N = 128
# Of so few tiles a program shrinks one page, and has four blocks of it on their way,
# not two. A row of rank 64 takes 5.5 us so, not 6.7, 11008 wide 6.4, not 8.8; 8 rows of
# one adapter of rank 16 and 64 5.7 and 6.4, not 6.0 and 6.9, of 8 adapters 6.5 and 9.2,
# not 6.7 and 9.4. (Of rank 16 where others may have 64 7.8, not 7.1.) Of 16 rows, too,
# those of one adapter gain; those of 16 of rank 64 lose 11 % (one H100).
_MOST_SHORT_TILES, _MOST_SHORT_PAGES = 8, 4
_SHORT_STAGES = 5
# In a count, one program that waits; below it those are counted that are waited for.
_WAITING = 1 << 16
_MAX_WAITING = 2**31 // _WAITING


def fits(segments: Segments) -> bool:
    """Whether one launch is the faster way; of static things.

    Of 512 rows those of rank 16 take 5 to 12 % less so, to 4096 columns, and those of
    rank 64 2 to 8 % more (one H100).
    """
    return segments.num_passes == 1 and segments.num_rows <= MAX_PROJECT_ROWS


@compiled_once
def shrink_and_expand(
    y: Array, x: Array, pool: LoraPool, segments: Segments, *, interpret: bool = False
) -> Array:
    """Launch shrink and expand: at once if that `fits`, else one after the other."""

    def in_two(y, x, pool, segments):
        windowed = expand_config_of(pool, segments).windowed
        v = shrink(x, pool, segments, for_windows=windowed, interpret=interpret)
        return expand(y, v, pool, segments, interpret=interpret)

    @jax.custom_batching.custom_vmap
    def in_one(y, x, pool, segments):
        return _launch(y, x, pool, segments, interpret)

    @in_one.def_vmap
    def _(axis_size, in_batched, *operands):
        # Programs of several batches must not count by the same tiles.
        axes = jax.tree.map(lambda batched: 0 if batched else None, list(in_batched))
        return jax.vmap(in_two, axes, axis_size=axis_size)(*operands), True

    return (in_one if fits(segments) else in_two)(y, x, pool, segments)


def _launch(
    y: Array, x: Array, pool: LoraPool, segments: Segments, interpret: bool
) -> Array:
    shrinks = shrink_config(pool.d_in, pool.dtype)
    expands = _config(pool, segments)
    num_expands = sum(expands.programs(pool.d_outs))
    num_tiles, max_pages = segments.num_tiles, pool.page_table.shape[1]
    is_short = _is_short(pool, segments, expands)
    by_page = is_short and max_pages > 1
    num_shrinks = shrinks.splits * pool.num_modules * (max_pages if by_page else 1)
    assert num_shrinks < _WAITING, num_shrinks
    assert num_expands < _MAX_WAITING, num_expands
    v = jax.ShapeDtypeStruct(
        (shrinks.splits, segments.num_rows, pool.num_modules * pool.max_rank),
        jnp.float32,
    )
    counts = counts_of(jnp.minimum(segments.tile_slot[0], -1) + 1)
    options = given(weights=segments.weights)
    tables = launch_tables(pool, segments)
    shrink = functools.partial(
        shrink_kernel,
        num_programs=num_shrinks,
        block_rows=segments.block_rows,
        joint=False,
        windowed=False,
        by_page=by_page,
        part_size=1,
        config=shrinks,
    )
    expand = functools.partial(
        expand_kernel,
        option_names=tuple(options),
        number=0,
        block_rows=segments.block_rows,
        d_outs=pool.d_outs,
        d_out_offsets=pool.d_out_offsets,
        config=expands,
    )
    return pallas_call(
        functools.partial(
            _kernel,
            num_tables=len(tables),
            shrink=shrink,
            num_shrinks=num_shrinks,
            expand=expand,
            interpret=interpret,
        ),
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype), v],
        grid=(num_tiles * (num_shrinks + num_expands),),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(
            num_warps=_NUM_WARPS,
            num_stages=_SHORT_STAGES if is_short else shrinks.num_stages,
        ),
        interpret=interpret,
        name="lora_pair",
    )(y, x, pool.a, pool.b, counts, segments.slots, *tables, *options.values())[0]


def _is_short(pool: LoraPool, segments: Segments, expands: ExpandConfig) -> bool:
    """Whether a launch has so few programs that they wait for their loads alone.

    More pages, wider tiles (whose copies are larger) and crowds were not measured.
    """
    return (
        segments.num_tiles <= _MOST_SHORT_TILES
        and segments.block_rows <= DEFAULT_BLOCK_ROWS
        and pool.page_table.shape[1] <= _MOST_SHORT_PAGES
        and not expands.may_crowd(segments.num_tiles)
    )


def _config(pool: LoraPool, segments: Segments) -> ExpandConfig:
    """Return how a launch's expand is cut."""
    config = expand_config_of(pool, segments)
    block_n = min(config.block_n, _MAX_BLOCK_N)
    config = dataclasses.replace(config, block_n=block_n)
    max_pages = pool.page_table.shape[1]
    # (Crowds of float32, or of more pages than are loaded at once, were not measured.)
    if pool.dtype.itemsize > 2 or max_pages > config.pages_at_once:
        return config
    few = sum(pool.d_outs) <= _FEW_COLUMNS
    shares = _FEW_SHARES if few else _SHARES
    least = _LEAST_SMALL_PROGRAMS if few and max_pages == 1 else _LEAST_PROGRAMS
    crowd = Crowd(
        shares=shares,
        least_tiles=pl.cdiv(least, sum(config.programs(pool.d_outs, shares))),
        block_n=block_n if max_pages == 1 else min(block_n, _MAX_CROWD_BLOCK_N),
    )
    return dataclasses.replace(config, crowd=crowd)


def _kernel(
    y_in_ref,  # [rows, d_out]
    x_ref,  # [rows, d_in]
    a_ref,  # [layers * pages, C, 16, d_in]
    b_ref,  # [layers * pages, 16, d_out]
    counts_ref,  # i32[tiles, stride]
    slots_ref,  # i32[passes, rows]
    *refs,  # of `launch_tables`; the options; y_ref, and v_ref f32[splits, rows, ...]
    num_tables: int,
    shrink: Callable[..., None],
    num_shrinks: int,  # programs of a tile
    expand: Callable[..., None],
    interpret: bool,
):
    tables, (*options, y_ref, v_ref) = refs[:num_tables], refs[num_tables:]
    program = pl.program_id(0)
    first_expand = counts_ref.shape[0] * num_shrinks

    def stored(tile):
        count_stored(counts_ref, tile, interpret=interpret)

    def await_v(tile, num_expands):
        _await(counts_ref, tile, num_shrinks, num_expands)

    @pl.when(program < first_expand)
    def _():
        own = x_ref, a_ref, *tables, slots_ref, v_ref
        shrink(*own, place=program, stored=stored)

    @pl.when(program >= first_expand)
    def _():
        own = y_in_ref, v_ref, b_ref, *tables, *options, y_ref
        expand(*own, place=program - first_expand, await_v=await_v)


def _await(counts_ref: Any, tile: Array, num_stored: int, num_waiting: Array) -> None:
    """Wait until so many programs have stored their part of a tile's v.

    Whoever is the last to come sets the count to zero; who sees that goes on, too.
    """
    waiting = jnp.int32(_WAITING)
    before = plgpu.atomic_add(counts_ref, (tile, jnp.int32(0)), waiting)

    def too_few(count):
        return (lax.rem(count, waiting) < num_stored) & (count >= waiting)

    def look(count):
        # Interpret mode refuses a loop that writes and has constants.
        nothing = count - count
        return plgpu.atomic_add(counts_ref, (tile, nothing), nothing)

    lax.while_loop(too_few, look, before + waiting)

    @pl.when(lax.div(before, waiting) == num_waiting - 1)
    def _():
        set_to_zero(counts_ref, tile)
