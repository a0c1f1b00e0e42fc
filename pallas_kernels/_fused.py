"""Expand with what follows it in a decoder layer: one launch instead of two to five.

`gated_expand` ends with SiLU(gate) * up; `rotary_expand` with the rotary embedding and
the stores into the KV cache. Both also run without adapters, so that a model has one
form. Knows pools, segments and pages as arrays; nothing of models or sequences.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels import _sgmv
from punica_jax.pallas_kernels._launch import pallas_call
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    kv_places,
    load,
    mask_of,
    tile_rows,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments

# Rows of a tile where no adapters cut them.
_BASE_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedConfig:
    """`block_n` columns of each half a program (the rotary form: half a head)."""

    block_n: int
    num_warps: int


def fused_config(width: int, dtype: Any) -> FusedConfig:
    """Choose the columns of a program; each column's sum is its own.

    2048 rows of 4 adapters, 2 x 11008 columns, take 67 us with 128 columns a program,
    81 with 256; a program that walks several blocks of columns gains 3 % there and
    loses a quarter at 128 rows.
    """
    block_n = 64 if jnp.dtype(dtype).itemsize > 2 else 128
    return FusedConfig(
        block_n=min(block_n, max(16, pl.next_power_of_2(width))), num_warps=4
    )


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
        return self._with(*_sgmv.launch_tables(self.pool, self.segments))

    @property
    def row_operands(self) -> tuple[Array, ...]:
        """What a launch takes whose programs have a row or a few, one by one.

        Its tables are each entry's own: no program waits for a slot before it looks up
        pages, 0.2 us of a launch. XLA makes them once for all layers of a pool.
        """
        pool, slots = self.pool, self.segments.slots
        known = jnp.maximum(slots[0], 0)
        counts = pool.num_pages.reshape(-1, pool.num_slots, pool.num_modules)[:, known]
        counts = jnp.where((slots[0] >= 0)[None, :, None], counts, 0)
        tables = pool.page_table[known], counts.reshape(-1, pool.num_modules)
        return self._with(*tables, pool.layer_index, self.segments.rows, slots)

    def _with(self, *tables: Array) -> tuple[Array, ...]:
        segments = self.segments
        assert segments.num_passes == 1, segments.num_passes
        weights = () if segments.weights is None else (segments.weights,)
        return self.v, self.pool.b, *tables, *weights


class _Tile:
    """One program's rows, and what their adapter adds to them. Lives in a kernel.

    Attributes:
      row: `i32[block_rows]`, out of range in dead lanes.
      live: `bool[block_rows]`.
      busy: whether there is a live row.
    """

    def __init__(self, refs: tuple[Any, ...], num_rows: int, block_rows: int):
        """Find program `pl.program_id(0)`'s rows; `refs` are of `Shrunk.operands`."""
        tile = pl.program_id(0)
        self._refs = refs
        if not refs:
            lane = jnp.arange(block_rows, dtype=jnp.int32)
            self.row = tile * block_rows + lane
            self.live = self.row < num_rows
            self.busy = True
            return
        rows_ref, slot_ref, first_ref, end_ref = refs[5:9]
        self.busy = end_ref[0, tile] > first_ref[0, tile]
        self._slot = slot_ref[0, tile]
        self._entry, self.live, self.row = tile_rows(
            rows_ref, first_ref, end_ref, 0, tile, block_rows
        )

    def load(self, ref: Any, column: Array, inside: Array | None) -> Array:
        """Return `f32[block_rows, columns]` of the tile's rows."""
        mask = mask_of((self.row.size, column.size), self.live[:, None], inside)
        at = ref.at[self.row[:, None], column[None, :]]
        return load(at, mask).astype(jnp.float32)

    def pages(self, module: Any, **options: int) -> AdapterPages | None:
        """Look up one module's pages; call it before what waits for loads."""
        if not self._refs:
            return None
        _, b_ref, *tables = self._refs[:5]
        return AdapterPages.of(tables, b_ref, self._slot, module, **options)

    def when_busy(
        self, pages: Sequence[AdapterPages | None], work: Callable[[bool], None]
    ) -> None:
        """Do the work if there is a live row.

        Args:
          pages: of every module that the work adds a product of.
          work: gets whether each has a single page, as most have. Such rows go a way of
            their own, without a `lax.cond`, whose results are written to shared memory:
            2048 rows of 4 adapters, 2 x 11008 columns, take 89 us so instead of 97.
        """
        are_single = [own.count == 1 for own in pages if own is not None]
        if not are_single:
            pl.when(self.busy)(lambda: work(False))
            return
        single = functools.reduce(operator.and_, are_single)
        pl.when(self.busy & single)(lambda: work(True))
        pl.when(self.busy & ~single)(lambda: work(False))

    def add_product(
        self,
        sums: list[Array],
        module,
        pages: AdapterPages | None,
        columns: list[Array],
        inside: Array | None,
        *,
        single: bool,
        apart: bool = False,
    ) -> list[Array]:
        """Return the sums with the adapter's product added in some columns of B.

        `single` says that the module is known to have one page. `apart` sums the
        product before it is added, over an axis of one, so that what follows keeps the
        loads' layout (see `_sum_splits`): the rotary form takes 51 us, not 58.
        """
        if pages is None:
            return sums
        v_ref, b_ref = self._refs[:2]
        weight = None
        if len(self._refs) > 9:
            weight = load(self._refs[9].at[0, self._entry], self.live)

        def product(lanes, column):
            own = _sgmv.page_product(
                lanes,
                v_ref=v_ref,
                b_ref=b_ref,
                entry=self._entry,
                live=self.live,
                weight=weight,
                first_rank=module * (pages.max_count * RANK_PAGE),
                column=column,
                inside=inside,
            )
            return own[None].sum(axis=0) if apart else own

        def add(lanes, sums):
            return [y + product(lanes, at) for y, at in zip(sums, columns, strict=True)]

        if single:
            return add(pages.single(), sums)

        def add_several():
            return lax.cond(
                pages.count > 1, lambda: pages.fold(add, sums), lambda: sums
            )

        several = add_several if pages.max_count > 1 else lambda: sums
        return lax.cond(pages.count == 1, lambda: add(pages.single(), sums), several)


