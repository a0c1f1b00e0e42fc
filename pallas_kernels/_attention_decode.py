"""Paged attention for one query row a sequence: split-KV, grouped heads.

Knows pages and sequences of one row; of longer ones (`_attention_prefill`) only that
it leaves them out.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._decode_config import AT_ONCE, DecodeConfig, config_of
from punica_jax.pallas_kernels._kv_tile import (
    Sums,
    attend_block,
    empty_sums,
    load_kv,
    load_page_ids,
    load_rows,
    padded,
    store_rows,
)
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call


@compiled_once
def decode_attention(
    q: Array,  # [rows, heads, head_dim]
    kv_pages: Array,  # [2, pages, kv_heads, page_size, head_dim]
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    scale: float,
    others: Array | None = None,  # [rows, heads, head_dim]
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Run `paged_attention` for sequences of at most one row each.

    Those of more rows are left out where there are `others`, which hold what their rows
    attend to: the result is written to the same array. Then there are no splits.
    """
    if config is None:
        config = config_of(q, kv_pages, page_table)
    assert others is None or config.splits == 1, config
    slots = num_slots(q, page_table, others)
    kernel = functools.partial(
        _decode_kernel, has_others=others is not None, scale=scale, config=config
    )
    grid, order = (slots, kv_pages.shape[2], config.splits), ()
    if not run_at_once(grid):
        grid, order = grid[::-1], (longest_first(bounds, kv_lens, slots=slots),)
    operands = *order, q, kv_pages, page_table, bounds, kv_lens
    operands, aliases = with_others(operands, others)
    partial = pallas_call(
        kernel if order else functools.partial(kernel, None),
        out_shape=result_shapes(q, slots, config.splits),
        grid=grid,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*operands)
    return combine_splits(partial, bounds, q, interpret=interpret)


def num_slots(q: Any, page_table: Any, others: Any) -> int:
    """Return the slots of a launch: one for each sequence.

    And without `others` one for each row beyond those, for padding rows' zeros.
    """
    rows, seqs = q.shape[0], page_table.shape[0]
    return max(rows, seqs) if others is None else seqs


def with_others(
    operands: tuple[Array, ...], others: Array | None
) -> tuple[tuple[Array, ...], dict[int, int]]:
    """Return a launch's operands, `others` last, and which result is whose array."""
    if others is None:
        return operands, {}
    return (*operands, others), {len(operands): 0}


