"""Expand for up to 128 rows: each warp takes one row and a block of its columns.

In a decode step most rows have an adapter of their own, and a tensor-core product
computes sixteen rows for that one, which takes longer than reading B. Here B is read in
wide loads, multiplied and added: 32 rows of 32 adapters, 22016 columns, take 8.7
instead of 20.5 us on one H200. Of many rows, neighbours by adapter are of one program:
of one adapter they read its B from the L2 once. Four forms: in place, as `_expand` for
more rows; in place with a norm; ending with SiLU(gate) * up, and with the rotary
embedding and the stores into the KV cache, as `_fused`. Knows pools, segments and pages
as arrays; nothing of models or sequences.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._adapter_rows import AdapterRows, columns_of
from punica_jax.pallas_kernels._fused import Shrunk
from punica_jax.pallas_kernels._head_halves import (
    keys_or_values,
    kv_places,
    rotate,
    store_halves,
)
from punica_jax.pallas_kernels._launch import compiled_once, given, pallas_call
from punica_jax.pallas_kernels._norm import Norm, NormedRows
from punica_jax.pallas_kernels._page_tiles import (
    load,
    mask_of,
    module_of_block,
    silu_product,
)
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import Segments

# Rows of a program where there are more than `_MAX_LONE_ROWS`: a layer of 64 rows of 8
# adapters takes 1 to 2 us less so than with a row a program. Of 32 rows those of one
# adapter would gain 0.9 us, those of 32 adapters nothing; and a program walks as many
# pages as the greatest rank of its rows has.
_BLOCK_ROWS = 4
_MAX_LONE_ROWS = 32
# Up to so many, too, which XLA multiplied: 128 rows of 12 and of 128 adapters of rank
# 16 take a decode step 1.1 and 5.7 % less so than by tiles (Llama-2-7B; of Llama-3.1-8B
# 1.5 and 7.6), of rank 64 3.5 % more and 6 less, of one such adapter 5.5 more (one
# H100). More pages were not measured, nor were prompts.
_MAX_ROWS = 128
_MAX_PAGES = 4
# Of a row in place, behind its first: o and down of 32 rows of ranks 8, 16 and 64 take
# 5.3 instead of 6.3 us each so (one H200). What ends with SiLU or the rotary embedding
# holds too much for more than one at a time.
_PAGES_AT_ONCE = 3
# Columns of one module a program. In place, 32 rows of 32 adapters to 4096 columns take
# 5.0, 4.0, 4.0 us with 64, 128, 256 of them a program. (Fewer for fewer rows would
# change the order in which a norm adds its squares.) Gate and up take 9.0 with 128;
# with 256 9.6, and where ranks are mixed 19.4 instead of 18.3.
_BLOCK_N = 128
# Where they may follow the rows: as few as so many warps allow, for then all begin at
# once. A row alone takes, with 64 and 128 columns, gate and up 3.2 and 4.1 us, q, k,
# v 3.1 and 3.9; 8 rows 6.2 and 4.6, 4.2 and 4.4.
_LEAST_BLOCK_N = 64
_MAX_WARPS = 800


def fits(pool: LoraPool, segments: Segments) -> bool:
    """Whether rows that XLA multiplied are expanded one by one; of static things."""
    return (
        segments.num_rows <= _MAX_ROWS
        and segments.num_passes == 1
        and pool.page_table.shape[1] <= _MAX_PAGES
        and pool.dtype.itemsize == 2
    )


@compiled_once
def expand(
    y: Array, shrunk: Shrunk, residual: Array | None = None, *, interpret: bool = False
) -> Array:
    """Launch expand, `y` updated in place; every row gets its residual."""
    return _expand(y, shrunk, None, residual, interpret)[0]


@compiled_once
def normed_expand(
    y: Array, shrunk: Shrunk, norm: Norm, *, interpret: bool = False
) -> tuple[Array, NormedRows]:
    """Launch expand, `y` updated in place, and write its rows after a norm."""
    y, x, squares = _expand(y, shrunk, norm.weight, None, interpret)
    return y, NormedRows(x=x, squares=squares, eps=norm.eps)


def _expand(
    y: Array,
    shrunk: Shrunk,
    norm_weight: Array | None,
    residual: Array | None,
    interpret: bool,
) -> Sequence[Array]:
    d_outs = shrunk.pool.d_outs
    block_n = min(_BLOCK_N, max(16, pl.next_power_of_2(max(d_outs))))
    blocks = tuple(pl.cdiv(width, block_n) for width in d_outs)
    num_rows = shrunk.segments.num_rows
    block_rows = _rows_of_program(num_rows)
    shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype)]
    if norm_weight is not None:
        squares = jax.ShapeDtypeStruct((sum(blocks), num_rows), jnp.float32)
        shapes = [*shapes, *shapes, squares]
    options = given(norm=norm_weight, residual=residual)
    return pallas_call(
        functools.partial(
            _expand_kernel,
            option_names=tuple(options),
            num_outs=len(shapes),
            block_rows=block_rows,
            d_outs=d_outs,
            d_out_offsets=shrunk.pool.d_out_offsets,
            blocks=blocks,
            block_n=block_n,
            pages_at_once=_PAGES_AT_ONCE if block_rows == 1 else 1,
        ),
        out_shape=shapes,
        grid=(pl.cdiv(num_rows, block_rows), sum(blocks)),
        input_output_aliases={0: 0},
        compiler_params=_params(block_rows),
        interpret=interpret,
        name="lora_expand_rows",
    )(y, *options.values(), *shrunk.row_operands)


def _expand_kernel(
    y_in_ref,  # [rows, d_out]
    # The options: [d_out] of a norm that follows, [rows, d_out]; of
    # `Shrunk.row_operands`; y_ref; of the norm, [rows, d_out] and f32[blocks, rows].
    *refs,
    option_names: tuple[str, ...],
    num_outs: int,
    block_rows: int,
    d_outs: tuple[int, ...],
    d_out_offsets: tuple[int, ...],
    blocks: tuple[int, ...],
    block_n: int,
    pages_at_once: int,
):
    refs, (y_ref, *normed_refs) = refs[:-num_outs], refs[-num_outs:]
    options = dict(zip(option_names, refs, strict=False))
    refs = refs[len(options) :]
    block = pl.program_id(1)
    module, start, width, first = module_of_block(block, d_outs, d_out_offsets, blocks)
    rows = AdapterRows.of_program(refs, y_ref.shape[0], block_rows, [module])
    within = first * block_n + columns_of(block_n)
    inside = None if all(size % block_n == 0 for size in d_outs) else within < width
    column = start + within

    def add():
        at, mask = rows.at(column), rows.mask(inside, column)
        norm = residual = None
        if "norm" in options:
            norm = load(options["norm"].at[column], inside).astype(jnp.float32)
        if "residual" in options:
            residual = rows.load(options["residual"], column, inside)
        [[y]] = rows.add_product(y_in_ref, [[column]], inside, pages_at_once)
        if residual is not None:
            y += residual
        y = y.astype(y_ref.dtype)
        if not options:
            # Without an adapter a negative zero, too, stays what it is.
            mask = mask_of(y.shape, (rows.slot >= 0)[:, None, None], mask)
        plgpu.store(y_ref.at[at], y, mask=mask)
        if norm is not None:
            rows_ref, squares_ref = normed_refs
            # Of what is stored: the norm sees rounded rows, as one of its own would.
            y = y.astype(jnp.float32)
            plgpu.store(rows_ref.at[at], (y * norm).astype(y_ref.dtype), mask=mask)
            squares = jnp.square(y).sum(axis=2).sum(axis=1)
            plgpu.store(squares_ref.at[block, rows.row], squares, mask=rows.live)

    if options:  # of rows without an adapter, too
        add()
    else:
        pl.when(rows.slot.max() >= 0)(add)


@compiled_once
def gated_expand(y: Array, shrunk: Shrunk, *, interpret: bool = False) -> Array:
    """Launch expand with SiLU(gate) * up; see `lora_gated`."""
    rows, width = y.shape[0], y.shape[1] // 2
    block_n = _fitting_block(rows, width)
    block_rows = _rows_of_program(rows)
    return pallas_call(
        functools.partial(_gated_kernel, block_n=block_n, block_rows=block_rows),
        out_shape=jax.ShapeDtypeStruct((rows, width), y.dtype),
        grid=(pl.cdiv(rows, block_rows), pl.cdiv(width, block_n)),
        compiler_params=_params(block_rows),
        interpret=interpret,
        name="lora_gated_rows",
    )(y, *shrunk.row_operands)


def _gated_kernel(
    y_ref,  # [rows, 2 * width]
    *refs,  # of `Shrunk.row_operands`; h_ref [rows, width]
    block_n: int,
    block_rows: int,
):
    h_ref = refs[-1]
    num_rows, width = h_ref.shape
    rows = AdapterRows.of_program(refs[:-1], num_rows, block_rows, [0, 1])
    column = pl.program_id(1) * block_n + columns_of(block_n)
    inside = None if width % block_n == 0 else column < width
    columns = [[column], [width + column]]
    [gate], [up] = rows.add_product(y_ref, columns, inside)
    h = silu_product(gate, up).astype(h_ref.dtype)
    plgpu.store(h_ref.at[rows.at(column)], h, mask=rows.mask(inside, column))


@compiled_once
def rotary_expand(
    y: Array,
    shrunk: Shrunk,
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
    block_n = _fitting_block(rows, y.shape[1] // 2)
    at_once = math.gcd(heads, kv_heads, max(1, block_n // lanes))
    block_rows = _rows_of_program(rows)
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), y.dtype)
    return pallas_call(
        functools.partial(
            _rotary_kernel, lanes=lanes, at_once=at_once, block_rows=block_rows
        ),
        out_shape=(q, jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)),
        grid=(pl.cdiv(rows, block_rows), (heads + 2 * kv_heads) // at_once),
        input_output_aliases={0: 1},
        compiler_params=_params(block_rows),
        interpret=interpret,
        name="lora_rotary_rows",
    )(kv_pages, y, *rotary, page, offset, *shrunk.row_operands)


def _rotary_kernel(
    kv_in_ref,  # [2, pages, kv_heads, page_size, head_dim], is kv_ref
    y_ref,  # [rows, (heads + 2 * kv_heads) * head_dim]
    cos_ref,  # [rows, head_dim]
    sin_ref,  # [rows, head_dim]
    page_ref,  # i32[rows]
    offset_ref,  # i32[rows]
    *refs,  # of `Shrunk.row_operands`; q_ref [rows, heads, head_dim], kv_ref
    lanes: int,
    at_once: int,
    block_rows: int,
):
    del kv_in_ref
    *refs, q_ref, kv_ref = refs
    num_rows, heads, head_dim = q_ref.shape
    num_pages, kv_heads = kv_ref.shape[1:3]
    half = head_dim // 2
    first_head = pl.program_id(1) * at_once
    is_kv = (first_head >= heads).astype(jnp.int32)
    is_v = (first_head >= heads + kv_heads).astype(jnp.int32)
    rows = AdapterRows.of_program(tuple(refs), num_rows, block_rows, [is_kv + is_v])
    index = columns_of(at_once * lanes)
    head, lane = first_head + lax.div(index, lanes), lax.rem(index, lanes)
    inside = None if half == lanes else lane < half
    columns = [[head * head_dim + lane, head * head_dim + half + lane]]
    cos, sin = (rows.load(ref, lane, inside) for ref in (cos_ref, sin_ref))
    [halves] = rows.add_product(y_ref, columns, inside)
    turned = rotate(halves, cos, sin)
    mask = rows.mask(inside, lane)

    def of_row(values):
        return values[:, None, None]

    @pl.when(is_kv == 0)
    def _():
        store_halves(q_ref, (of_row(rows.row), head), lane, turned, mask)

    @pl.when(is_kv > 0)
    def _():
        page, offset, there = kv_places(
            page_ref, offset_ref, rows.row, rows.live, num_pages
        )
        values = keys_or_values(is_v > 0, halves, turned)
        kv_head = head - heads - is_v * kv_heads
        at = is_v, of_row(page), kv_head, of_row(offset)
        there = mask_of(values[0].shape, of_row(there), mask)
        store_halves(kv_ref, at, lane, values, there)


def _rows_of_program(num_rows: int) -> int:
    return _BLOCK_ROWS if num_rows > _MAX_LONE_ROWS else 1


def _params(block_rows: int) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=block_rows, num_stages=1)


def _fitting_block(rows: int, width: int) -> int:
    """Return how many columns a program of so many rows' launch has."""
    many = rows * pl.cdiv(width, _LEAST_BLOCK_N) > _MAX_WARPS
    block_n = _BLOCK_N if many else _LEAST_BLOCK_N
    return min(block_n, max(16, pl.next_power_of_2(width)))