def expand(
    y: Array, shrunk: Shrunk, residual: Array | None = None, *, interpret: bool = False
) -> Array:
    """Launch expand alone; see `_sgmv.expand`."""
    v, pool, segments = shrunk.v, shrunk.pool, shrunk.segments
    return _sgmv.expand(y, v, pool, segments, residual=residual, interpret=interpret)


def gated_expand(
    y: Array,
    shrunk: Shrunk | None,
    *,
    config: FusedConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Launch expand with SiLU(gate) * up; see `lora_gated`."""
    rows, width = y.shape[0], y.shape[1] // 2
    block_rows, num_tiles, operands = _tiles(shrunk, rows)
    config = config or fused_config(width, y.dtype)
    return pallas_call(
        functools.partial(_gated_kernel, block_rows=block_rows, config=config),
        out_shape=jax.ShapeDtypeStruct((rows, width), y.dtype),
        grid=(num_tiles, pl.cdiv(width, config.block_n)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="lora_gated_expand",
    )(y, *operands)


def _gated_kernel(
    y_ref,  # [rows, 2 * width]
    *refs,  # of `Shrunk.operands`, or none; h_ref [rows, width]
    block_rows: int,
    config: FusedConfig,
):
    h_ref = refs[-1]
    width = h_ref.shape[1]
    tile = _Tile(refs[:-1], y_ref.shape[0], block_rows)
    column = pl.program_id(1) * config.block_n
    column = column + jnp.arange(config.block_n, dtype=jnp.int32)
    inside = None if width % config.block_n == 0 else (column < width)[None, :]
    # Four at once would take so much room that a step's 2048 rows of 4 adapters take 81
    # us, not 73; of rank 64, alone, both take 131.
    pages = [tile.pages(module, most=2) for module in range(2)]

    def multiply(single: bool) -> None:
        halves = []
        for module, at in enumerate((column, width + column)):
            y = [tile.load(y_ref, at, inside)]
            halves += tile.add_product(
                y, module, pages[module], [at], inside, single=single
            )
        gate, up = halves
        h = gate * lax.logistic(gate) * up
        mask = mask_of(h.shape, tile.live[:, None], inside)
        at = h_ref.at[tile.row[:, None], column[None, :]]
        plgpu.store(at, h.astype(h_ref.dtype), mask=mask)

    tile.when_busy(pages, multiply)


def rotary_expand(
    y: Array,
    shrunk: Shrunk | None,
    rotary: tuple[Array, Array],
    kv_pages: Array,
    page: Array,
    offset: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Launch expand with rotary embedding and cache; see `lora_rotary`."""
    rows = y.shape[0]
    _, _, kv_heads, _, head_dim = kv_pages.shape
    heads = y.shape[1] // head_dim - 2 * kv_heads
    block_rows, num_tiles, operands = _tiles(shrunk, rows)
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), y.dtype)
    return pallas_call(
        functools.partial(_rotary_kernel, block_rows=block_rows),
        out_shape=(q, jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)),
        grid=(num_tiles, heads + 2 * kv_heads),
        input_output_aliases={0: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
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
):
    del kv_in_ref
    *refs, q_ref, kv_ref = refs
    _, heads, head_dim = q_ref.shape
    num_pages, kv_heads = kv_ref.shape[1:3]
    half = head_dim // 2
    tile = _Tile(tuple(refs), y_ref.shape[0], block_rows)
    head = pl.program_id(1)
    lane = jnp.arange(max(16, pl.next_power_of_2(half)), dtype=jnp.int32)
    inside = None if half == lane.size else (lane < half)[None, :]
    columns = [head * head_dim + lane, head * head_dim + half + lane]
    is_k = (head >= heads).astype(jnp.int32)
    is_v = (head >= heads + kv_heads).astype(jnp.int32)
    pages = tile.pages(is_k + is_v)

    def rotate(single: bool) -> None:
        sums = [tile.load(y_ref, column, inside) for column in columns]
        low, high = tile.add_product(
            sums, is_k + is_v, pages, columns, inside, single=single, apart=True
        )
        mask = mask_of(low.shape, tile.live[:, None], inside)

        def write(ref, at, values, mask):
            for start, value in zip((0, half), values, strict=True):
                target = ref.at[(*at, (start + lane)[None, :])]
                plgpu.store(target, value.astype(ref.dtype), mask=mask)

        def rotated():
            cos, sin = (tile.load(ref, lane, inside) for ref in (cos_ref, sin_ref))
            return low * cos - high * sin, high * cos + low * sin

        @pl.when(head < heads)
        def _():
            write(q_ref, (tile.row[:, None], head), rotated(), mask)

        def store(part, kv_head, values):
            page, offset, there = kv_places(
                page_ref, offset_ref, tile.row, tile.live, num_pages
            )
            at = (part, page[:, None], kv_head, offset[:, None])
            write(kv_ref, at, values, mask_of(low.shape, there[:, None], inside))

        @pl.when((is_k - is_v) > 0)
        def _():
            store(0, head - heads, rotated())

        @pl.when(is_v > 0)
        def _():
            store(1, head - heads - kv_heads, (low, high))

    tile.when_busy([pages], rotate)


def _tiles(shrunk: Shrunk | None, rows: int) -> tuple[int, int, tuple[Array, ...]]:
    """Return the rows of a tile, the tiles, and the operands of the product."""
    if shrunk is None:
        return _BASE_ROWS, pl.cdiv(rows, _BASE_ROWS), ()
    segments = shrunk.segments
    return segments.block_rows, segments.num_tiles, shrunk.operands
