"""The gradient of rank pages: a sum of outer products over each segment's rows.

Knows pools and segments as arrays; nothing of what the gradient is for.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._launch import compiled_once, pallas_call
from punica_jax.pallas_kernels._page_tiles import AdapterPages, dot, load, mask_of
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments


@compiled_once
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
        out = pallas_call(
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
            pool.layer_index,
            segments.rows,
            segments.bounds,
        )
    return out


def _segment_outer_kernel(
    out_in_ref,  # f32[layers * pages, C, 16, d]
    v_ref,  # [passes * rows, C * max_rank]
    x_ref,  # [rows, d]
    page_table_ref,  # i32[slots, max_pages]
    num_pages_ref,  # i32[layers * slots, C]
    layer_ref,  # i32[1]
    rows_ref,  # i32[passes, rows]
    bounds_ref,  # i32[passes, slots + 1]
    out_ref,  # f32[layers * pages, C, 16, d]
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

    tables = page_table_ref, num_pages_ref, layer_ref
    pages = AdapterPages.of(tables, out_ref, slot, module)

    def add_page(p, _):
        page = pages.first + page_table_ref[slot, p]
        column = module * max_rank + p * RANK_PAGE + rank

        def add_entries(step, acc):
            entry = first + step * RANK_PAGE + lane
            live = entry < first + num_entries
            at = rows_ref.at[number, jnp.where(live, entry, num_rows + lane)]
            row = load(at, live)
            v = load(
                v_ref.at[number * num_rows + entry[:, None], column[None, :]],
                mask_of((RANK_PAGE, RANK_PAGE), live[:, None]),
            )
            x = load(
                x_ref.at[row[:, None], k[None, :]], live[:, None] & inside[None, :]
            )
            return acc + dot(v.T, x)

        at = out_ref.at[page, module, rank[:, None], k[None, :]]
        old_at = out_in_ref.at[page, module, rank[:, None], k[None, :]]
        mask = mask_of((RANK_PAGE, block_d), inside[None, :])
        steps = pl.cdiv(num_entries, RANK_PAGE)
        acc = lax.fori_loop(0, steps, add_entries, load(old_at, mask))
        plgpu.store(at, acc, mask=mask)

    count = jnp.where(num_entries > 0, pages.count, 0)
    lax.fori_loop(0, count, add_page, None)
