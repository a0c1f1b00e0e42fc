"""Expand with what follows it in a decoder layer: one launch instead of two to five.

`gated_expand` ends with SiLU(gate) * up; `rotary_expand` with the rotary embedding and
the stores into the KV cache. Both also run without adapters, so that a model has one
form. Knows pools, segments and pages as arrays; nothing of models or sequences.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels import _expand
from punica_jax.pallas_kernels._adapter_tile import AdapterTile
from punica_jax.pallas_kernels._head_halves import (
    keys_or_values,
    kv_places,
    rotate,
    store_halves,
)
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._page_tiles import (
    mask_of,
    silu_product,
    walk_blocks,
)
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import (
    ExpandConfig,
    gated_config,
    rotary_pages_at_once,
    walked_blocks,
)

# Rows of a tile where no adapters cut them.
_BASE_ROWS = 16
# Columns that the counts of `Shrunk.row_operands` have at least: q, k and v need them.
_LEAST_COUNTS = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Shrunk:
    """What an adapter's product still needs: `shrink`'s result with its tables.

    One pass only: a row that has several adapters is expanded by `expand`.
    """

    v: Array
    pool: LoraPool
    segments: Segments

    @property
    def operands(self) -> tuple[Array, ...]:
        """What a launch takes whose programs have a tile each."""
        return self._with(*launch_tables(self.pool, self.segments))

    @property
    def row_operands(self) -> tuple[Array, ...]:
        """What a launch takes whose programs have a row or a few, one by one.

        Its tables are each entry's own: no program waits for a slot before it looks up
        pages, 0.2 us of a launch. XLA makes them once for all layers of a pool. Counts
        are `i32[layers * entries, max(3, C)]`, zeros behind those of the modules.
        """
        pool, slots = self.pool, self.segments.slots
        known, has_adapter = jnp.maximum(slots[0], 0), slots[0] >= 0
        counts = pool.num_pages.reshape(-1, pool.num_slots, pool.num_modules)[:, known]
        counts = jnp.where(has_adapter[None, :, None], counts, 0)
        # As wide for every group, so that one kernel makes those of all.
        extra = max(0, _LEAST_COUNTS - pool.num_modules)
        counts = jnp.pad(counts, ((0, 0), (0, 0), (0, extra)))
        # A first page is asked for before the counts say that it is there: it must be
        # within bounds, or negative.
        pages = jnp.minimum(pool.page_table[known], pool.pages_per_layer - 1)
        pages = jnp.where(has_adapter[:, None], pages, -1)
        tables = pages, counts.reshape(-1, counts.shape[-1])
        return self._with(*tables, pool.layer_index, self.segments.rows, slots)

    def _with(self, *tables: Array) -> tuple[Array, ...]:
        segments = self.segments
        assert segments.num_passes == 1, segments.num_passes
        weights = () if segments.weights is None else (segments.weights,)
        return self.v, self.pool.b, *tables, *weights


def expand(
    y: Array, shrunk: Shrunk, residual: Array | None = None, *, interpret: bool = False
) -> Array:
    """Launch expand alone; see `_expand.expand`."""
    v, pool, segments = shrunk.v, shrunk.pool, shrunk.segments
    return _expand.expand(y, v, pool, segments, residual=residual, interpret=interpret)


@compiled_once
def gated_expand(
    y: Array,
    shrunk: Shrunk | None,
    *,
    config: ExpandConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Launch expand with SiLU(gate) * up; see `lora_gated`."""
    rows, width = y.shape[0], y.shape[1] // 2
    block_rows, num_tiles, operands = _tiles(shrunk, rows)
    max_pages = None if shrunk is None else shrunk.pool.page_table.shape[1]
    config = config or gated_config(width, y.dtype, max_pages, rows)
    return pallas_call(
        functools.partial(_gated_kernel, block_rows=block_rows, config=config),
        out_shape=jax.ShapeDtypeStruct((rows, width), y.dtype),
        grid=(num_tiles, pl.cdiv(width, config.num_columns)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="lora_gated_expand",
    )(y, *operands)


def _gated_kernel(
    y_ref,  # [rows, 2 * width]
    *refs,  # of `Shrunk.operands`, or none; h_ref [rows, width]
    block_rows: int,
    config: ExpandConfig,
):
    *refs, h_ref = refs
    width = h_ref.shape[1]
    pages_at_once = config.pages_at_once
    tile = AdapterTile(tuple(refs), y_ref.shape[0], block_rows, pages_at_once)
    first_column = pl.program_id(1) * config.num_columns
    whole = width % config.num_columns == 0
    pages = [tile.pages(module) for module in range(2)]

    def multiply(lanes) -> None:
        begun = [tile.begin_factor(*own) for own in enumerate(lanes)]

        def multiply_block(i) -> None:
            column = first_column + i * config.block_n
            column = column + jnp.arange(config.block_n, dtype=jnp.int32)
            inside = None if whole else (column < width)[None, :]
            halves = [
                tile.begin_sums(
                    y_ref, module, pages[module], [at], inside, begun[module]
                )
                for module, at in enumerate((column, width + column))
            ]
            [gate], [up] = (half() for half in halves)
            h = silu_product(gate, up)
            mask = mask_of(h.shape, tile.live[:, None], inside)
            at = h_ref.at[tile.row[:, None], column[None, :]]
            plgpu.store(at, h.astype(h_ref.dtype), mask=mask)

        walk_blocks(config.num_blocks, multiply_block, unrolled=all(begun))

    tile.when_busy(pages, multiply)


@compiled_once
def rotary_expand(
    y: Array,
    shrunk: Shrunk | None,
    rotary: tuple[Array, Array],
    kv_pages: Array,
    page: Array,
    offset: Array,
    *,
    num_heads: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Launch expand with rotary embedding and cache; see `lora_rotary`.

    `num_heads` are a program's, all of them q's, or k's, or v's.
    """
    rows = y.shape[0]
    _, _, kv_heads, _, head_dim = kv_pages.shape
    heads = y.shape[1] // head_dim - 2 * kv_heads
    block_rows, num_tiles, operands = _tiles(shrunk, rows)
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), y.dtype)
    if num_heads is None:
        # They share cos and sin, too: 16384 rows of 32 adapters take 300 us with four
        # heads, 306 with two, 359 with one, 2048 rows of 16 adapters 42, not 50.
        most = 1 if shrunk is None else walked_blocks(rows, kv_heads)
        num_heads = math.gcd(most, heads, kv_heads)
    pages_at_once = 1
    if shrunk is not None:
        max_pages = shrunk.pool.page_table.shape[1]
        pages_at_once = rotary_pages_at_once(max_pages, y.dtype, head_dim, num_heads)
    return pallas_call(
        functools.partial(
            _rotary_kernel,
            block_rows=block_rows,
            num_heads=num_heads,
            pages_at_once=pages_at_once,
        ),
        out_shape=(q, jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)),
        grid=(num_tiles, (heads + 2 * kv_heads) // num_heads),
        input_output_aliases={0: 1},
        # Two warps for one head: 2048 rows of rank 64 take 75 us so, and 114 with four.
        # Four for more: of four heads they take 74 (69 with all pages at once), and 82
        # with two.
        compiler_params=plgpu.CompilerParams(
            num_warps=2 if num_heads == 1 and shrunk is not None else 4, num_stages=1
        ),
        interpret=interpret,
        name="lora_rotary_expand",
    )(kv_pages, y, *rotary, page, offset, *operands)


def _rotary_kernel(
    kv_in_ref,  # [2, pages, kv_heads, page_size, head_dim], is kv_ref
    y_ref,  # [rows, (heads + 2 * kv_heads) * head_dim]
    cos_ref,  # [rows, head_dim]
    sin_ref,  # [rows, head_dim]
    page_ref,  # i32[rows]
    offset_ref,  # i32[rows]
    *refs,  # of `Shrunk.operands`, or none; q_ref [rows, heads, head_dim], kv_ref
    block_rows: int,
    num_heads: int,
    pages_at_once: int,
):
    del kv_in_ref
    *refs, q_ref, kv_ref = refs
    _, heads, head_dim = q_ref.shape
    num_pages, kv_heads = kv_ref.shape[1:3]
    half = head_dim // 2
    tile = AdapterTile(tuple(refs), y_ref.shape[0], block_rows, pages_at_once)
    first_head = pl.program_id(1) * num_heads
    lane = jnp.arange(max(16, pl.next_power_of_2(half)), dtype=jnp.int32)
    inside = None if half == lane.size else (lane < half)[None, :]
    is_kv = (first_head >= heads).astype(jnp.int32)
    is_v = (first_head >= heads + kv_heads).astype(jnp.int32)
    module = is_kv + is_v
    pages = tile.pages(module)

    def rotate_all(lanes) -> None:
        begun = tile.begin_factor(module, *lanes)
        cos, sin = (tile.load(ref, lane, inside) for ref in (cos_ref, sin_ref))
        page, offset, there = kv_places(
            page_ref, offset_ref, tile.row, tile.live & (is_kv > 0), num_pages
        )

        def rotate_head(i) -> None:
            head = first_head + i
            columns = [head * head_dim + lane, head * head_dim + half + lane]
            sums = tile.begin_sums(y_ref, module, pages, columns, inside, begun)
            halves = sums()
            turned = rotate(halves, *(own.astype(jnp.float32) for own in (cos, sin)))

            def write(ref, at, values, live):
                mask = mask_of(values[0].shape, live[:, None], inside)
                store_halves(ref, at, lane[None, :], values, mask)

            pl.when(is_kv == 0)(
                lambda: write(q_ref, (tile.row[:, None], head), turned, tile.live)
            )

            @pl.when(is_kv > 0)
            def _():
                values = keys_or_values(is_v > 0, halves, turned)
                kv_head = head - heads - is_v * kv_heads
                at = is_v, page[:, None], kv_head, offset[:, None]
                write(kv_ref, at, values, there)

        walk_blocks(num_heads, rotate_head, unrolled=begun is not None)

    tile.when_busy([pages], rotate_all)


def _tiles(shrunk: Shrunk | None, rows: int) -> tuple[int, int, tuple[Array, ...]]:
    """Return the rows of a tile, the tiles, and the operands of the product."""
    if shrunk is None:
        return _BASE_ROWS, pl.cdiv(rows, _BASE_ROWS), ()
    segments = shrunk.segments
    return segments.block_rows, segments.num_tiles, shrunk.operands
