"""Paged attention for one query row a sequence: split-KV, grouped heads.

Knows pages and sequences of one row; nothing of longer ones (`_attention_prefill`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._dispatch import multiprocessors, shared_bytes
from punica_jax.pallas_kernels._kv_tile import (
    attend_block,
    empty_sums,
    load_kv,
    load_page_ids,
    load_rows,
    padded,
    store_rows,
)
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call

# Programs that run at once: two for each of 132 multiprocessors, in powers of two.
_AT_ONCE = 256
# Of shared memory, for two programs a multiprocessor, each with three blocks on their
# way and one in use; or for one with twice as long blocks.
ROOMY_BYTES = 200 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the decode form cuts its work.

    Attributes:
      block_kv: tokens an iteration, a power of two, at least 16.
      splits: parts that each sequence's tokens are cut into, a power of two.
      num_warps: warps of a program.
      num_stages: iterations whose loads overlap.
      totals_late: whether a row's weights are added up after the last iteration, not
        in each.
    """

    block_kv: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3
    totals_late: bool = False

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
    programs = seqs * kv_heads
    # More rows, or float32, would spill with fewer warps or totals for each token.
    narrow = group <= 16 and itemsize == 2
    roomy = shared_bytes() >= ROOMY_BYTES
    # One program a multiprocessor with blocks as long as two programs' beats two splits
    # and the launch that adds them: 16 sequences of 512 tokens and 8 kv heads take 11.7
    # us, not 13.2, of 2000 33.6, not 36.0 (H200).
    one_each = _AT_ONCE // 2 <= programs <= multiprocessors()
    if narrow and group > 1 and roomy and one_each:
        return DecodeConfig(block_kv=2 * block_kv, splits=1, totals_late=True)

    splits = _num_splits(programs, pl.cdiv(max_kv_len, block_kv))
    if splits > 1:
        # With two or four splits four warps are faster: 8 sequences of 512 tokens and 8
        # kv heads take 10.7 us, not 11.2 (H100). With more they were not measured.
        num_warps = 2 if narrow and group > 1 and splits > 4 else 4
        return DecodeConfig(block_kv=block_kv, splits=splits, num_warps=num_warps)
    # Where all programs run at once, the one with most tokens decides. It is fastest
    # with two warps, which wait less for each other, and without a sum over tokens in
    # each iteration: with contexts of the paper's trace 32 sequences with 8 kv heads
    # take 33.3 us, not 36.0, of 512 tokens 19.2, not 19.3 (H200).
    two_warps = narrow and (group > 1 or programs <= _AT_ONCE)
    # Twice as many wait less for memory with three blocks on their way: 64 such take
    # 44.6 us, not 47.0, of 640 tokens 45.1, not 46.6; 16 with 32 kv heads, four warps,
    # 51.2, not 53.5, of 512 tokens 36.2, not 37.7. Four times as many do not.
    deep = narrow and roomy and _AT_ONCE < programs <= 2 * _AT_ONCE
    return DecodeConfig(
        block_kv=block_kv,
        splits=1,
        num_warps=2 if two_warps else 4,
        num_stages=4 if deep else 3,
        totals_late=two_warps or deep,
    )


def _num_splits(programs: int, blocks: int) -> int:
    # Where there are as many programs as run at once, a second launch that sums the
    # splits only costs: 22.1 us became 28.
    splits = 1
    while programs * splits < _AT_ONCE and splits < min(blocks, 32):
        splits *= 2
    return splits


def config_of(
    q: jax.ShapeDtypeStruct | Array,
    kv_pages: jax.ShapeDtypeStruct | Array,
    page_table: jax.ShapeDtypeStruct | Array,
) -> DecodeConfig:
    """Choose a configuration for operands, of which only shapes and dtypes count."""
    _, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = kv_pages.shape
    seqs, pages_per_seq = page_table.shape
    return default_config(
        seqs=seqs,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        itemsize=kv_pages.dtype.itemsize,
        max_kv_len=pages_per_seq * page_size,
    )


