"""Expand of gate and up with SiLU on Hopper, where warp groups share the work.

One group asks for rows and B ahead of two that multiply: those of many rows are read at
the memory's rate, where Triton's form (`_fused`) waits for its layouts. Knows windows
of rows that follow each other in the batch and among the entries.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._dispatch import has_warpgroups, multiprocessors
from punica_jax.pallas_kernels._launch import GROUP, PROGRAM, warpgroup_call
from punica_jax.pallas_kernels._page_tiles import AdapterPages, silu_product
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import add_splits
from punica_jax.pallas_kernels._warpgroups import (
    ALIGNED_ROWS,
    GROUP_ROWS,
    GROUPS,
    STAGES,
    WINDOW_ROWS,
    barriers,
    load,
    stage_of,
    store_rows,
    tiled_memory,
)

_BLOCK_N = 128
# Blocks of a turn, which share what they multiply by B: 16384 rows take 282 us so, 286
# with twice as many, 291 with half (one H200; 15 more with the launch by tiles).
_TURN_BLOCKS = 22
# Of fewer rows a program has a turn or two, and 24 rows that decode beside prompts of
# 8192 rows make a third: 234 us, by tiles 193.
_MANY_ROWS = 16384
# Rows that follow each other and make windows.
_LONG_RUN = 16


class _Window(NamedTuple):
    """Some rows that follow each other, of one adapter; scalars.

    Attributes:
      slot: the adapter's, -1 for none.
      first: its first row; the window's rows are the 128 from here on.
      begin, end: which of them are the window's own.
      entry: that of `first`, were it the window's own: -7 at least.
    """

    slot: Array
    first: Array
    begin: Array
    end: Array
    entry: Array


def fits(y: Array, pool: LoraPool, segments: Segments) -> bool:
    """Whether this form runs, and is the faster one; a function of static things."""
    rows, width = y.shape[0], y.shape[1] // 2
    return (
        has_warpgroups()
        and rows >= _MANY_ROWS
        and rows % ALIGNED_ROWS == 0
        and width % _BLOCK_N == 0
        and y.dtype == pool.dtype
        and y.dtype.itemsize == 2
        and segments.num_passes == 1
    )


# A function of its own is traced and lowered once for all layers, for 0.3 s each.
@jax.jit
def warpgroup_gated(
    y: Array, v: Array, pool: LoraPool, segments: Segments
) -> tuple[Array, Segments]:
    """Run `gated_expand` where rows of an adapter follow each other, if it `fits`.

    Returns:
      `[rows, width]`, and segments whose tiles are those with the other rows: of
      windows they would need one each.
    """
    rows, width = y.shape[0], y.shape[1] // 2
    windows, num_windows, tile_end = _divided(segments)
    v = add_splits(list(v))
    if segments.weights is not None:
        v = v * segments.weights[0][:, None]
    # A window may begin before the first entry, and end after the last one.
    v = jnp.pad(v.astype(pool.dtype), ((ALIGNED_ROWS, WINDOW_ROWS), (0, 0)))

    shared = functools.partial(tiled_memory, dtype=y.dtype)
    page = RANK_PAGE, _BLOCK_N
    h = warpgroup_call(
        _gated_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, width), y.dtype),
        scratch_types=[
            shared(STAGES, 2, WINDOW_ROWS, _BLOCK_N),  # y
            shared(STAGES, 2, *page, swizzle=32),  # b's first pages
            shared(STAGES, *page, swizzle=32),  # b's others
            shared(GROUPS, GROUP_ROWS, _BLOCK_N),  # h
            plgpu.SMEM((GROUPS, GROUP_ROWS, _BLOCK_N), y.dtype),  # h, row by row
            (barriers(STAGES, 4), barriers(STAGES, GROUPS)),
            (barriers(STAGES), barriers(STAGES, GROUPS)),
        ],
        num_programs=multiprocessors(),
        num_groups=GROUPS + 1,
        name="lora_gated_warpgroups",
    )(y, v, pool.b, *pool.tables, windows, num_windows)
    return h, dataclasses.replace(segments, tile_end=tile_end)


def _divided(segments: Segments) -> tuple[Array, Array, Array]:
    """Cut long runs into windows, and empty the tiles without other entries.

    A run is entries of one slot whose rows follow each other.

    Returns:
      `i32[most windows, 5]`, of `_Window` each; `i32[1]`, how many are used; and
      `i32[1, tiles]`, the tiles' ends.
    """
    rows, slots = segments.rows[0], segments.slots[0]
    entry = jnp.arange(rows.size, dtype=jnp.int32)
    goes_on = (slots[1:] == slots[:-1]) & (rows[1:] == rows[:-1] + 1)
    starts = jnp.append(jnp.bool_(True), ~goes_on)
    start = lax.cummax(jnp.where(starts, entry, 0))
    ends = jnp.append(starts[1:], jnp.bool_(True))
    end = lax.cummin(jnp.where(ends, entry + 1, rows.size), reverse=True)
    is_long = end - start >= _LONG_RUN
    place = rows - rows[start] // ALIGNED_ROWS * ALIGNED_ROWS
    place = lax.rem(place, jnp.int32(WINDOW_ROWS))
    begins = is_long & (starts | (place == 0))
    # A long run takes no more than one for each 16 of its rows.
    most = max(1, rows.size // _LONG_RUN)
    [at] = jnp.nonzero(begins, size=most, fill_value=rows.size - 1)
    begin = place[at]
    length = jnp.minimum(end[at] - at.astype(jnp.int32), WINDOW_ROWS - begin)
    first_entry = at.astype(jnp.int32) - begin
    table = [slots[at], rows[at] - begin, begin, begin + length, first_entry]
    before = jnp.append(0, jnp.cumsum(~is_long, dtype=jnp.int32))
    tile_first, tile_end = segments.tile_first, segments.tile_end
    has_others = before[tile_end] > before[tile_first]
    return (
        jnp.stack(table, axis=1),
        begins.sum(dtype=jnp.int32)[None],
        jnp.where(has_others, tile_end, tile_first),
    )


def _gated_kernel(
    y_ref,  # [rows, 2 * width]
    v_ref,  # [8 + entries + 128, 2 * max_rank]
    b_ref,  # [layers * pages, 16, 2 * width]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[layers * slots, 2]
    layer_ref,  # i32[1]
    windows_ref,  # i32[most windows, 5]
    num_windows_ref,  # i32[1]
    h_ref,  # [rows, width]
    y_shared,  # [stages, 2, 128, block_n]
    b_shared,  # [stages, 2, 16, block_n]
    more_shared,  # [stages, 16, block_n]
    h_shared,  # [groups, 64, block_n]
    rows_shared,  # [groups, 64, block_n], as they lie in h
    block_barriers,  # loaded and used: a stage's
    more_barriers,  # loaded and used: a stage's
):
    width = h_ref.shape[1]
    program, group = (lax.axis_index(name) for name in (PROGRAM, GROUP))
    num_programs = lax.axis_size(PROGRAM)
    num_blocks = pl.cdiv(width, _BLOCK_N)
    num_parts = pl.cdiv(num_blocks, _TURN_BLOCKS)
    part_blocks = pl.cdiv(num_blocks, num_parts)
    # A program's turns: a part of the columns of a window each.
    num_turns = pl.cdiv(num_windows_ref[0] * num_parts - program, num_programs)

    def turn(i: Array) -> tuple[_Window, list[AdapterPages], Array, Array]:
        nth = program + i * num_programs
        number, part = (op(nth, jnp.int32(num_parts)) for op in (lax.div, lax.rem))
        window = _Window(*(windows_ref[number, column] for column in range(5)))
        tables = page_table_ref, num_pages_ref, layer_ref
        pages = [AdapterPages.of(tables, b_ref, window.slot, m) for m in range(2)]
        first = part * part_blocks
        return window, pages, first, jnp.minimum(num_blocks, first + part_blocks)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def load_turn(i, steps):
            window, pages, first, end = turn(i)
            ask = functools.partial(
                _load_block,
                y_ref,
                b_ref,
                (y_shared, b_shared, *block_barriers),
                (more_shared, *more_barriers),
                window,
                pages,
            )
            return lax.fori_loop(first, end, ask, steps)

        lax.fori_loop(0, num_turns, load_turn, (jnp.int32(0), jnp.int32(0)))

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def multiply_turn(i, steps):
            window, pages, first, end = turn(i)
            entry = ALIGNED_ROWS + window.entry + group * GROUP_ROWS

            def load_v(module: int, page: Array | int) -> Array:
                column = module * (v_ref.shape[1] // 2) + page * RANK_PAGE
                at = v_ref.at[pl.ds(entry, GROUP_ROWS), pl.ds(column, RANK_PAGE)]
                return load(at, optimized=False)

            firsts = [load_v(module, 0) for module in range(2)]

            def work(block, steps):
                gate, up, *steps = _add_products(
                    group,
                    (y_shared, b_shared, *block_barriers),
                    (more_shared, *more_barriers),
                    pages,
                    firsts,
                    load_v,
                    *steps,
                )
                columns = pl.ds(block * _BLOCK_N, _BLOCK_N)
                store_rows(
                    window,
                    group,
                    silu_product(gate, up).astype(h_ref.dtype),
                    lambda rows: h_ref.at[rows, columns],
                    h_shared.at[group],
                    rows_shared.at[group],
                )
                return tuple(steps)

            return lax.fori_loop(first, end, work, steps)

        lax.fori_loop(0, num_turns, multiply_turn, (jnp.int32(0), jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)


def _load_block(
    y_ref,  # [rows, 2 * width]
    b_ref,  # [layers * pages, 16, 2 * width]
    blocks,  # shared memory of y and b, its barriers: loaded and used
    more,  # of b's other pages, its barriers
    window: _Window,
    pages: list[AdapterPages],
    block: Array,
    steps: tuple[Array, Array],  # blocks so far, and other pages
) -> tuple[Array, Array]:
    """Ask for a block of a window's rows, and for B of its adapter."""
    y_shared, b_shared, loaded, used = blocks
    more_shared, more_loaded, more_used = more
    step, more_step = steps
    stage, width = stage_of(step), y_ref.shape[1] // 2
    pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(used.at[stage]))
    rows = pl.ds(window.first, WINDOW_ROWS)
    columns = [pl.ds(m * width + block * _BLOCK_N, _BLOCK_N) for m in range(2)]
    for module, (own, at) in enumerate(zip(pages, columns, strict=True)):
        plgpu.copy_gmem_to_smem(
            y_ref.at[rows, at], y_shared.at[stage, module], loaded.at[stage]
        )
        page = jnp.where(own.count > 0, own.page, 0)
        plgpu.copy_gmem_to_smem(
            b_ref.at[page, :, at], b_shared.at[stage, module], loaded.at[stage]
        )
    for own, at in zip(pages, columns, strict=True):

        def load_page(number, step, own=own, at=at):
            stage = stage_of(step)
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(more_used.at[stage]))
            page = own.first + own.page_table_ref[own.slot, number]
            plgpu.copy_gmem_to_smem(
                b_ref.at[page, :, at], more_shared.at[stage], more_loaded.at[stage]
            )
            return step + 1

        more_step = lax.fori_loop(1, own.count, load_page, more_step)
    return step + 1, more_step