def result_shapes(
    q: Array | jax.ShapeDtypeStruct, slots: int, splits: int
) -> list[jax.ShapeDtypeStruct]:
    """Return what a launch writes: q's like, or of splits sums, maxima and totals."""
    if splits == 1:
        return [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    _, heads, head_dim = q.shape
    stats = jax.ShapeDtypeStruct((slots * splits, heads), jnp.float32)
    sums = jax.ShapeDtypeStruct((*stats.shape, head_dim), jnp.float32)
    return [sums, stats, stats]


def run_at_once(grid: tuple[int, ...]) -> bool:
    """Whether all programs of a launch run at once.

    Else the rest begin as others end: those with most tokens first, none ends far
    behind. A GPU begins programs along the first axis first, so slots are the last one.
    """
    return math.prod(grid) <= AT_ONCE


# A function of its own is traced once for all layers; of its calls XLA leaves one.
@functools.partial(jax.jit, static_argnames="slots")
def longest_first(bounds: Array, kv_lens: Array, *, slots: int) -> Array:
    """Return slots by their tokens, those with the most first, `i32[slots]`.

    Sequences that do not have one row count as if they had no tokens.
    """
    tokens = jnp.where(jnp.diff(bounds) == 1, kv_lens, 0)
    tokens = jnp.pad(tokens, (0, slots - len(tokens)))
    return lax.sort_key_val(-tokens, jnp.arange(slots, dtype=jnp.int32))[1]


def row_of_slot(
    bounds,  # i32[seqs + 1], or a ref of it
    slot: Array,  # i32[] or i32[n]
    outside: int | None = None,
) -> tuple[Array, Array]:
    """The slot's row, and whether it is the only one of a sequence; else it is idle.

    Without `outside` no sequence has more rows, and every padding row gets an idle
    slot, which writes zeros there: `bounds[slot]` counts the live ones before, and the
    rest before are idle. An idle slot left over gets a row past the end. With
    `outside`, the number of rows, all idle slots do.
    """
    seqs = bounds.shape[0] - 1
    first = bounds[jnp.minimum(slot, seqs)]
    live = bounds[jnp.minimum(slot + 1, seqs)] - first == 1
    idle = bounds[seqs] - first if outside is None else outside
    return jnp.where(live, first, idle + slot), live


def _decode_kernel(
    order_ref,  # i32[slots], those with the most tokens first; None: as they come
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    bounds_ref,  # i32[seqs + 1]
    lens_ref,  # i32[seqs]
    # Of `others`, if there are any; out_ref, [rows, heads, head_dim], the same array,
    # or f32[slots * splits, heads, head_dim]; of splits, f32[slots * splits, heads]:
    # maximum, total.
    *refs,
    has_others: bool,
    scale: float,
    config: DecodeConfig,
):
    out_ref, *stats_refs = refs[has_others:]
    first, kv_head, last = (pl.program_id(axis) for axis in range(3))
    slot, split = (first, last) if order_ref is None else (order_ref[last], first)
    rows, heads, _ = q_ref.shape
    _, _, kv_heads, page_size, _ = kv_ref.shape
    seqs, pages_per_seq = table_ref.shape
    group = heads // kv_heads

    row, live = row_of_slot(bounds_ref, slot, rows if has_others else None)
    seq = jnp.minimum(slot, seqs - 1)
    kv_len = jnp.minimum(lens_ref[seq], pages_per_seq * page_size)
    kv_len = jnp.where(live, kv_len, 0)
    blocks = lower, upper = blocks_of_split(kv_len, split, config)

    def work():
        lane = jnp.arange(padded(group), dtype=jnp.int32)
        head = kv_head * group + lane
        q = load_rows(q_ref, row, head, (lane < group) & (row < rows))
        sums = attend_blocks(
            q,
            kv_ref,
            table_ref,
            seq,
            kv_head,
            kv_len,
            blocks,
            scale=scale,
            config=config,
        )
        if not stats_refs:
            store_result(out_ref, row, head, (lane < group) & (row < rows), sums)
            return
        part = slot * config.splits + split
        refs = out_ref, *stats_refs
        store_split(refs, part, head, lane < group, sums, lower < upper)

    # Without others idle slots write padding rows' zeros.
    pl.when(live)(work) if has_others else work()


def blocks_of_split(
    kv_len: Array, split: Array, config: DecodeConfig
) -> tuple[Array, Array]:
    """Return a split's first block, and the one after its last."""
    blocks = pl.cdiv(kv_len, config.block_kv)
    blocks_per_split = pl.cdiv(blocks, config.splits)
    lower = split * blocks_per_split
    return lower, jnp.minimum(lower + blocks_per_split, blocks)


def store_result(out_ref, row: Array, head: Array, mask: Array, sums: Sums) -> None:
    """Store what queries attended to, where all of it is here."""
    _, total, acc = sums
    store_rows(
        out_ref, row, head, mask, acc / jnp.where(total > 0, total, 1.0)[:, None]
    )


def store_split(
    refs,  # f32[n, heads, head_dim]; of maxima and totals, f32[n, heads]
    part: Array,  # i32[], of n
    head: Array,  # i32[n]
    mask: Array,  # bool[n]
    sums: Sums,
    has_tokens: Array | bool = True,  # bool[]
) -> None:
    """Store what queries have of a split or a part, for `add_up`."""
    sums_ref, *stats_refs = refs
    *stats, acc = sums
    for ref, value in zip(stats_refs, stats, strict=True):
        plgpu.store(ref.at[part, head], value, mask=mask)
    # The sums of a split without tokens are never read.
    store_rows(sums_ref, part, head, mask & has_tokens, acc)


def attend_blocks(
    q: Array,  # [padded(group), padded(head_dim)]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    seq: Array,  # i32[]
    kv_head: Array,  # i32[]
    kv_len: Array,  # i32[]
    blocks: tuple[Array, Array],  # i32[]: the first, and the one after the last
    *,
    scale: float,
    config: DecodeConfig,
    first_ids: Array | None = None,
) -> Sums:
    """Attend to some blocks of a sequence: maximum, total and weighted sum a query.

    Where the first block's pages are known, as `first_ids`, no load waits for them.
    """
    block_kv = config.block_kv
    page_ids_at = page_ids_of(kv_ref, table_ref, seq, kv_len, config)

    def body(block, carry):
        # Loaded an iteration ahead: an address that waits for a load cannot be
        # prefetched by the compiler.
        page_ids, state = carry
        start = block * block_kv
        k, v = (
            load_kv(kv_ref, part, page_ids, kv_head, start, kv_len, block_kv=block_kv)
            for part in range(2)
        )
        seen = start + jnp.arange(block_kv, dtype=jnp.int32) < kv_len
        state = attend_block(q, k, v, seen[None, :], scale * math.log2(math.e), state)
        return page_ids_at(start + block_kv), state

    lower, upper = blocks
    state = empty_sums(q, block_kv if config.totals_late else None)
    if first_ids is None:
        first_ids = page_ids_at(lower * block_kv)
    _, state = lax.fori_loop(lower, upper, body, (first_ids, state))
    top, total, acc = state
    return top, total.sum(axis=1) if config.totals_late else total, acc


def page_ids_of(
    kv_ref, table_ref, seq: Array, kv_len: Array, config: DecodeConfig
) -> Callable[[Array], Array]:
    """Return what loads the pages of a block, by its first token."""
    return functools.partial(
        load_page_ids,
        table_ref,
        seq,
        end=kv_len,
        block_kv=config.block_kv,
        page_size=kv_ref.shape[3],
    )


def combine_splits(
    partial: Sequence[Array],
    bounds: Array,
    q: Array | jax.ShapeDtypeStruct,
    *,
    interpret: bool,
) -> Array:
    """Return the result of `result_shapes`: of splits by a launch that adds them up."""
    if len(partial) == 1:
        return partial[0]
    slots = max(q.shape[0], bounds.size - 1)
    splits = partial[0].shape[0] // slots
    return pallas_call(
        functools.partial(_combine_kernel, splits=splits),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(slots, q.shape[1]),
        compiler_params=plgpu.CompilerParams(num_warps=1 if splits <= 8 else 4),
        interpret=interpret,
        name="paged_attention_combine",
    )(*partial, bounds)


def _combine_kernel(
    sums_ref,  # f32[slots * splits, heads, head_dim]
    tops_ref,  # f32[slots * splits, heads]
    totals_ref,  # f32[slots * splits, heads]
    bounds_ref,  # i32[seqs + 1]
    out_ref,  # [rows, heads, head_dim]
    *,
    splits: int,
):
    slot, head = pl.program_id(0), pl.program_id(1)
    row, _ = row_of_slot(bounds_ref, slot)
    part = slot * splits + jnp.arange(splits, dtype=jnp.int32)
    add_up(sums_ref, tops_ref, totals_ref, out_ref, part, None, row, head)


def add_up(
    sums_ref,  # f32[n, heads, head_dim]
    tops_ref,  # f32[n, heads]
    totals_ref,  # f32[n, heads]
    out_ref,  # [rows, heads, head_dim]
    part: Array,  # i32[parts]
    there: Array | None,  # bool[parts]; None if all are
    row: Array,  # i32[]
    head: Array,  # i32[]
) -> None:
    """Add up what a query has of its sequence's parts, each at its `part` of `n`."""
    if there is None:
        tops, totals = tops_ref[part, head], totals_ref[part, head]
    else:
        least = jnp.finfo(jnp.float32).min
        tops = plgpu.load(tops_ref.at[part, head], mask=there, other=least)
        totals = plgpu.load(totals_ref.at[part, head], mask=there, other=0.0)
    weights = jnp.exp2(tops - tops.max(axis=0))
    total = (totals * weights).sum(axis=0)
    # Not those above zero: a kernel's maximum drops a NaN, and a total keeps it.
    some = totals != 0
    sums = load_rows(sums_ref, part, jnp.broadcast_to(head, part.shape), some)
    out = (sums * weights[:, None]).sum(axis=0) / jnp.where(total > 0, total, 1.0)
    index = jnp.arange(out.shape[0], dtype=jnp.int32)
    mask = (index < out_ref.shape[-1]) & (row < out_ref.shape[0])
    plgpu.store(out_ref.at[row, head, index], out.astype(out_ref.dtype), mask=mask)
