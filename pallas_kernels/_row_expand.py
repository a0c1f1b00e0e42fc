"""Expand for a few rows: each program takes one row and a block of its columns.

In a decode step most rows have an adapter of their own, and a tensor-core product
computes sixteen rows for that one, which takes longer than reading B. Here B is read in
wide loads, multiplied and added: 32 rows of 32 adapters, 22016 columns, take 10.9
instead of 20.5 us on one H200, of one adapter 5.9 instead of 5.6. Four forms: in
place, as `_sgmv` for more rows; in place with a norm; ending with SiLU(gate) * up, and
with the rotary embedding and the stores into the KV cache, as `_fused`. Knows pools,
segments and pages as arrays; nothing of models or sequences.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._fused import Shrunk
from punica_jax.pallas_kernels._norm import Norm, NormedRows
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    load,
    mask_of,
    module_of_block,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE
from punica_jax.pallas_kernels._sgmv_config import add_splits

# Columns of one module a program of one warp. In a 7B step with 32 adapters 64, 128 and
# 256 take: gate and up 11.9, 10.1, 9.1 us; q, k, v 8.6, 6.4, 6.6; o and down 4.1, 3.7,
# 3.9.
_BLOCK_N = 128
_GATED_BLOCK_N = 256
# Of B, where an adapter has further pages: 96 registers a lane, or three pages in place
# and one where a program has more columns. In a step of 32 rows of ranks 8, 16 and 64
# all expands take 1.72 ms one page after the other, so 1.51.
_HELD_BYTES = 12 * 1024
_PARAMS = plgpu.CompilerParams(num_warps=1, num_stages=1)

# Some columns of each of some modules.
_Columns = Sequence[Sequence[Array]]


class _Row:
    """One program's row, and what its adapter adds to it. Lives in a kernel.

    Attributes:
      row: `i32[]`.
      slot: `i32[]`, -1 if the row has no adapter.
    """

    def __init__(self, refs: tuple[Any, ...]):
        """Find program `pl.program_id(0)`'s row.

        Args:
          refs: of `Shrunk.row_operands`, or none.
        """
        self._refs, self._entry = refs, pl.program_id(0)
        self.row, self.slot = self._entry, jnp.int32(-1)
        if refs:
            self.row, self.slot = (ref[0, self._entry] for ref in refs[5:7])

    def load(self, ref: Any, column: Array, inside: Array | None) -> Array:
        """Return `f32[columns]` of the row."""
        return load(ref.at[self.row, column], inside).astype(jnp.float32)

    def add_product(
        self,
        sums: _Columns,
        modules: Sequence[Any],
        columns: _Columns,
        inside: Array | None,
    ) -> _Columns:
        """Return the sums with the adapter's product added in some columns of B.

        Args:
          sums: `f32[n]` of each of the `columns`.
          modules: which of the group's, one for each list of columns.
          columns: `i32[n]`, of B.
          inside: `bool[n]`, which columns are there; None if all are.
        """
        if not self._refs:
            return sums
        b_ref, *tables = self._refs[1:5]
        page_table_ref = tables[0]
        pages = [AdapterPages.of(tables, b_ref, self.slot, c) for c in modules]

        def add_pages(places, sums):
            # All loads are ahead of what waits for one.
            loaded = []
            for index, page in places:
                for n, (module, own) in enumerate(zip(modules, pages, strict=True)):
                    there = index < own.count
                    b = [self._load_b(page, there, at, inside) for at in columns[n]]
                    first = module * own.max_count * RANK_PAGE
                    v = self._load_v(first + index * RANK_PAGE, there)
                    loaded.append((n, v, b))
            sums = list(sums)
            for n, v, bs in loaded:
                pairs = zip(sums[n], bs, strict=True)
                sums[n] = [
                    y + (v * b.astype(jnp.float32)).sum(axis=0) for y, b in pairs
                ]
            return sums

        sums = add_pages([(jnp.int32(0), pages[0].page)], sums)
        max_count = pages[0].max_count
        if max_count == 1:
            return sums
        most = functools.reduce(jnp.maximum, [own.count for own in pages])
        at_once = _pages_at_once(columns, b_ref.dtype, max_count - 1)

        def add_next(turn, sums):
            places = []
            for i in range(at_once):
                index = 1 + turn * at_once + i
                page = load(page_table_ref.at[pages[0].slot, index], index < max_count)
                places.append((index, pages[0].first + page))
            return add_pages(places, sums)

        return lax.fori_loop(0, pl.cdiv(most - 1, at_once), add_next, sums)

    def _load_b(
        self, page: Array, there: Array, column: Array, inside: Array | None
    ) -> Array:
        """Return `[16, columns]` of a page of B, zeros if it is not there."""
        b_ref = self._refs[1]
        lane = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None]
        mask = mask_of((RANK_PAGE, column.size), there, inside)
        return load(b_ref.at[page, lane, column[None, :]], mask)

    def _load_v(self, first: Any, there: Array) -> Array:
        """Return `f32[16, 1]`: the row's v from a rank on, rounded as B is."""
        v_ref, b_ref = self._refs[:2]
        rank = first + jnp.arange(RANK_PAGE, dtype=jnp.int32)
        mask = mask_of(rank.shape, there)
        groups = range(v_ref.shape[0])
        parts = [load(v_ref.at[group, self._entry, rank], mask) for group in groups]
        v = add_splits(parts)
        if len(self._refs) > 7:
            v = v * self._refs[7][0, self._entry]
        return v.astype(b_ref.dtype).astype(jnp.float32)[:, None]