@compiled_once
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
    kv_heads, seqs = kv_pages.shape[2], page_table.shape[0]
    if config is None:
        config = config_of(q, kv_pages, page_table)
    # A slot is a sequence, and beyond those whatever padding rows are left.
    slots, splits = max(rows, seqs), config.splits
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    stats = jax.ShapeDtypeStruct((slots * splits, heads), jnp.float32)
    sums = jax.ShapeDtypeStruct((slots * splits, heads, head_dim), jnp.float32)
    kernel = functools.partial(_decode_kernel, scale=scale, config=config)
    grid, order = (slots, kv_heads, splits), ()
    # The rest begin as others end: those with most tokens first, none ends far behind.
    # A GPU begins programs along the first axis first, so slots are the last one.
    if math.prod(grid) > _AT_ONCE:
        grid, order = grid[::-1], (_longest_first(bounds, kv_lens, slots=slots),)
    partial = pallas_call(
        kernel if order else functools.partial(kernel, None),
        out_shape=out_shape if splits == 1 else (sums, stats, stats),
        grid=grid,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*order, q, kv_pages, page_table, bounds, kv_lens)
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


# A function of its own is traced once for all layers; of its calls XLA leaves one.
@functools.partial(jax.jit, static_argnames="slots")
def _longest_first(bounds: Array, kv_lens: Array, *, slots: int) -> Array:
    """Return slots by their tokens, those with the most first, `i32[slots]`."""
    tokens = jnp.where(jnp.diff(bounds) > 0, kv_lens, 0)
    tokens = jnp.pad(tokens, (0, slots - len(tokens)))
    return lax.sort_key_val(-tokens, jnp.arange(slots, dtype=jnp.int32))[1]


def row_of_slot(
    bounds,  # i32[seqs + 1], or a ref of it
    slot: Array,  # i32[] or i32[n]
) -> tuple[Array, Array]:
    """The slot's row, and whether it belongs to a sequence.

    Every padding row gets an idle slot, which writes zeros there: each live sequence
    has one row, so `bounds[slot]` counts those before, and the rest before are idle.
    An idle slot left over gets a row past the end.
    """
    seqs = bounds.shape[0] - 1
    first = bounds[jnp.minimum(slot, seqs)]
    live = bounds[jnp.minimum(slot + 1, seqs)] > first
    return jnp.where(live, first, bounds[seqs] + slot - first), live


def _decode_kernel(
    order_ref,  # i32[slots], those with the most tokens first; None: as they come
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
    first, kv_head, last = (pl.program_id(axis) for axis in range(3))
    slot, split = (first, last) if order_ref is None else (order_ref[last], first)
    rows, heads, _ = q_ref.shape
    _, _, kv_heads, page_size, _ = kv_ref.shape
    seqs, pages_per_seq = table_ref.shape
    group, block_kv = heads // kv_heads, config.block_kv

    row, live = row_of_slot(bounds_ref, slot)
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
    top, total, acc = attend_blocks(
        q,
        kv_ref,
        table_ref,
        seq,
        kv_head,
        kv_len,
        (lower, upper),
        scale=scale,
        config=config,
    )
    if not stats_refs:
        acc = acc / jnp.where(total > 0, total, 1.0)[:, None]
        store_rows(out_ref, row, head, (lane < group) & (row < rows), acc)
        return
    part = slot * config.splits + split
    for ref, value in zip(stats_refs, (top, total), strict=True):
        plgpu.store(ref.at[part, head], value, mask=lane < group)
    # The sums of a split without tokens are never read.
    store_rows(out_ref, part, head, (lane < group) & (lower < upper), acc)


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
) -> tuple[Array, Array, Array]:
    """Attend to some blocks of a sequence: maximum, total and weighted sum a query."""
    block_kv = config.block_kv
    page_ids_at = functools.partial(
        load_page_ids,
        table_ref,
        seq,
        end=kv_len,
        block_kv=block_kv,
        page_size=kv_ref.shape[3],
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

    lower, upper = blocks
    state = empty_sums(q, block_kv if config.totals_late else None)
    _, state = lax.fori_loop(lower, upper, body, (page_ids_at(lower * block_kv), state))
    top, total, acc = state
    return top, total.sum(axis=1) if config.totals_late else total, acc


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
