"""Shrink and expand: the two halves of SGMV as Pallas (Triton) kernels.

Segmented gather matrix-vector products over rank pages (Punica, section 4). Knows
pools and segments as arrays; nothing of models, names or gradients.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._launch import (
    given,
    pallas_call,
    place_of_program,
    split_number,
)
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    PageLanes,
    load,
    mask_of,
    module_of_block,
    page_factor,
    page_product,
    tile_rows,
    walk_blocks,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import (
    TILES_AT_ONCE,
    ExpandConfig,
    ShrinkConfig,
    expand_config,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink_tile import (
    leads_window,
    shrink_modules,
    window_rows,
)

# From so many rows on a program of the shrink takes a group of splits, and of several
# modules all of them. 4096 to 4096 columns at rank 16 take 24.0 us so for 2048 rows,
# and 25.7 with a program a split; for 512 rows 13.1 and 12.3 (one H200, both halves).
# Of q, k and v's, and of gate and up's, each block of an expand then reads a quarter:
# of 2048 rows of 4 adapters they take 47 and 64 us, not 52 and 72; one module's expand
# has so few blocks that it saves nothing.
_MANY_ROWS = 1024
# From so many on it takes all splits of all modules, for x is more than the L2 holds:
# of 8192 rows of 16 adapters q, k, v's shrink takes 35 us so, not 56, gate and up's 26,
# not 40; of one module down's takes 52, not 57, and each expand 8 us less. Of 2048 rows
# down's takes 34 us so, not 15.
_JOINT_ROWS = 8192
# And from so many on windows of tiles, of which there are as many as multiprocessors
# take at once; see `_shrink_tile`. Of 8192 rows that gains nothing.
_WINDOWED_ROWS = 16384

# Of some columns, and which of them are there: begins to load what an adapter adds to
# them, and returns what adds it to y.
_Begin = Callable[[Array, Array | None], Callable[[Array], Array]]


def launch_tables(pool: LoraPool, segments: Segments) -> tuple[Array, ...]:
    """Return where every launch looks up its pages and rows, in the kernels' order."""
    return (
        *pool.tables,
        segments.rows,
        segments.tile_slot,
        segments.tile_first,
        segments.tile_end,
    )