def _add_products(
    group: Array,
    blocks,  # shared memory of y and b, its barriers: loaded and used
    more,  # of b's other pages, its barriers
    pages: list[AdapterPages],
    firsts: list[Array],  # [64, 16] each, v of the first pages
    load_v,  # of others
    step: Array,
    more_step: Array,
) -> tuple[Array, Array, Array, Array]:
    """Return gate and up, `f32[64, block_n]`, of a group's rows, and the steps."""
    y_shared, b_shared, loaded, used = blocks
    more_shared, more_loaded, more_used = more
    stage = stage_of(step)
    plgpu.barrier_wait(loaded.at[stage])
    rows = pl.ds(group * GROUP_ROWS, GROUP_ROWS)
    sums = []
    for module, (own, v) in enumerate(zip(pages, firsts, strict=True)):
        y = load(y_shared.at[stage, module, rows])

        def add(_, acc, v=v, b=b_shared.at[stage, module]):
            return _add_product(v, b, acc)

        # What a module without pages has of v is anything.
        num_first = jnp.minimum(own.count, 1)
        sums.append(lax.fori_loop(0, num_first, add, y.astype(jnp.float32)))
    plgpu.barrier_arrive(used.at[stage])
    for module, own in enumerate(pages):

        def add_page(number, carry, module=module):
            step, acc = carry
            stage = stage_of(step)
            v = load_v(module, number)
            plgpu.barrier_wait(more_loaded.at[stage])
            acc = _add_product(v, more_shared.at[stage], acc)
            plgpu.barrier_arrive(more_used.at[stage])
            return step + 1, acc

        more_step, sums[module] = lax.fori_loop(
            1, own.count, add_page, (more_step, sums[module])
        )
    return *sums, step + 1, more_step


def _add_product(v: Array, b_shared, acc: Array) -> Any:
    def add(ref):
        plgpu.wgmma(ref, v, b_shared)

    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
