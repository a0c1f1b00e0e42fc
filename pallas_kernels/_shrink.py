"""Shrink: the first half of SGMV as a Pallas (Triton) kernel.

Segmented gather matrix-vector products over rank pages (Punica, section 4): rows of one
adapter times its A. Knows pools and segments as arrays; nothing of models, names or
gradients.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._entries import leads_window, program_rows
from punica_jax.pallas_kernels._launch import (
    compiled_once,
    pallas_call,
    place_of_program,
    split_number,
)
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._page_tiles import AdapterPages, PageLanes, mask_of
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import (
    JOINT_ROWS,
    TILES_AT_ONCE,
    WINDOWED_ROWS,
    ShrinkConfig,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink_tile import shrink_modules


@compiled_once
def shrink(
    x: Array,
    pool: LoraPool,
    segments: Segments,
    *,
    config: ShrinkConfig | None = None,
    for_windows: bool = False,
    interpret: bool = False,
) -> Array:
    """Launch shrink; see `reference.shrink`.

    Args:
      for_windows: whether an expand by windows reads it, which has registers for four
        sums of its rows at most.

    Returns:
      `f32[n, passes * rows, C * max_rank]`, the sums of `n` splits, of groups of them,
      or of all. What an entry does not use is not written.
    """
    config = config or shrink_config(pool.d_in, pool.dtype)
    joint = segments.num_rows >= JOINT_ROWS
    windowed = segments.num_rows >= WINDOWED_ROWS
    whole = joint or pool.num_modules > 1
    part_size = config.part_size(
        segments.num_rows, whole=whole, for_windows=for_windows
    )
    num_parts = pl.cdiv(config.splits, part_size)
    num_programs = num_parts * (1 if joint else pool.num_modules)
    # One block more on its way where a program has one page of one module: 512 rows of
    # rank 16, 11008 to 4096 columns, take 14.9 us so, not 15.5, 2048 38.7, not 40.2
    # (both halves, bfloat16, one H100). With as many of four pages 2048 rows of rank 64
    # take 58.2, not 53.6.
    is_light = not joint and pool.num_modules == pool.page_table.shape[1] == 1
    shape = (num_parts, segments.rows.size, pool.num_modules * pool.max_rank)
    return pallas_call(
        functools.partial(
            shrink_kernel,
            num_programs=num_programs,
            block_rows=segments.block_rows,
            joint=joint,
            windowed=windowed,
            part_size=part_size,
            config=config,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(segments.tile_slot.size * num_programs,),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.window_warps if windowed else config.num_warps,
            num_stages=config.num_stages + 1 if is_light else config.num_stages,
        ),
        interpret=interpret,
        name="lora_shrink",
    )(x, pool.a, *launch_tables(pool, segments), segments.slots)


def shrink_kernel(
    x_ref,  # [rows, d_in]
    a_ref,  # [layers * pages, C, 16, d_in]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[layers * slots, C]
    layer_ref,  # i32[1]
    rows_ref,  # i32[passes, rows]
    tile_slot_ref,  # i32[passes, tiles]
    tile_first_ref,  # i32[passes, tiles]
    tile_end_ref,  # i32[passes, tiles]
    slots_ref,  # i32[passes, rows]
    v_ref,  # f32[parts, passes * rows, C * max_rank]
    *,
    num_programs: int,  # of a tile
    block_rows: int,
    joint: bool,  # a program shrinks all modules
    windowed: bool,  # and all tiles of its slot that begin in a window
    by_page: bool = False,  # a program shrinks one page
    part_size: int,
    config: ShrinkConfig,
    place: Array | None = None,  # of the program; where it is not the launch's own
    stored: Callable[[Array], None] = lambda tile: None,
):
    """Store one program's part of a tile's v, and call `stored` if there was any."""
    num_passes, num_tiles = tile_slot_ref.shape
    place = pl.program_id(0) if place is None else place
    tile, program = place_of_program(
        place, num_passes * num_tiles, num_programs, TILES_AT_ONCE
    )
    number = 0
    if num_passes > 1:
        number, tile = split_number(tile, num_tiles)
    num_modules = num_pages_ref.shape[1]
    max_pages, page = page_table_ref.shape[1], None
    if by_page:
        program, page = split_number(program, max_pages)
    part, module = split_number(program, 1 if joint else num_modules)
    modules = range(num_modules) if joint else [module]
    max_rank = max_pages * RANK_PAGE
    slot = tile_slot_ref[number, tile]
    tables = page_table_ref, num_pages_ref, layer_ref
    # Slot, end and first entry at once: a compiler moves a look-up behind the branch
    # that alone needs it, where it would wait for the slot.
    busy = (slot >= 0) & (tile_end_ref[number, tile] > tile_first_ref[number, tile])
    if windowed:
        busy &= leads_window(tile_slot_ref, tile_first_ref, number, tile, block_rows)

    @pl.when(busy)
    def _():
        places = rows_ref, tile_first_ref, tile_end_ref, slots_ref
        entry, live, row = program_rows(
            *places, number, tile, block_rows, windowed=windowed
        )

        def store(module, lanes: PageLanes, total: Array) -> None:
            entry_row = number * rows_ref.shape[1] + entry[:, None]
            column = lanes.columns(module * max_rank, v_ref.shape[2])[None, :]
            mask = mask_of(total.shape, live[:, None], lanes.used_columns)
            plgpu.store(v_ref.at[part, entry_row, column], total, mask=mask)

        shrink_modules(
            x_ref,
            a_ref,
            (row, live),
            modules,
            functools.partial(AdapterPages.of, tables, a_ref, slot),
            store,
            config,
            part=part,
            part_size=part_size,
            page=page,
        )
        stored(tile)