def _pages_at_once(columns: _Columns, dtype: Any, most: int) -> int:
    """Return how many of an adapter's further pages a program can hold."""
    size = sum(column.size for group in columns for column in group)
    page_bytes = RANK_PAGE * size * jnp.dtype(dtype).itemsize
    return max(1, min(most, _HELD_BYTES // page_bytes))


def expand(y: Array, shrunk: Shrunk, *, interpret: bool = False) -> Array:
    """Launch expand, `y` updated in place."""
    return _expand(y, shrunk, None, interpret)[0]


def normed_expand(
    y: Array, shrunk: Shrunk, norm: Norm, *, interpret: bool = False
) -> tuple[Array, NormedRows]:
    """Launch expand, `y` updated in place, and write its rows after a norm."""
    y, x, squares = _expand(y, shrunk, norm.weight, interpret)
    return y, NormedRows(x=x, squares=squares, eps=norm.eps)


def _expand(
    y: Array, shrunk: Shrunk, norm_weight: Array | None, interpret: bool
) -> Sequence[Array]:
    d_outs = shrunk.pool.d_outs
    block_n = min(_BLOCK_N, max(16, pl.next_power_of_2(max(d_outs))))
    blocks = tuple(pl.cdiv(width, block_n) for width in d_outs)
    num_rows = shrunk.segments.num_rows
    shapes, norms = [jax.ShapeDtypeStruct(y.shape, y.dtype)], ()
    if norm_weight is not None:
        squares = jax.ShapeDtypeStruct((sum(blocks), num_rows), jnp.float32)
        shapes, norms = [*shapes, *shapes, squares], (norm_weight,)
    return pl.pallas_call(
        functools.partial(
            _expand_kernel,
            num_outs=len(shapes),
            d_outs=d_outs,
            d_out_offsets=shrunk.pool.d_out_offsets,
            blocks=blocks,
            block_n=block_n,
        ),
        out_shape=shapes,
        grid=(num_rows, sum(blocks)),
        input_output_aliases={0: 0},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="lora_expand_rows",
    )(y, *norms, *_operands(shrunk))


def _expand_kernel(
    y_in_ref,  # [rows, d_out]
    # [d_out] of a norm, if one follows; of `Shrunk.row_operands`; y_ref; of the norm,
    # [rows, d_out] and f32[blocks, rows].
    *refs,
    num_outs: int,
    d_outs: tuple[int, ...],
    d_out_offsets: tuple[int, ...],
    blocks: tuple[int, ...],
    block_n: int,
):
    refs, (y_ref, *normed_refs) = refs[:-num_outs], refs[-num_outs:]
    norm_refs, refs = (refs[:1], refs[1:]) if normed_refs else ((), refs)
    row = _Row(refs)
    block = pl.program_id(1)
    module, start, width, first = module_of_block(block, d_outs, d_out_offsets, blocks)
    within = first * block_n + jnp.arange(block_n, dtype=jnp.int32)
    inside = None if all(size % block_n == 0 for size in d_outs) else within < width
    column = start + within

    def add():
        at = row.row, column
        y = row.load(y_in_ref, column, inside)
        norm = [load(ref.at[column], inside).astype(jnp.float32) for ref in norm_refs]
        [[y]] = row.add_product([[y]], [module], [[column]], inside)
        y = y.astype(y_ref.dtype)
        plgpu.store(y_ref.at[at], y, mask=inside)
        if normed_refs:
            rows_ref, squares_ref = normed_refs
            # Of what is stored: the norm sees rounded rows, as one of its own would.
            y = y.astype(jnp.float32)
            plgpu.store(rows_ref.at[at], (y * norm[0]).astype(y_ref.dtype), mask=inside)
            squares_ref[block, row.row] = jnp.square(y).sum()

    if normed_refs:  # of rows without an adapter, too
        add()
    else:
        pl.when(row.slot >= 0)(add)


def gated_expand(y: Array, shrunk: Shrunk | None, *, interpret: bool = False) -> Array:
    """Launch expand with SiLU(gate) * up; see `lora_gated`."""
    rows, width = y.shape[0], y.shape[1] // 2
    block_n = min(_GATED_BLOCK_N, max(16, pl.next_power_of_2(width)))
    return pl.pallas_call(
        functools.partial(_gated_kernel, block_n=block_n),
        out_shape=jax.ShapeDtypeStruct((rows, width), y.dtype),
        grid=(rows, pl.cdiv(width, block_n)),
        compiler_params=_PARAMS,
        interpret=interpret,
        name="lora_gated_rows",
    )(y, *_operands(shrunk))


def _gated_kernel(
    y_ref,  # [rows, 2 * width]
    *refs,  # of `Shrunk.row_operands`, or none; h_ref [rows, width]
    block_n: int,
):
    h_ref = refs[-1]
    width = h_ref.shape[1]
    row = _Row(refs[:-1])
    column = pl.program_id(1) * block_n + jnp.arange(block_n, dtype=jnp.int32)
    inside = None if width % block_n == 0 else column < width
    columns = [[column], [width + column]]
    sums = [[row.load(y_ref, at, inside)] for [at] in columns]
    [gate], [up] = row.add_product(sums, [0, 1], columns, inside)
    h = gate * lax.logistic(gate) * up
    plgpu.store(h_ref.at[row.row, column], h.astype(h_ref.dtype), mask=inside)


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
    lanes = max(16, pl.next_power_of_2(head_dim // 2))
    # A power of two, and all of one module.
    at_once = math.gcd(heads, kv_heads, max(1, _BLOCK_N // lanes))
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), y.dtype)
    return pl.pallas_call(
        functools.partial(_rotary_kernel, lanes=lanes, at_once=at_once),
        out_shape=(q, jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)),
        grid=(rows, (heads + 2 * kv_heads) // at_once),
        input_output_aliases={0: 1},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="lora_rotary_rows",
    )(kv_pages, y, *rotary, page, offset, *_operands(shrunk))


def _rotary_kernel(
    kv_in_ref,  # [2, pages, kv_heads, page_size, head_dim], is kv_ref
    y_ref,  # [rows, (heads + 2 * kv_heads) * head_dim]
    cos_ref,  # [rows, head_dim]
    sin_ref,  # [rows, head_dim]
    page_ref,  # i32[rows]
    offset_ref,  # i32[rows]
    *refs,  # of `Shrunk.row_operands`, or none; q_ref [rows, heads, head_dim], kv_ref
    lanes: int,
    at_once: int,
):
    del kv_in_ref
    *refs, q_ref, kv_ref = refs
    _, heads, head_dim = q_ref.shape
    num_pages, kv_heads = kv_ref.shape[1:3]
    half = head_dim // 2
    row = _Row(tuple(refs))
    first_head = pl.program_id(1) * at_once
    is_kv = (first_head >= heads).astype(jnp.int32)
    is_v = (first_head >= heads + kv_heads).astype(jnp.int32)
    index = jnp.arange(at_once * lanes, dtype=jnp.int32)
    head, lane = first_head + lax.div(index, lanes), lax.rem(index, lanes)
    inside = None if half == lanes else lane < half
    columns = [[head * head_dim + lane, head * head_dim + half + lane]]
    sums = [[row.load(y_ref, column, inside) for column in columns[0]]]
    [[low, high]] = row.add_product(sums, [is_kv + is_v], columns, inside)
    cos, sin = (row.load(ref, lane, inside) for ref in (cos_ref, sin_ref))
    rotated = low * cos - high * sin, high * cos + low * sin

    def write(ref, at, low, high):
        for start, value in ((0, low), (half, high)):
            target = ref.at[(*at, start + lane)]
            plgpu.store(target, value.astype(ref.dtype), mask=inside)

    pl.when(is_kv == 0)(lambda: write(q_ref, (row.row, head), *rotated))
    page, offset = page_ref[row.row], offset_ref[row.row]

    @pl.when((is_kv > 0) & (page < num_pages))
    def _():
        values = (
            jnp.where(is_v > 0, own, turned)
            for own, turned in zip((low, high), rotated, strict=True)
        )
        kv_head = head - heads - is_v * kv_heads
        write(kv_ref, (is_v, page, kv_head, offset), *values)


def _operands(shrunk: Shrunk | None) -> tuple[Array, ...]:
    return () if shrunk is None else shrunk.row_operands
