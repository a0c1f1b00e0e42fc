"""Shrink and expand: the two halves of SGMV as Pallas (Triton) kernels.

Segmented gather matrix-vector products over rank pages (Punica, section 4). Knows
pools and segments as arrays; nothing of models, names or gradients.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """`splits` cuts d_in; each split walks it in steps of `block_d`."""

    splits: int
    block_d: int
    num_warps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpandConfig:
    """`block_n` columns of one module a program."""

    block_n: int
    num_warps: int


def shrink_config(d_in: int, dtype) -> ShrinkConfig:
    """Choose the split of d_in. Never by rows: it fixes the order of a row's sum."""
    block_d = 128 if jnp.dtype(dtype).itemsize == 2 else 64
    block_d = min(block_d, max(16, pl.next_power_of_2(d_in)))
    # A split per 256 columns keeps 132 SMs in flight at 4096 columns without making
    # the expand sum more partial results than it has ranks.
    splits = min(16, pl.cdiv(d_in, 2 * block_d))
    return ShrinkConfig(splits=splits, block_d=block_d, num_warps=2)


def expand_config(d_outs: tuple[int, ...], block_rows: int) -> ExpandConfig:
    """Choose the columns of a program; each column's sum is its own."""
    block_n = min(128, max(16, pl.next_power_of_2(max(d_outs))))
    return ExpandConfig(block_n=block_n, num_warps=2 if block_rows <= 16 else 4)


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
      `f32[splits, passes * rows, C * max_rank]`, partial sums over d_in. What an entry
      does not use is not written.
    """
    config = config or shrink_config(pool.d_in, pool.dtype)
    entries = segments.num_passes * segments.num_rows
    shape = (config.splits, entries, pool.num_modules * pool.max_rank)
    return pl.pallas_call(
        functools.partial(
            _shrink_kernel,
            d_in=pool.d_in,
            max_rank=pool.max_rank,
            num_rows=segments.num_rows,
            num_tiles=segments.num_tiles,
            block_rows=segments.block_rows,
            config=config,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(
            segments.num_passes * segments.num_tiles,
            pool.num_modules,
            config.splits,
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name="lora_shrink",
    )(
        x,
        pool.a,
        pool.page_table,
        pool.num_pages,
        segments.rows,
        segments.tile_slot,
        segments.tile_first,
        segments.tile_end,
    )


def _shrink_kernel(
    x_ref,  # [rows, d_in]
    a_ref,  # [pages, C, 16, d_in]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[slots, C]
    rows_ref,  # i32[passes, rows]
    tile_slot_ref,  # i32[passes, tiles]
    tile_first_ref,  # i32[passes, tiles]
    tile_end_ref,  # i32[passes, tiles]
    v_ref,  # f32[splits, passes * rows, C * max_rank]
    *,
    d_in: int,
    max_rank: int,
    num_rows: int,
    num_tiles: int,
    block_rows: int,
    config: ShrinkConfig,
):
    number = pl.program_id(0) // num_tiles
    tile = pl.program_id(0) % num_tiles
    module = pl.program_id(1)
    split = pl.program_id(2)
    slot = tile_slot_ref[number, tile]

    @pl.when(slot >= 0)
    def _():
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)
        entry, live, row = _tile_rows(
            rows_ref, tile_first_ref, tile_end_ref, number, tile, block_rows, num_rows
        )
        steps = pl.cdiv(pl.cdiv(d_in, config.block_d), config.splits)

        def add_page(p, _):
            page = page_table_ref[slot, p]

            def add_block(step, acc):
                start = (split * steps + step) * config.block_d
                k = start + jnp.arange(config.block_d, dtype=jnp.int32)
                inside = k < d_in
                x = plgpu.load(
                    x_ref.at[row[:, None], k[None, :]],
                    mask=live[:, None] & inside[None, :],
                    other=0,
                )
                a = plgpu.load(
                    a_ref.at[page, module, rank[:, None], k[None, :]],
                    mask=jnp.broadcast_to(inside[None, :], (RANK_PAGE, k.size)),
                    other=0,
                )
                return acc + _dot(x, a, trans_b=True)

            acc = jnp.zeros((block_rows, RANK_PAGE), jnp.float32)
            acc = jax.lax.fori_loop(0, steps, add_block, acc)
            column = module * max_rank + p * RANK_PAGE + rank
            at = v_ref.at[split, number * num_rows + entry[:, None], column[None, :]]
            plgpu.store(at, acc, mask=jnp.broadcast_to(live[:, None], acc.shape))

        jax.lax.fori_loop(0, num_pages_ref[slot, module], add_page, None)


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
    config = config or expand_config(pool.d_outs, segments.block_rows)
    blocks = tuple(pl.cdiv(width, config.block_n) for width in pool.d_outs)
    last = segments.num_passes - 1
    for number in range(segments.num_passes):
        options = {
            "weights": segments.weights,
            "scale": scale,
            "bias": bias,
            "residual": residual if number == last else None,
        }
        options = {name: array for name, array in options.items() if array is not None}
        y = pl.pallas_call(
            functools.partial(
                _expand_kernel,
                option_names=tuple(options),
                number=number,
                num_rows=segments.num_rows,
                block_rows=segments.block_rows,
                max_rank=pool.max_rank,
                d_outs=pool.d_outs,
                d_out_offsets=pool.d_out_offsets,
                blocks=blocks,
                config=config,
            ),
            out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
            grid=(segments.num_tiles, sum(blocks)),
            input_output_aliases={0: 0},
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
            interpret=interpret,
            name="lora_expand",
        )(
            y,
            v,
            pool.b,
            pool.page_table,
            pool.num_pages,
            segments.rows,
            segments.tile_slot,
            segments.tile_first,
            segments.tile_end,
            *options.values(),
        )
    return y


def _expand_kernel(
    y_in_ref,  # [rows, d_out]
    v_ref,  # f32[splits, passes * rows, C * max_rank]
    b_ref,  # [pages, d_out, 16]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[slots, C]
    rows_ref,  # i32[passes, rows]
    tile_slot_ref,  # i32[passes, tiles]
    tile_first_ref,  # i32[passes, tiles]
    tile_end_ref,  # i32[passes, tiles]
    *refs,  # the options: f32[passes, rows], 2 x [slots, d_out], [rows, d_out]; y_ref
    option_names: tuple[str, ...],
    number: int,
    num_rows: int,
    block_rows: int,
    max_rank: int,
    d_outs: tuple[int, ...],
    d_out_offsets: tuple[int, ...],
    blocks: tuple[int, ...],
    config: ExpandConfig,
):
    options = dict(zip(option_names, refs[:-1], strict=True))
    y_ref = refs[-1]
    tile = pl.program_id(0)
    block = pl.program_id(1)
    slot = tile_slot_ref[number, tile]
    # An idle tile has work only where every row gets a residual.
    busy = slot >= 0
    if "residual" in options:
        busy = busy | (tile_end_ref[number, tile] > tile_first_ref[number, tile])

    @pl.when(busy)
    def _():
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)
        entry, live, row = _tile_rows(
            rows_ref, tile_first_ref, tile_end_ref, number, tile, block_rows, num_rows
        )
        module, start, width, first = _module_of_block(
            block, d_outs, d_out_offsets, blocks
        )
        within = first * config.block_n + jnp.arange(config.block_n, dtype=jnp.int32)
        inside = within < width
        column = start + within
        mask = live[:, None] & inside[None, :]
        known_slot = jnp.maximum(slot, 0)
        entry_mask = jnp.broadcast_to(live[:, None], (block_rows, RANK_PAGE))
        column_mask = jnp.broadcast_to(inside[:, None], (config.block_n, RANK_PAGE))

        def add_page(p, acc):
            page = page_table_ref[known_slot, p]
            b = plgpu.load(
                b_ref.at[page, column[:, None], rank[None, :]],
                mask=column_mask,
                other=0,
            )
            at = module * max_rank + p * RANK_PAGE + rank
            v = jnp.zeros((block_rows, RANK_PAGE), jnp.float32)
            for split in range(v_ref.shape[0]):
                v += plgpu.load(
                    v_ref.at[split, number * num_rows + entry[:, None], at[None, :]],
                    mask=entry_mask,
                    other=0,
                )
            if "weights" in options:
                weight = plgpu.load(
                    options["weights"].at[number, entry], mask=live, other=0
                )
                v = v * weight[:, None]
            return acc + _dot(v.astype(b.dtype), b, trans_b=True)

        count = jnp.where(slot >= 0, num_pages_ref[known_slot, module], 0)
        acc = jnp.zeros((block_rows, config.block_n), jnp.float32)
        acc = jax.lax.fori_loop(0, count, add_page, acc)
        at = (row[:, None], column[None, :])
        out = plgpu.load(y_in_ref.at[at], mask=mask, other=0).astype(jnp.float32) + acc
        for name in ("scale", "bias"):
            if name not in options:
                continue
            vector = plgpu.load(
                options[name].at[known_slot, column], mask=inside, other=0
            ).astype(jnp.float32)[None, :]
            changed = out * vector if name == "scale" else out + vector
            out = jnp.where(slot >= 0, changed, out)
        if "residual" in options:
            residual = plgpu.load(options["residual"].at[at], mask=mask, other=0)
            out = out + residual.astype(jnp.float32)
        plgpu.store(y_ref.at[at], out.astype(y_ref.dtype), mask=mask)


def segment_outer(
    v: Array,
    x: Array,
    pool: LoraPool,
    segments: Segments,
    *,
    interpret: bool = False,
) -> Array:
    """Launch the gradient of the pool's pages; see `reference.segment_outer`."""
    num_pages, modules = pool.a.shape[:2]
    d = x.shape[1]
    block_d = min(128, max(16, pl.next_power_of_2(d)))
    out = jnp.zeros((num_pages, modules, RANK_PAGE, d), jnp.float32)
    for number in range(segments.num_passes):
        out = pl.pallas_call(
            functools.partial(
                _segment_outer_kernel,
                number=number,
                num_rows=segments.num_rows,
                max_rank=pool.max_rank,
                block_d=block_d,
            ),
            out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
            grid=(pool.num_slots, modules, pl.cdiv(d, block_d)),
            input_output_aliases={0: 0},
            compiler_params=plgpu.CompilerParams(num_warps=4),
            interpret=interpret,
            name="lora_segment_outer",
        )(
            out,
            v.astype(pool.dtype),
            x,
            pool.page_table,
            pool.num_pages,
            segments.rows,
            segments.bounds,
        )
    return out


