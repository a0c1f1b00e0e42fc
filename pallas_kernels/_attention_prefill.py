"""Causal paged attention for a ragged batch of queries of any length.

Knows tiles of a sequence's rows and its pages; nothing of splitting one row's tokens
over programs (`_attention_decode`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._attention_reference import query_tiles, with_padding
from punica_jax.pallas_kernels._kv_tile import (
    MIN_DOT_DIM,
    attend_block,
    empty_sums,
    load_kv,
    load_page_ids,
    load_rows,
    padded,
    store_rows,
)
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call, split_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How the prefill form cuts its work.

    Attributes:
      block_rows: rows of one sequence a tile, a power of two. A program holds them
        for all query heads of one kv head.
      block_kv: tokens an iteration, a power of two, at least 16.
      num_warps: warps of a program.
      num_stages: iterations whose loads overlap.
    """

    block_rows: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name, least in (("block_rows", 1), ("block_kv", MIN_DOT_DIM)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(
                    f"{name} must be a power of two, at least {least}, got {value}"
                )


def default_config(
    *, group: int, head_dim: int, itemsize: int, max_query_len: int
) -> PrefillConfig:
    """Choose a configuration; a function of static things alone."""
    lanes = padded(head_dim)
    if itemsize == 4:
        # Without tensor cores a product is unrolled whole: beyond this it spills.
        tile_rows = block_kv = 32 if lanes <= 64 else 16
        num_warps = 4
    else:
        # Small enough for three programs a multiprocessor, which hide each other's
        # waits: 4 prompts of 512 took 65 us so, 74 us or more with 128 rows (H200).
        tile_rows = 64
        block_kv, num_warps = max(16, min(32, 4096 // lanes)), 4
    group_rows = pl.next_power_of_2(group)
    most = pl.next_power_of_2(max_query_len)
    least = pl.cdiv(MIN_DOT_DIM, group_rows)
    block_rows = max(least, min(most, tile_rows // group_rows))
    return PrefillConfig(block_rows=block_rows, block_kv=block_kv, num_warps=num_warps)


@compiled_once
def prefill_attention(
    q: Array,  # [rows, heads, head_dim]
    kv_pages: Array,  # [2, pages, kv_heads, page_size, head_dim]
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    max_query_len: int,
    scale: float,
    skip_lone: bool = False,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Run `paged_attention` for sequences of any number of rows.

    With `skip_lone` those of one row are left out: their rows are not written.
    """
    rows, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[2]
    if config is None:
        config = default_config(
            group=heads // kv_heads,
            head_dim=head_dim,
            itemsize=kv_pages.dtype.itemsize,
            max_query_len=max_query_len,
        )
    tiles = _tile_table(
        bounds,
        kv_lens,
        rows=rows,
        block_rows=config.block_rows,
        skip_lone=skip_lone,
    )
    return pallas_call(
        functools.partial(_prefill_kernel, scale=scale, config=config),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tiles.shape[0], kv_heads),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_prefill",
    )(q, kv_pages, page_table, tiles)


def _tile_table(
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    rows: int,
    block_rows: int,
    skip_lone: bool = False,
) -> Array:
    """Each tile's sequence, first row, number of rows, and tokens before its rows.

    The padding rows are one more sequence, -1, whose tiles write zeros.

    Returns:
      `i32[tiles, 4]`; unused tiles have no rows.
    """
    seqs = kv_lens.shape[0]
    bounds, skipped = with_padding(bounds, rows, skip_lone=skip_lone)
    seq, first = query_tiles(bounds, rows=rows, block_rows=block_rows, skipped=skipped)
    end = jnp.where(seq < 0, first, bounds[seq + 1])
    before = kv_lens[jnp.clip(seq, 0, seqs - 1)] - end + first
    num_rows = jnp.clip(end - first, 0, block_rows)
    seq = jnp.where(seq < seqs, seq, -1)
    return jnp.stack([seq, first, num_rows, before], axis=1)


def _prefill_kernel(
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    tiles_ref,  # i32[tiles, 4]
    out_ref,  # [rows, heads, head_dim]
    *,
    scale: float,
    config: PrefillConfig,
):
    # A sequence's last tiles see the most tokens: they go first.
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    kv_head = pl.program_id(1)
    seq, first, num_rows, before = (tiles_ref[tile, column] for column in range(4))

    @pl.when(num_rows > 0)
    def _():
        _attend_tile(
            q_ref,
            kv_ref,
            table_ref,
            out_ref,
            seq=jnp.maximum(seq, 0),
            first=first,
            num_rows=num_rows,
            # Nothing is before or at a padding row.
            before=jnp.where(seq < 0, -num_rows, before),
            kv_head=kv_head,
            scale=scale * math.log2(math.e),
            config=config,
        )


def _attend_tile(
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    out_ref,  # [rows, heads, head_dim]
    *,
    seq: Array,  # i32[]
    first: Array,  # i32[]
    num_rows: Array,  # i32[], at least 1
    before: Array,  # i32[]
    kv_head: Array,  # i32[]
    scale: float,
    config: PrefillConfig,
):
    _, _, kv_heads, page_size, _ = kv_ref.shape
    group = q_ref.shape[1] // kv_heads
    group_rows = pl.next_power_of_2(group)
    block_kv = config.block_kv
    # Query heads of the kv head are folded into the rows of the tile.
    lane = jnp.arange(config.block_rows * group_rows, dtype=jnp.int32)
    row, member = split_number(lane, group_rows)
    mask = (row < num_rows) & (member < group)
    head = kv_head * group + member
    q = load_rows(q_ref, first + row, head, mask)

    # The last row sees tokens up to `end`, the first row all of `whole` blocks.
    end = jnp.minimum(before + num_rows, table_ref.shape[1] * page_size)
    end = jnp.maximum(end, 0)
    blocks = pl.cdiv(end, block_kv)
    whole = jnp.clip(lax.div(before + 1, jnp.int32(block_kv)), 0, blocks)

    page_ids_at = functools.partial(
        load_page_ids, table_ref, seq, end=end, block_kv=block_kv, page_size=page_size
    )

    def body(block, carry, *, limit):
        # Loaded an iteration ahead: an address that waits for a load cannot be
        # prefetched by the compiler.
        page_ids, sums = carry
        start = block * block_kv
        k, v = (
            load_kv(kv_ref, part, page_ids, kv_head, start, limit, block_kv=block_kv)
            for part in range(2)
        )
        seen = None
        if limit is not None:
            token = start + jnp.arange(block_kv, dtype=jnp.int32)
            seen = token[None, :] <= (before + row)[:, None]
            seen &= (token < limit)[None, :]
        sums = attend_block(q, k, v, seen, scale, sums)
        return page_ids_at(start + block_kv), sums

    carry = (page_ids_at(jnp.int32(0)), empty_sums(q))
    carry = lax.fori_loop(0, whole, functools.partial(body, limit=None), carry)
    _, sums = lax.fori_loop(whole, blocks, functools.partial(body, limit=end), carry)
    _, total, acc = sums
    out = acc / jnp.where(total > 0, total, 1.0)[:, None]
    store_rows(out_ref, first + row, head, mask, out)
