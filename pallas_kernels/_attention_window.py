"""A window of a sequence's rows, as the warp groups of a program attend to its pages.

Runs inside kernels only. Knows shared memory and its barriers; nothing of which windows
a program takes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._warpgroups import (
    GROUP_ROWS,
    GROUPS,
    STAGES,
    iota,
    load,
    stage_of,
    store,
    wait_read,
)

BLOCK_KV = 128
# Finite, for the difference of two of them must not be NaN.
_LEAST = float(jnp.finfo(jnp.float32).min)


class Window(NamedTuple):
    """Some rows of one sequence, and what they attend to; scalars.

    Attributes:
      seq: the sequence, -1 of padding.
      first: its first row; the window's rows are the 128 from here on.
      begin, end: which of them are the sequence's.
      position: of the window's first row in its sequence; may be below 0.
    """

    seq: Array
    first: Array
    begin: Array
    end: Array
    position: Array

    @property
    def num_tokens(self) -> Array:
        """How many tokens the last row sees."""
        return jnp.where(self.seq < 0, 0, self.position + self.end)

    @property
    def num_blocks(self) -> Array:
        return pl.cdiv(self.num_tokens, jnp.int32(BLOCK_KV))


def load_window(
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    q,  # shared memory, its barriers: loaded and used
    k,
    v,
    head: Array,
    window: Window,
    carry: tuple[Array, Array],  # blocks so far, and whether there were any
) -> tuple[Array, Array]:
    """Ask for a window's q, and the keys and values that it sees."""
    _, _, kv_heads, page_size, _ = kv_ref.shape
    kv_head = lax.div(head, jnp.int32(q_ref.shape[1] // kv_heads))
    step, any_before = carry
    num_blocks = window.num_blocks

    @pl.when(num_blocks > 0)
    def _():
        q_shared, loaded, used = q
        for group in range(GROUPS):
            pl.when(any_before)(functools.partial(plgpu.barrier_wait, used.at[group]))
            rows = pl.ds(window.first + group * GROUP_ROWS, GROUP_ROWS)
            plgpu.copy_gmem_to_smem(
                q_ref.at[rows, head], q_shared.at[group], loaded.at[group]
            )

    def load_block(block, step):
        stage = stage_of(step)
        size = min(page_size, BLOCK_KV)
        tokens = [block * BLOCK_KV + first for first in range(0, BLOCK_KV, size)]
        pages = []
        for token in tokens:
            nth = lax.div(token, jnp.int32(page_size))
            nth = jnp.minimum(nth, table_ref.shape[1] - 1)
            # What is past the end may be any number.
            pages.append(
                jnp.where(token < window.num_tokens, table_ref[window.seq, nth], 0)
            )
        for part, (to, loaded, used) in enumerate((k, v)):
            wait = functools.partial(plgpu.barrier_wait, used.at[stage])
            pl.when(step >= STAGES)(wait)
            for i, (token, page) in enumerate(zip(tokens, pages, strict=True)):
                inner = pl.ds(lax.rem(token, jnp.int32(page_size)), size)
                plgpu.copy_gmem_to_smem(
                    kv_ref.at[part, page, kv_head, inner],
                    to.at[stage, pl.ds(i * size, size)],
                    loaded.at[stage],
                )
        return step + 1

    step = lax.fori_loop(0, num_blocks, load_block, step)
    return step, any_before | (num_blocks > 0)


def attend_window(
    window: Window,
    group: Array,
    q,  # shared memory, its barriers: loaded and used
    k,
    v,
    step: Array,  # blocks so far
    *,
    scale: float,
) -> tuple[Array, Array]:
    """Return the blocks so far, and `f32[64, head_dim]` of a group's rows."""
    (q_shared, q_loaded, q_used), (k_shared, k_loaded, k_used) = q, k
    v_shared, v_loaded, v_used = v
    head_dim = q_shared.shape[-1]
    first_position = window.position + group * GROUP_ROWS
    num_blocks, num_tokens = window.num_blocks, window.num_tokens
    # Of these blocks the window's first row, and so every row, sees all tokens.
    whole = lax.div(window.position + window.begin + 1, jnp.int32(BLOCK_KV))
    whole = jnp.clip(whole, 0, num_blocks)
    pl.when(num_blocks > 0)(functools.partial(plgpu.barrier_wait, q_loaded))

    def attend_block(block, carry, *, masked: bool):
        step, top, total, acc = carry
        stage = stage_of(step)
        plgpu.barrier_wait(k_loaded.at[stage])

        def multiply(ref):
            plgpu.wgmma(ref, q_shared, k_shared.at[stage].transpose((1, 0)))
            return ref[...]

        shape = GROUP_ROWS, BLOCK_KV
        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(k_used.at[stage])
        pl.when(block == num_blocks - 1)(
            functools.partial(plgpu.barrier_arrive, q_used)
        )
        if masked:
            row, token = (iota(shape, axis) for axis in range(2))
            seen = token + block * BLOCK_KV <= row + first_position
            scores = jnp.where(seen, scores, -jnp.inf)
        # Scaled after the maximum, so that each weight takes one multiply-add.
        new_top = jnp.maximum(top, scores.max(axis=1) * scale)
        weights = jnp.exp2(scores * scale - _across(new_top, shape))
        decay = jnp.exp2(top - new_top)
        acc = acc * _across(decay, acc.shape)
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(v_shared.dtype)
        plgpu.barrier_wait(v_loaded.at[stage])
        if masked:
            pl.when((block + 1) * BLOCK_KV > num_tokens)(
                lambda: _clear(v_shared.at[stage], num_tokens - block * BLOCK_KV)
            )

        def add(ref):
            plgpu.wgmma(ref, weights, v_shared.at[stage])

        acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
        plgpu.barrier_arrive(v_used.at[stage])
        return step + 1, new_top, total, acc

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        step,
        plgpu.layout_cast(jnp.full(GROUP_ROWS, _LEAST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.full(GROUP_ROWS, 0, jnp.float32), by_row),
        plgpu.layout_cast(
            jnp.full((GROUP_ROWS, head_dim), 0, jnp.float32), plgpu.Layout.WGMMA
        ),
    )
    for first, last, masked in ((0, whole, False), (whole, num_blocks, True)):
        attend = functools.partial(attend_block, masked=masked)
        carry = lax.fori_loop(first, last, attend, carry)
    step, _, total, acc = carry
    return step, acc * _across(1 / jnp.where(total > 0, total, 1.0), acc.shape)


def _clear(v_shared, num_tokens: Array) -> None:
    """Zero the values past the end, in place: zero times what lies there may be NaN.

    Each group does so before it multiplies, and writes what the other one does.
    """
    for row in range(0, v_shared.shape[0], 64):
        for column in range(0, v_shared.shape[1], 64):
            ref = v_shared.at[pl.ds(row, 64), pl.ds(column, 64)]
            v = load(ref)
            ref[...] = jnp.where(
                iota(v.shape, 0) + row < num_tokens, v, jnp.zeros((), v.dtype)
            )
    plgpu.commit_smem()


def _across(rows: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(rows, shape, [0])


def store_rows(
    window: Window,
    group: Array,
    value: Array,  # [64, columns]
    at: Callable[[Any], Any],
    shared,  # [64, columns] of `tiled_memory`
    rows_shared,  # [64, columns], as they lie in memory
) -> None:
    """Write a group's rows that are the window's: at once if all are.

    Args:
      at: gives a row's ref, or that of a slice of rows.
    """
    offset = group * GROUP_ROWS
    first = window.first + offset
    begin, end = (
        jnp.clip(row - offset, 0, GROUP_ROWS) for row in (window.begin, window.end)
    )
    wait_read()

    @pl.when(end - begin == GROUP_ROWS)
    def _():
        shared[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, at(pl.ds(first, GROUP_ROWS)))

    @pl.when((begin < end) & (end - begin < GROUP_ROWS))
    def _():
        store(rows_shared, value)
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _(row):
            plgpu.copy_smem_to_gmem(rows_shared.at[row], at(first + row))