def _segment_outer_kernel(
    out_in_ref,  # f32[pages, C, 16, d]
    v_ref,  # [passes * rows, C * max_rank]
    x_ref,  # [rows, d]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[slots, C]
    rows_ref,  # i32[passes, rows]
    bounds_ref,  # i32[passes, slots + 1]
    out_ref,  # f32[pages, C, 16, d]
    *,
    number: int,
    num_rows: int,
    max_rank: int,
    block_d: int,
):
    slot = pl.program_id(0)
    module = pl.program_id(1)
    d = x_ref.shape[1]
    first = bounds_ref[number, slot]
    num_entries = bounds_ref[number, slot + 1] - first
    rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)
    lane = jnp.arange(RANK_PAGE, dtype=jnp.int32)
    k = pl.program_id(2) * block_d + jnp.arange(block_d, dtype=jnp.int32)
    inside = k < d

    def add_page(p, _):
        page = page_table_ref[slot, p]
        column = module * max_rank + p * RANK_PAGE + rank

        def add_entries(step, acc):
            entry = first + step * RANK_PAGE + lane
            live = entry < first + num_entries
            row = plgpu.load(
                rows_ref.at[number, jnp.where(live, entry, num_rows + lane)],
                mask=live,
                other=0,
            )
            v = plgpu.load(
                v_ref.at[number * num_rows + entry[:, None], column[None, :]],
                mask=jnp.broadcast_to(live[:, None], (RANK_PAGE, RANK_PAGE)),
                other=0,
            )
            x = plgpu.load(
                x_ref.at[row[:, None], k[None, :]],
                mask=live[:, None] & inside[None, :],
                other=0,
            )
            return acc + _dot(v.T, x)

        at = out_ref.at[page, module, rank[:, None], k[None, :]]
        old_at = out_in_ref.at[page, module, rank[:, None], k[None, :]]
        mask = jnp.broadcast_to(inside[None, :], (RANK_PAGE, block_d))
        acc = plgpu.load(old_at, mask=mask, other=0)
        steps = pl.cdiv(num_entries, RANK_PAGE)
        acc = jax.lax.fori_loop(0, steps, add_entries, acc)
        plgpu.store(at, acc, mask=mask)

    count = jnp.where(num_entries > 0, num_pages_ref[slot, module], 0)
    jax.lax.fori_loop(0, count, add_page, None)


