"""Expand for a few rows: each program takes one row and a block of its columns.

In a decode step most rows have an adapter of their own, and a tensor-core product
computes sixteen rows for that one, which takes longer than reading B. Here B is read in
wide loads, multiplied and added: 32 rows of 32 adapters, 22016 columns, take 8.7
instead of 20.5 us on one H200, of one adapter 6.0 instead of 5.6. Four forms: in
place, as `_sgmv` for more rows; in place with a norm; ending with SiLU(gate) * up, and
with the rotary embedding and the stores into the KV cache, as `_fused`. Knows pools,
segments and pages as arrays; nothing of models or sequences.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._adapter_row import AdapterRow, columns_of
from punica_jax.pallas_kernels._fused import Shrunk
from punica_jax.pallas_kernels._launch import pallas_call
from punica_jax.pallas_kernels._norm import Norm, NormedRows
from punica_jax.pallas_kernels._page_tiles import load, module_of_block

# Columns of one module a program of one warp. In place, 32 rows of 32 adapters to 4096
# columns take 5.0, 4.0, 4.0 us with 64, 128, 256 of them a program. (Fewer for fewer
# rows would change the order in which a norm adds its squares.) Gate and up take 9.0
# with 128; with 256 9.6, and where ranks are mixed 19.4 instead of 18.3.
_BLOCK_N = 128
# Where they may follow the rows: as few as so many programs allow, for then all begin
# at once. A row alone takes, with 64 and 128 columns, gate and up 3.2 and 4.1 us, q, k,
# v 3.1 and 3.9; 8 rows 6.2 and 4.6, 4.2 and 4.4.
_LEAST_BLOCK_N = 64
_MAX_PROGRAMS = 800
_PARAMS = plgpu.CompilerParams(num_warps=1, num_stages=1)


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
    return pallas_call(
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
    row = AdapterRow(refs)
    block = pl.program_id(1)
    module, start, width, first = module_of_block(block, d_outs, d_out_offsets, blocks)
    within = first * block_n + columns_of(block_n)
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
            squares_ref[block, row.row] = jnp.square(y).sum(axis=1).sum()

    if normed_refs:  # of rows without an adapter, too
        add()
    else:
        pl.when(row.slot >= 0)(add)


def gated_expand(y: Array, shrunk: Shrunk | None, *, interpret: bool = False) -> Array:
    """Launch expand with SiLU(gate) * up; see `lora_gated`."""
    rows, width = y.shape[0], y.shape[1] // 2
    block_n = _fitting_block(rows, width)
    return pallas_call(
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
    row = AdapterRow(refs[:-1])
    column = pl.program_id(1) * block_n + columns_of(block_n)
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
    block_n = _fitting_block(rows, y.shape[1] // 2)
    at_once = math.gcd(heads, kv_heads, max(1, block_n // lanes))
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), y.dtype)
    return pallas_call(
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
    row = AdapterRow(tuple(refs))
    first_head = pl.program_id(1) * at_once
    is_kv = (first_head >= heads).astype(jnp.int32)
    is_v = (first_head >= heads + kv_heads).astype(jnp.int32)
    index = columns_of(at_once * lanes)
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


def _fitting_block(rows: int, width: int) -> int:
    """Return how many columns a program of so many rows' launch has."""
    many = rows * pl.cdiv(width, _LEAST_BLOCK_N) > _MAX_PROGRAMS
    block_n = _BLOCK_N if many else _LEAST_BLOCK_N
    return min(block_n, max(16, pl.next_power_of_2(width)))
