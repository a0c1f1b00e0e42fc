"""Paged attention for one query row a sequence: split-KV, grouped heads.

Knows pages and sequences of one row; nothing of longer ones (`_attention_prefill`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._kv_tile import (
    attend_block,
    empty_sums,
    load_kv,
    load_page_ids,
    load_rows,
    padded,
    store_rows,
)
from punica_jax.pallas_kernels._launch import pallas_call


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the decode form cuts its work.

    Attributes:
      block_kv: tokens an iteration, a power of two, at least 16.
      splits: parts that each sequence's tokens are cut into, a power of two.
      num_warps: warps of a program.
      num_stages: iterations whose loads overlap.
    """

    block_kv: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name, least in (("block_kv", 16), ("splits", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(
                    f"{name} must be a power of two, at least {least}, got {value}"
                )


def default_config(
    *,
    seqs: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    itemsize: int,
    max_kv_len: int,
) -> DecodeConfig:
    """Choose a configuration; a function of static things alone."""
    # At most 16 KiB of K and as much of V an iteration.
    block_kv = max(16, min(64, 16384 // (padded(head_dim) * itemsize)))
    splits = _num_splits(seqs * kv_heads, pl.cdiv(max_kv_len, block_kv))
    # Two warps wait less for each other: 22.1 us against 24.1 for 32 sequences of 512
    # tokens and 8 kv heads (H200). More than 16 rows, or float32, would spill. With two
    # or four splits four warps are faster: 16 sequences with contexts of the paper's
    # trace take 26.4 us, not 27.5, of 512 tokens 17.1, not 17.7, 8 of them 10.7, not
    # 11.2 (one H100). With more splits they were not measured.
    narrow = 1 < group <= 16 and itemsize == 2
    num_warps = 2 if narrow and splits not in (2, 4) else 4
    return DecodeConfig(block_kv=block_kv, splits=splits, num_warps=num_warps)


def _num_splits(programs: int, blocks: int) -> int:
    # Two programs a multiprocessor (132) keep the memory busy. Where there are as many
    # already, a second launch that sums the splits only costs: 22.1 us became 28.
    splits = 1
    while programs * splits < 256 and splits < min(blocks, 32):
        splits *= 2
    return splits


def decode_attention(
    q: Array,  # [rows, heads, head_dim]
    kv_pages: Array,  # [2, pages, kv_heads, page_size, head_dim]
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    scale: float,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Run `paged_attention` for sequences of at most one row each."""
    rows, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = kv_pages.shape
    seqs, pages_per_seq = page_table.shape
    if config is None:
        config = default_config(
            seqs=seqs,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_dim=head_dim,
            itemsize=kv_pages.dtype.itemsize,
            max_kv_len=pages_per_seq * page_size,
        )
    # A slot is a sequence, and beyond those whatever padding rows are left.
    slots, splits = max(rows, seqs), config.splits
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    stats = jax.ShapeDtypeStruct((slots * splits, heads), jnp.float32)
    sums = jax.ShapeDtypeStruct((slots * splits, heads, head_dim), jnp.float32)
    partial = pallas_call(
        functools.partial(_decode_kernel, scale=scale, config=config),
        out_shape=out_shape if splits == 1 else (sums, stats, stats),
        grid=(slots, kv_heads, splits),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(q, kv_pages, page_table, bounds, kv_lens)
    if splits == 1:
        return partial
    return pallas_call(
        functools.partial(_combine_kernel, splits=splits),
        out_shape=out_shape,
        grid=(slots, heads),
        compiler_params=plgpu.CompilerParams(num_warps=1 if splits <= 8 else 4),
        interpret=interpret,
        name="paged_attention_combine",
    )(*partial, bounds)


def _row_of_slot(
    bounds_ref,  # i32[seqs + 1]
    slot: Array,  # i32[]
) -> tuple[Array, Array]:
    """The slot's row, and whether it belongs to a sequence.

    Every padding row gets an idle slot, which writes zeros there: each live sequence
    has one row, so `bounds[slot]` counts those before, and the rest before are idle.
    An idle slot left over gets a row past the end.
    """
    seqs = bounds_ref.shape[0] - 1
    first = bounds_ref[jnp.minimum(slot, seqs)]
    live = bounds_ref[jnp.minimum(slot + 1, seqs)] > first
    return jnp.where(live, first, bounds_ref[seqs] + slot - first), live


def _decode_kernel(
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    bounds_ref,  # i32[seqs + 1]
    lens_ref,  # i32[seqs]
    out_ref,  # [rows, heads, head_dim], or f32[slots * splits, heads, head_dim]
    *stats_refs,  # of splits, f32[slots * splits, heads]: maximum, total
    scale: float,
    config: DecodeConfig,
):
    slot, kv_head, split = (pl.program_id(axis) for axis in range(3))
    rows, heads, _ = q_ref.shape
    _, _, kv_heads, page_size, _ = kv_ref.shape
    seqs, pages_per_seq = table_ref.shape
    group, block_kv = heads // kv_heads, config.block_kv

    row, live = _row_of_slot(bounds_ref, slot)
    seq = jnp.minimum(slot, seqs - 1)
    kv_len = jnp.minimum(lens_ref[seq], pages_per_seq * page_size)
    kv_len = jnp.where(live, kv_len, 0)
    blocks = pl.cdiv(kv_len, block_kv)
    blocks_per_split = pl.cdiv(blocks, config.splits)
    lower = split * blocks_per_split
    upper = jnp.minimum(lower + blocks_per_split, blocks)

    lane = jnp.arange(padded(group), dtype=jnp.int32)
    head = kv_head * group + lane
    q = load_rows(q_ref, row, head, (lane < group) & (row < rows))

    page_ids_at = functools.partial(
        load_page_ids,
        table_ref,
        seq,
        end=kv_len,
        block_kv=block_kv,
        page_size=page_size,
    )

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

    state = empty_sums(q)
    _, state = jax.lax.fori_loop(
        lower, upper, body, (page_ids_at(lower * block_kv), state)
    )
    top, total, acc = state
    if not stats_refs:
        acc = acc / jnp.where(total > 0, total, 1.0)[:, None]
        store_rows(out_ref, row, head, (lane < group) & (row < rows), acc)
        return
    part = slot * config.splits + split
    for ref, value in zip(stats_refs, (top, total), strict=True):
        plgpu.store(ref.at[part, head], value, mask=lane < group)
    # The sums of a split without tokens are never read.
    store_rows(out_ref, part, head, (lane < group) & (lower < upper), acc)


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
    row, _ = _row_of_slot(bounds_ref, slot)
    part = slot * splits + jnp.arange(splits, dtype=jnp.int32)
    tops = tops_ref[part, head]
    totals = totals_ref[part, head]
    weights = jnp.exp2(tops - tops.max(axis=0))
    total = (totals * weights).sum(axis=0)
    sums = load_rows(sums_ref, part, jnp.full((splits,), head), totals > 0)
    out = (sums * weights[:, None]).sum(axis=0) / jnp.where(total > 0, total, 1.0)
    index = jnp.arange(out.shape[0], dtype=jnp.int32)
    mask = (index < out_ref.shape[-1]) & (row < out_ref.shape[0])
    plgpu.store(out_ref.at[row, head, index], out.astype(out_ref.dtype), mask=mask)