def _dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """Product with a float32 sum; float32 operands without TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b.T if trans_b else b, precision=precision)


def _tile_rows(
    rows_ref, tile_first_ref, tile_end_ref, number, tile, block_rows: int, num_rows: int
) -> tuple[Array, Array, Array]:
    """Return a tile's entries, which are live, and their rows.

    Dead lanes get addresses of their own past the end, for masked stores in interpret
    mode write old values back.
    """
    lane = jnp.arange(block_rows, dtype=jnp.int32)
    entry = tile_first_ref[number, tile] + lane
    live = entry < tile_end_ref[number, tile]
    entry = jnp.where(live, entry, num_rows + lane)
    row = plgpu.load(rows_ref.at[number, entry], mask=live, other=0)
    return entry, live, jnp.where(live, row, num_rows + lane)


def _module_of_block(
    block, d_outs: tuple[int, ...], offsets: tuple[int, ...], blocks: tuple[int, ...]
):
    """Return a column block's module, its first column, width, and block within it."""
    # Sums, not selects: a select between Python numbers lowers to a boolean (0.12).
    module, start, width, first = 0, 0, d_outs[0], block
    for c in range(1, len(d_outs)):
        here = (block >= sum(blocks[:c])).astype(jnp.int32)
        module += here
        start += here * (offsets[c] - offsets[c - 1])
        width += here * (d_outs[c] - d_outs[c - 1])
        first -= here * blocks[c - 1]
    return module, start, width, first
