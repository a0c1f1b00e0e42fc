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

from punica_jax.pallas_kernels._entries import leads_window, tile_rows, window_rows
from punica_jax.pallas_kernels._launch import (
    given,
    pallas_call,
    place_of_program,
    split_number,
)
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    PageLanes,
    apply_options,
    load,
    mask_of,
    module_of_block,
    page_factor,
    page_product,
    walk_blocks,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import (
    JOINT_ROWS,
    TILES_AT_ONCE,
    WINDOWED_ROWS,
    ExpandConfig,
    ShrinkConfig,
    expand_config,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink_tile import shrink_modules

# Of some columns, and which of them are there: begins to load what an adapter adds to
# them, and returns what adds it to y.
_Begin = Callable[[Array, Array | None], Callable[[Array], Array]]


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
            num_stages=config.num_stages,
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
        stored(tile)


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
    programs = tuple(pl.cdiv(width, config.num_columns) for width in pool.d_outs)
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
    programs: tuple[int, ...],  # of a tile, for each module
    config: ExpandConfig,
    place: Array | None = None,
    await_v: Callable[[Array], None] | None = None,
):
    """Add one program's blocks of a tile's product to y, or of a window's tiles.

    Each program of a tile that has an adapter calls `await_v`, if there is one, once;
    programs of windows have none.
    """
    options = dict(zip(option_names, refs[:-1], strict=True))
    y_ref, slots_ref = refs[-1], options.pop("slots", None)
    place = pl.program_id(0) if place is None else place
    tile, program = place_of_program(
        place, tile_slot_ref.shape[1], sum(programs), TILES_AT_ONCE
    )
    slot = tile_slot_ref[number, tile]
    module, start, width, first = module_of_block(
        program, d_outs, d_out_offsets, programs
    )
    tables = page_table_ref, num_pages_ref, layer_ref
    pages = AdapterPages.of(tables, b_ref, slot, module, config.pages_at_once)
    # Before what waits for the slot: neither lookup waits for the other.
    windowed = config.windowed
    find, ends = (window_rows, slots_ref) if windowed else (tile_rows, tile_end_ref)
    entry, live, row = find(rows_ref, tile_first_ref, ends, number, tile, block_rows)
    wait = functools.partial(await_v or (lambda _: None), tile)
    # An idle tile has work only where every row gets a residual.
    busy = slot >= 0
    if "residual" in options:
        busy = busy | (tile_end_ref[number, tile] > tile_first_ref[number, tile])
    if windowed:
        busy &= leads_window(tile_slot_ref, tile_first_ref, number, tile, block_rows)

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
            mask = mask_of((row.size, column.size), live[:, None], inside)

            def load_option(name: str) -> Array:
                if name == "residual":
                    return load(options[name].at[at], mask)
                vector = options[name].at[jnp.maximum(slot, 0), column]
                return load(vector, within < width)

            add = begin(column, inside)
            y = load(y_in_ref.at[at], mask).astype(jnp.float32)
            loaded = {name: load_option(name) for name in options if name != "weights"}
            out = apply_options(add(y), loaded, slot)
            plgpu.store(y_ref.at[at], out.astype(y_ref.dtype), mask=mask)

        def walk(begin: _Begin, *, unrolled: bool) -> None:
            work = functools.partial(add_block, begin)
            walk_blocks(config.num_blocks, work, unrolled=unrolled)

        def begin_awaited(lanes: PageLanes) -> Callable[[], Array]:
            def factor() -> Array:  # when B and y are on their way
                wait()
                return begin_factor(lanes)()

            return functools.cache(factor)

        def add_lanes(lanes: PageLanes) -> None:
            factor = (begin_factor if await_v is None else begin_awaited)(lanes)

            def begin(column, inside):
                product = page_product(lanes, factor, b_ref, column, inside)
                return lambda y: y + product()

            walk(begin, unrolled=True)

        def add_several() -> None:
            if (lanes := pages.whole()) is not None:
                add_lanes(lanes)
            else:
                wait()
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
        if await_v is not None:
            pl.when(pages.count == 0)(wait)