def shrink(
    x: Array,
    pool: LoraPool,
    segments: Segments,
    *,
    config: ShrinkConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Launch shrink; see `reference.shrink`.

    Returns:
      `f32[n, passes * rows, C * max_rank]`, the sums of `n` splits, of groups of them,
      or of all. What an entry does not use is not written.
    """
    config = config or shrink_config(pool.d_in, pool.dtype)
    # What many rows' tiles give, each block of an expand reads: the fewer the better.
    part_size = 1
    joint = segments.num_rows >= _JOINT_ROWS
    windowed = segments.num_rows >= _WINDOWED_ROWS
    if segments.num_rows >= _MANY_ROWS:
        whole = joint or pool.num_modules > 1
        part_size = config.splits if whole else config.group_size
    num_parts = pl.cdiv(config.splits, part_size)
    num_programs = num_parts * (1 if joint else pool.num_modules)
    shape = (num_parts, segments.rows.size, pool.num_modules * pool.max_rank)
    return pallas_call(
        functools.partial(
            _shrink_kernel,
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
            num_stages=config.num_stages,
        ),
        interpret=interpret,
        name="lora_shrink",
    )(x, pool.a, *launch_tables(pool, segments), segments.slots)


def _shrink_kernel(
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
    part_size: int,
    config: ShrinkConfig,
):
    num_passes, num_tiles = tile_slot_ref.shape
    tile, program = place_of_program(
        pl.program_id(0), num_passes * num_tiles, num_programs, TILES_AT_ONCE
    )
    number = 0
    if num_passes > 1:
        number, tile = split_number(tile, num_tiles)
    num_modules = num_pages_ref.shape[1]
    part, module = split_number(program, 1 if joint else num_modules)
    modules = range(num_modules) if joint else [module]
    max_rank = page_table_ref.shape[1] * RANK_PAGE
    slot = tile_slot_ref[number, tile]
    tables = page_table_ref, num_pages_ref, layer_ref
    busy = slot >= 0
    if windowed:
        busy &= leads_window(tile_slot_ref, tile_first_ref, number, tile, block_rows)

    @pl.when(busy)
    def _():
        find, ends = (window_rows, slots_ref) if windowed else (tile_rows, tile_end_ref)
        entry, live, row = find(
            rows_ref, tile_first_ref, ends, number, tile, block_rows
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
        )


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
    config = config or expand_config(
        pool.d_outs, pool.dtype, pool.page_table.shape[1], segments.num_rows
    )
    programs = tuple(pl.cdiv(width, config.num_columns) for width in pool.d_outs)
    every = {"weights": segments.weights, "scale": scale, "bias": bias}
    for number in range(segments.num_passes):
        is_last = number == segments.num_passes - 1
        options = given(**every, residual=residual if is_last else None)
        y = pallas_call(
            functools.partial(
                _expand_kernel,
                option_names=tuple(options),
                number=number,
                block_rows=segments.block_rows,
                d_outs=pool.d_outs,
                d_out_offsets=pool.d_out_offsets,
                programs=programs,
                config=config,
            ),
            out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
            grid=(segments.num_tiles * sum(programs),),
            input_output_aliases={0: 0},
            # Nothing to pipeline: all of a program's loads are in flight at once.
            compiler_params=plgpu.CompilerParams(
                num_warps=config.num_warps, num_stages=1
            ),
            interpret=interpret,
            name="lora_expand",
        )(y, v, pool.b, *launch_tables(pool, segments), *options.values())
    return y


def _expand_kernel(
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
    *refs,  # the options: f32[passes, rows], 2 x [slots, d_out], [rows, d_out]; y_ref
    option_names: tuple[str, ...],
    number: int,
    block_rows: int,
    d_outs: tuple[int, ...],
    d_out_offsets: tuple[int, ...],
    programs: tuple[int, ...],  # of a tile, for each module
    config: ExpandConfig,
):
    options = dict(zip(option_names, refs[:-1], strict=True))
    y_ref = refs[-1]
    tile, program = place_of_program(
        pl.program_id(0), tile_slot_ref.shape[1], sum(programs), TILES_AT_ONCE
    )
    slot = tile_slot_ref[number, tile]
    module, start, width, first = module_of_block(
        program, d_outs, d_out_offsets, programs
    )
    tables = page_table_ref, num_pages_ref, layer_ref
    pages = AdapterPages.of(tables, b_ref, slot, module, config.pages_at_once)
    # Before what waits for the slot: neither lookup waits for the other.
    entry, live, row = tile_rows(
        rows_ref, tile_first_ref, tile_end_ref, number, tile, block_rows
    )
    # An idle tile has work only where every row gets a residual.
    busy = slot >= 0
    if "residual" in options:
        busy = busy | (tile_end_ref[number, tile] > tile_first_ref[number, tile])

    @pl.when(busy)
    def _():
        weight = None
        if "weights" in options:
            weight = load(options["weights"].at[number, entry], live)
        begin_factor = functools.partial(
            page_factor,
            v_ref=v_ref,
            dtype=b_ref.dtype,
            entry=number * rows_ref.shape[1] + entry,
            live=live,
            weight=weight,
            first_rank=module * page_table_ref.shape[1] * RANK_PAGE,
        )
        whole = all(size % config.num_columns == 0 for size in d_outs)

        def add_block(begin: _Begin, i) -> None:
            within = (first * config.num_blocks + i) * config.block_n
            within = within + jnp.arange(config.block_n, dtype=jnp.int32)
            inside = None if whole else (within < width)[None, :]
            column = start + within
            at = (row[:, None], column[None, :])
            mask = mask_of((block_rows, column.size), live[:, None], inside)

            def load_option(name: str) -> Array:
                if name == "residual":
                    return load(options[name].at[at], mask)
                vector = options[name].at[jnp.maximum(slot, 0), column]
                return load(vector, within < width)

            add = begin(column, inside)
            y = load(y_in_ref.at[at], mask).astype(jnp.float32)
            loaded = {name: load_option(name) for name in options if name != "weights"}
            out = _apply_options(add(y), loaded, slot)
            plgpu.store(y_ref.at[at], out.astype(y_ref.dtype), mask=mask)

        def walk(begin: _Begin, *, unrolled: bool) -> None:
            work = functools.partial(add_block, begin)
            walk_blocks(config.num_blocks, work, unrolled=unrolled)

        def add_lanes(lanes: PageLanes) -> None:
            factor = begin_factor(lanes)

            def begin(column, inside):
                product = page_product(lanes, factor, b_ref, column, inside)
                return lambda y: y + product()

            walk(begin, unrolled=True)

        def add_several() -> None:
            if (lanes := pages.whole()) is not None:
                add_lanes(lanes)
            else:
                walk(begin_pages, unrolled=False)

        def begin_pages(column, inside):
            def add(lanes, y):
                factor = begin_factor(lanes)
                return y + page_product(lanes, factor, b_ref, column, inside)()

            return functools.partial(pages.fold, add)

        def nothing(column, inside):
            del column, inside
            return lambda y: y

        pl.when(pages.count == 1)(lambda: add_lanes(pages.single()))
        if pages.max_count > 1:
            pl.when(pages.count > 1)(add_several)
        if options.keys() - {"weights"}:
            pl.when(pages.count == 0)(lambda: walk(nothing, unrolled=False))


def _apply_options(out: Array, loaded: dict[str, Array], slot: Array) -> Array:
    """Scale, bias and residual of a tile of y; idle tiles get the residual alone."""
    for name in ("scale", "bias"):
        if name in loaded:
            vector = loaded[name].astype(jnp.float32)[None, :]
            changed = out * vector if name == "scale" else out + vector
            out = jnp.where(slot >= 0, changed, out)
    if "residual" in loaded:
        out = out + loaded["residual"].astype(jnp.float32)
    return out
