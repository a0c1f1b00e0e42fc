"""Prefill attention on Hopper, where a program's warp groups share the work.

One group asks for keys and values, page by page, ahead of two that multiply; none
waits for what it loads itself, as Triton's form (`_attention_prefill`) must. Written
for Pallas' other lowering, Mosaic GPU. Knows windows of a sequence's rows and its
pages.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._attention_reference import query_tiles, with_padding
from punica_jax.pallas_kernels._attention_window import (
    BLOCK_KV,
    Window,
    attend_window,
    load_window,
    store_rows,
)
from punica_jax.pallas_kernels._dispatch import has_warpgroups, multiprocessors
from punica_jax.pallas_kernels._launch import (
    GROUP,
    PROGRAM,
    split_number,
    warpgroup_call,
)
from punica_jax.pallas_kernels._warpgroups import (
    ALIGNED_ROWS,
    GROUP_ROWS,
    GROUPS,
    STAGES,
    WINDOW_ROWS,
    barriers,
    tiled_memory,
    wait_read,
)

_EVEN_ROWS = 8192  # of which each program has many windows


def fits(
    q: Array, kv_pages: Array, max_query_len: int, *, skip_lone: bool = False
) -> bool:
    """Whether this form runs, and is the faster one; a function of static things."""
    rows, heads, head_dim = q.shape
    # Of few rows more decode, or are of short prompts, for which 128 rows are too many,
    # the more so where several heads share what Triton's form then reads once.
    least = 2048 if heads == kv_pages.shape[2] else 8192
    if skip_lone:
        # By this form and by Triton's, of 1024 rows, one prompt of 900 takes 33.6 and
        # 43.4 us, eight of 100 18.9 and 13.6; of 2048 one of 2000 82 and 148, eight of
        # 200 29.0 and 27.2 (8B, one H200).
        least = 1024
    return (
        has_warpgroups()
        and max_query_len >= least
        and kv_pages.dtype.itemsize == 2
        and head_dim in (64, 128)
        and rows % ALIGNED_ROWS == 0
    )


# A function of its own is traced and lowered once for all layers, for 0.3 s each.
@functools.partial(jax.jit, static_argnames=("scale", "skip_lone"))
def warpgroup_attention(
    q: Array,  # [rows, heads, head_dim]
    kv_pages: Array,  # [2, pages, kv_heads, page_size, head_dim]
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    scale: float,
    skip_lone: bool = False,
) -> Array:
    """Run what `prefill_attention` does, if it `fits`."""
    kv_lens = jnp.minimum(kv_lens, page_table.shape[1] * kv_pages.shape[3])
    windows, num_windows = _window_table(
        bounds, kv_lens, rows=q.shape[0], skip_lone=skip_lone
    )
    num_programs = min(multiprocessors(), windows.shape[0] * q.shape[1])
    head_dim, page_size = q.shape[2], kv_pages.shape[3]

    shared = functools.partial(tiled_memory, dtype=q.dtype)
    copies = max(1, BLOCK_KV // page_size)
    return warpgroup_call(
        functools.partial(_attention_kernel, scale=scale * math.log2(math.e)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            shared(GROUPS, GROUP_ROWS, head_dim),  # q
            shared(STAGES, BLOCK_KV, head_dim),  # k
            shared(STAGES, BLOCK_KV, head_dim),  # v
            shared(GROUPS, GROUP_ROWS, head_dim),  # out
            plgpu.SMEM((GROUPS, GROUP_ROWS, head_dim), q.dtype),  # out, row by row
            (barriers(GROUPS), barriers(GROUPS)),
            (barriers(STAGES, copies), barriers(STAGES, GROUPS)),
            (barriers(STAGES, copies), barriers(STAGES, GROUPS)),
        ],
        num_programs=num_programs,
        num_groups=GROUPS + 1,
        name="paged_attention_warpgroups",
    )(q, kv_pages, page_table, windows, num_windows)


def _window_table(
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    rows: int,
    skip_lone: bool = False,
) -> tuple[Array, Array]:
    """Cut the sequences' rows into windows, of which programs take the last ones first.

    The padding rows are one more sequence, -1, whose windows write zeros.

    Returns:
      `i32[windows, 5]`, of `Window` each, and `i32[1]`, how many are used.
    """
    seqs = kv_lens.shape[0]
    bounds, skipped = with_padding(bounds, rows, skip_lone=skip_lone)
    seq, first = query_tiles(
        bounds,
        rows=rows,
        block_rows=WINDOW_ROWS,
        aligned=ALIGNED_ROWS,
        skipped=skipped,
    )
    begin = jnp.maximum(bounds[seq] - first, 0)
    end = jnp.minimum(bounds[seq + 1] - first, WINDOW_ROWS)
    known = jnp.clip(seq, 0, seqs - 1)
    position = kv_lens[known] - bounds[known + 1] + first
    is_used = seq >= 0
    seq = jnp.where(seq < seqs, seq, -1)
    table = jnp.stack([seq, first, begin, end, position], axis=1)
    if rows < _EVEN_ROWS:
        # Programs take windows in turn, and of few those that see the most tokens must
        # be first, for all to end at about the same time: 4 prompts of 512 take 28 us
        # so, not 37. Many even out, and of these a sequence's stay together: what they
        # see would be read again, 32 prompts would take 231 us, not 209 (one H200).
        tokens = jnp.where(seq < 0, 0, position + end)
        table = table[jnp.argsort(jnp.where(is_used, tokens, jnp.iinfo(jnp.int32).max))]
    return table, is_used.sum(dtype=jnp.int32)[None]


def _attention_kernel(
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    windows_ref,  # i32[windows, 5]
    num_windows_ref,  # i32[1]
    out_ref,  # [rows, heads, head_dim]
    q_shared,  # [groups, 64, head_dim]
    k_shared,  # [stages, block_kv, head_dim]
    v_shared,  # [stages, block_kv, head_dim]
    out_shared,  # [groups, 64, head_dim]
    rows_shared,  # [groups, 64, head_dim], as they lie in out
    q_barriers,  # loaded and used: a group's
    k_barriers,  # loaded and used: a stage's
    v_barriers,  # loaded and used: a stage's
    *,
    scale: float,
):
    heads = q_ref.shape[1]
    program, group = (lax.axis_index(name) for name in (PROGRAM, GROUP))
    num_programs = lax.axis_size(PROGRAM)
    total = num_windows_ref[0] * heads
    # A program's turns: a head of a window each.
    num_turns = pl.cdiv(total - program, num_programs)

    def turn(i: Array) -> tuple[Array, Window]:
        # The last one's successor is looked up, too: it is any.
        nth = jnp.maximum(total - 1 - program - i * num_programs, 0)
        window, head = split_number(nth, heads)
        return head, Window(*(windows_ref[window, column] for column in range(5)))

    def for_turns(work, init: Any) -> None:
        """Fold `work(head, window, carry)`, each looked up a turn ahead."""

        def step(i, carry):
            (head, window), carry = carry
            return turn(i + 1), work(head, window, carry)

        lax.fori_loop(0, num_turns, step, (turn(jnp.int32(0)), init))

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        for_turns(
            functools.partial(
                load_window,
                q_ref,
                kv_ref,
                table_ref,
                (q_shared, *q_barriers),
                (k_shared, *k_barriers),
                (v_shared, *v_barriers),
            ),
            (jnp.int32(0), jnp.bool_(False)),
        )

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")

        def work(head, window, step):
            step, out = attend_window(
                window,
                group,
                (q_shared.at[group], *(barrier.at[group] for barrier in q_barriers)),
                (k_shared, *k_barriers),
                (v_shared, *v_barriers),
                step,
                scale=scale,
            )
            store_rows(
                window,
                group,
                out.astype(out_ref.dtype),
                lambda rows: out_ref.at[rows, head],
                out_shared.at[group],
                rows_shared.at[group],
            )
            return step

        for_turns(work, jnp.int32(0))
        wait_read()
