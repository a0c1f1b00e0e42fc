"""Expand: the second half of SGMV as a Pallas (Triton) kernel.

Segmented gather matrix-vector products over rank pages (Punica, section 4): what shrink
gave times each adapter's B, added to its rows of y. Knows pools and segments as arrays;
nothing of models, names or gradients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._entries import leads_window, program_rows
from punica_jax.pallas_kernels._expand_tile import Columns, ExpandTile
from punica_jax.pallas_kernels._launch import (
    compiled_once,
    given,
    pallas_call,
    place_of_program,
)
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    load,
    module_of_block,
    page_factor,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import (
    TILES_AT_ONCE,
    ExpandConfig,
    expand_config,
)


class _Work(NamedTuple):
    """What a program of a launch takes: columns of one module, for one tile."""

    tile: Array
    slot: Array  # of the tile; below 0 if it has no adapter
    num_programs: Array  # of the tile
    module: Array
    columns: Columns


def _work_of(
    place: Array,
    tile_slot_ref: Any,  # i32[passes, tiles], those with an adapter first
    number: int,
    d_outs: tuple[int, ...],
    d_out_offsets: tuple[int, ...],
    config: ExpandConfig,
) -> tuple[_Work, Array | None]:
    """Look up what the program at a place takes.

    Returns:
      That, and whether it is one of a crowd; None where no launch of so many rows is.
    """

    def look_up(shares: int) -> _Work:
        counts = config.programs(d_outs, shares)
        size = shares * config.num_columns
        tile, program = place_of_program(place, num_tiles, sum(counts), TILES_AT_ONCE)
        if shares == 1:
            slot = tile_slot_ref[number, tile]
        else:  # there are more places than programs
            there = place < num_tiles * sum(counts)
            tile = jnp.where(there, tile, 0)
            slot = jnp.where(there, tile_slot_ref[number, tile], -1)
        module, start, width, first = module_of_block(
            program, d_outs, d_out_offsets, counts
        )
        return _Work(
            tile=tile,
            slot=slot,
            num_programs=jnp.int32(sum(counts)),
            module=module,
            columns=Columns(
                start=start, width=width, first=first * size, size=jnp.int32(size)
            ),
        )

    num_tiles, crowd = tile_slot_ref.shape[1], config.crowd
    alone = look_up(1)
    if not config.may_crowd(num_tiles):
        return alone, None
    assert crowd is not None
    # Both looked up: neither waits for what says which of them it is.
    crowded = tile_slot_ref[number, crowd.least_tiles - 1] >= 0
    choose = functools.partial(jnp.where, crowded)
    return jax.tree.map(choose, look_up(crowd.shares), alone), crowded


@compiled_once
def expand(
    y: Array,
    v: Array,
    pool: LoraPool,
    segments: Segments,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    config: ExpandConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Launch expand, one launch a pass, `y` updated in place; see `reference.expand`.

    In a batch of several passes no launch meets a row twice, so the sums of a row's
    adapters have one order.
    """
    config = config or expand_config_of(pool, segments, num_sums=v.shape[0])
    slots = segments.slots if config.windowed else None
    every = {"weights": segments.weights, "scale": scale, "bias": bias, "slots": slots}
    for number in range(segments.num_passes):
        is_last = number == segments.num_passes - 1
        options = given(**every, residual=residual if is_last else None)
        y = pallas_call(
            functools.partial(
                expand_kernel,
                option_names=tuple(options),
                number=number,
                block_rows=segments.block_rows,
                d_outs=pool.d_outs,
                d_out_offsets=pool.d_out_offsets,
                config=config,
            ),
            out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
            grid=(segments.num_tiles * sum(config.programs(pool.d_outs)),),
            input_output_aliases={0: 0},
            # Nothing to pipeline: all of a program's loads are in flight at once.
            compiler_params=plgpu.CompilerParams(
                num_warps=config.num_warps, num_stages=1
            ),
            interpret=interpret,
            name="lora_expand",
        )(y, v, pool.b, *launch_tables(pool, segments), *options.values())
    return y


def expand_config_of(
    pool: LoraPool, segments: Segments, **options: int
) -> ExpandConfig:
    """Return `expand_config` of a launch."""
    sizes = pool.page_table.shape[1], segments.num_rows
    return expand_config(pool.d_outs, pool.dtype, *sizes, **options)


def expand_kernel(
    y_in_ref,  # [rows, d_out]
    v_ref,  # f32[splits, passes * rows, C * max_rank]
    b_ref,  # [layers * pages, 16, d_out]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[layers * slots, C]
    layer_ref,  # i32[1]
    rows_ref,  # i32[passes, rows]
    tile_slot_ref,  # i32[passes, tiles]
    tile_first_ref,  # i32[passes, tiles]
    tile_end_ref,  # i32[passes, tiles]
    # The options: f32[passes, rows], 2 x [slots, d_out], i32[passes, rows], [rows,
    # d_out]; y_ref.
    *refs,
    option_names: tuple[str, ...],
    number: int,
    block_rows: int,
    d_outs: tuple[int, ...],
    d_out_offsets: tuple[int, ...],
    config: ExpandConfig,
    place: Array | None = None,
    await_v: Callable[[Array, Array], None] | None = None,
):
    """Add a product to one program's columns of a tile's rows, or of a window's.

    Each program of a tile that has an adapter calls `await_v`, if there is one, once,
    with the tile and how many of its programs do; programs of windows have none.
    """
    options = dict(zip(option_names, refs[:-1], strict=True))
    y_ref, slots_ref = refs[-1], options.pop("slots", None)
    weights_ref = options.pop("weights", None)
    assert config.crowd is None or not options  # idle tiles' rows have a residual
    place = pl.program_id(0) if place is None else place
    work, crowded = _work_of(
        place, tile_slot_ref, number, d_outs, d_out_offsets, config
    )
    tile, slot, module = work.tile, work.slot, work.module
    windowed = config.windowed
    # At once, as in `shrink_kernel`.
    busy = tile_end_ref[number, tile] > tile_first_ref[number, tile]
    if "residual" not in options:  # else an idle tile's rows have work, too
        busy &= slot >= 0
    if windowed:
        busy &= leads_window(tile_slot_ref, tile_first_ref, number, tile, block_rows)

    # All else after that: idle programs, of which few adapters leave many, end at once.
    @pl.when(busy)
    def _():
        tables = page_table_ref, num_pages_ref, layer_ref
        places = rows_ref, tile_first_ref, tile_end_ref, slots_ref
        entry, live, row = program_rows(
            *places, number, tile, block_rows, windowed=windowed
        )
        weight = None
        if weights_ref is not None:
            weight = load(weights_ref.at[number, entry], live)
        wait = None
        if await_v is not None:
            wait = functools.partial(await_v, tile, work.num_programs)
        ExpandTile(
            columns=work.columns,
            crowded=crowded,
            whole=all(size % config.num_columns == 0 for size in d_outs),
            config=config,
            row=row,
            live=live,
            slot=slot,
            pages=AdapterPages.of(tables, b_ref, slot, module, config.pages_at_once),
            y_in_ref=y_in_ref,
            y_ref=y_ref,
            b_ref=b_ref,
            options=options,
            begin_factor=functools.partial(
                page_factor,
                v_ref=v_ref,
                dtype=b_ref.dtype,
                entry=number * rows_ref.shape[1] + entry,
                live=live,
                weight=weight,
                first_rank=module * page_table_ref.shape[1] * RANK_PAGE,
            ),
            wait=wait,
        ).add()
