"""Decode attention whose programs first expand their own q, k and v.

A program of `_attention_decode` needs one head of q, and the last one of a sequence its
new key and value: what an expand with rotary embedding would write for it is three
heads of one row. Where programs are many it computes them while others read the cache,
and a layer has one launch less. Knows pools, segments, pages and sequences of one row;
nothing of the product before.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._adapter_rows import (
    LANES,
    AdapterRows,
    KnownRows,
    columns_of,
)
from punica_jax.pallas_kernels._attention_decode import (
    attend_blocks,
    blocks_of_split,
    combine_splits,
    longest_first,
    page_ids_of,
    result_shapes,
    row_of_slot,
    run_at_once,
    store_result,
    store_split,
)
from punica_jax.pallas_kernels._attention_parts import parts_config
from punica_jax.pallas_kernels._decode_config import DecodeConfig, config_of
from punica_jax.pallas_kernels._fused import Shrunk
from punica_jax.pallas_kernels._head_halves import (
    keys_or_values,
    rotate,
    store_halves,
)
from punica_jax.pallas_kernels._kv_tile import load_rows, padded
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call
from punica_jax.pallas_kernels._pool import LoraPool

# Of 32 rows of Llama-2-7B with 512 tokens each a step takes 1.2 % less so with one
# adapter of rank 16 and 0.8 with 32, of 1 and 64 rows 1.9 and 0.5, of 128 as long.
# Where heads share keys programs are few and each waits for its own q: of Llama-3.1-8B
# 32 rows take 0.4 % less, with lengths of the paper's trace 0.7 more, 64 rows 0.5 to
# 1.5 more (one H200). Other widths of heads, and more pages, were not measured.
_HEAD_DIM = 128
_MAX_PAGES = 4
# q's, k's and v's, and one of nothing: a power of two.
_HEADS = 4


def fits(
    q: jax.ShapeDtypeStruct, kv_pages: Array, page_table: Array, pool: LoraPool
) -> bool:
    """Whether few rows are the faster in this form; of static things."""
    _, heads, head_dim = q.shape
    return (
        heads == kv_pages.shape[2]
        and head_dim == _HEAD_DIM
        and pool.page_table.shape[1] <= _MAX_PAGES
        and parts_config(q, kv_pages, page_table) is None
    )


class _Program(NamedTuple):
    """What a program has to know of its sequence, `i32[]` each."""

    slot: Any  # of attention's
    row: Any  # past the last, if there is none
    seq: Any
    kv_len: Any  # 0 if the slot is idle
    page: Any  # of the cache, where the row's key and value go
    offset: Any  # there
    entry: Any  # the row's, of the segments
    adapter: Any  # that entry's slot
    first_page: Any  # of that adapter


@compiled_once
def rotary_attention(
    y: Array,  # [rows, 3 * heads * head_dim]
    shrunk: Shrunk,
    rotary: tuple[Array, Array],  # [rows, head_dim] each
    kv_pages: Array,  # [2, pages, heads, page_size, head_dim]
    page: Array,  # i32[rows]
    offset: Array,  # i32[rows]
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    scale: float,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Launch `_row_expand.rotary_expand` and `decode_attention` as one, to their bits.

    A sequence's row is its last token, and no other sequence of the call reads where
    that is stored: programs do not wait for each other.

    Returns:
      What rows attend to, `[rows, heads, head_dim]`, and the pages.
    """
    (rows, width), (_, _, heads, page_size, head_dim) = y.shape, kv_pages.shape
    assert width == 3 * heads * head_dim, (y.shape, kv_pages.shape)
    seqs, pages_per_seq = page_table.shape
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), y.dtype)
    config = config or config_of(q, kv_pages, page_table)
    # As in `decode_attention`.
    slots = max(rows, seqs)
    grid = (slots, heads, config.splits)
    is_ordered = not run_at_once(grid)
    operands = shrunk.row_operands
    segments = shrunk.segments
    programs = _look_up(
        (bounds, jnp.minimum(kv_lens, pages_per_seq * page_size)),
        (segments.rows[0], segments.slots[0], operands[2][:, 0]),
        (page, offset),
        slots=slots,
        is_ordered=is_ordered,
    )
    shapes = result_shapes(q, slots, config.splits)
    pages, _, *partial = pallas_call(
        functools.partial(
            _kernel,
            num_outs=2 + len(shapes),
            is_ordered=is_ordered,
            scale=scale,
            config=config,
            interpret=interpret,
        ),
        # q, too, for threads to exchange what each has of it.
        out_shape=[jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype), q, *shapes],
        grid=grid[::-1] if is_ordered else grid,
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_decode_rotary",
    )(kv_pages, programs, y, *rotary, page_table, *operands)
    return combine_splits(partial, bounds, q, interpret=interpret), pages


# A function of its own is traced once for all layers; of its calls XLA leaves one.
@functools.partial(jax.jit, static_argnames=("slots", "is_ordered"))
def _look_up(
    sequences: tuple[Array, Array],  # their bounds and tokens
    entries: tuple[Array, Array, Array],  # their rows, adapters and these's first pages
    place: tuple[Array, Array],  # where rows' keys and values go
    *,
    slots: int,
    is_ordered: bool,
) -> Array:
    """Return `_Program`s, `i32[slots, 9]`, for none to wait for look-ups in turn."""
    bounds, kv_lens = sequences
    slot = jnp.arange(slots, dtype=jnp.int32)
    if is_ordered:
        slot = longest_first(bounds, kv_lens, slots=slots)
    row, live = row_of_slot(bounds, slot)
    seq = jnp.minimum(slot, kv_lens.size - 1)
    there = jnp.minimum(row, entries[0].size - 1)
    # Each row has one entry.
    entry = jnp.argmax(entries[0][None, :] == there[:, None], axis=1).astype(jnp.int32)
    page, offset = (own[there] for own in place)
    adapter, first_page = (own[entry] for own in entries[1:])
    program = _Program(
        slot=slot,
        row=row,
        seq=seq,
        kv_len=jnp.where(live, kv_lens[seq], 0),
        page=page,
        offset=offset,
        entry=entry,
        adapter=adapter,
        first_page=first_page,
    )
    return jnp.stack(program, axis=-1)


def _kernel(
    kv_in_ref,  # [2, pages, heads, page_size, head_dim], is kv_ref
    programs_ref,  # i32[slots, 9], of `_look_up`
    y_ref,  # [rows, 3 * heads * head_dim]
    cos_ref,  # [rows, head_dim]
    sin_ref,  # [rows, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    # Of `Shrunk.row_operands`; kv_ref; q_ref [rows, heads, head_dim]; the results.
    *refs,
    num_outs: int,
    is_ordered: bool,
    scale: float,
    config: DecodeConfig,
    interpret: bool,
):
    del kv_in_ref
    refs, (kv_ref, q_ref, out_ref, *stats_refs) = refs[:-num_outs], refs[-num_outs:]
    first, head, last = (pl.program_id(axis) for axis in range(3))
    number, split = (last, first) if is_ordered else (first, last)
    own = _Program(*(programs_ref[number, i] for i in range(len(_Program._fields))))
    blocks = lower, upper = blocks_of_split(own.kv_len, split, config)
    has_blocks = lower < upper
    page_ids_at = page_ids_of(kv_ref, table_ref, own.seq, own.kv_len, config)
    first_ids = page_ids_at(lower * config.block_kv)  # before what has to wait
    # The split that has the new token stores it, and nobody else reads it.
    is_last = has_blocks & (upper * config.block_kv >= own.kv_len)
    _store_heads(
        own,
        head,
        (has_blocks, is_last),
        (y_ref, cos_ref, sin_ref, refs),
        (q_ref, kv_ref),
        num_warps=config.num_warps,
    )
    if not interpret:  # where a program has no threads that have to meet
        plgpu.debug_barrier()

    lane = jnp.arange(padded(1), dtype=jnp.int32)
    mask = (lane < 1) & (own.row < q_ref.shape[0])
    sums = attend_blocks(
        load_rows(q_ref, own.row, head + lane, mask & has_blocks),
        kv_ref,
        table_ref,
        own.seq,
        head,
        own.kv_len,
        blocks,
        scale=scale,
        config=config,
        first_ids=first_ids,
    )
    if not stats_refs:
        store_result(out_ref, own.row, head + lane, mask, sums)
        return
    part = own.slot * config.splits + split
    refs = out_ref, *stats_refs
    store_split(refs, part, head + lane, lane < 1, sums, has_blocks)


def _store_heads(
    own: _Program,
    head: Array,
    wanted: tuple[Array, Array],  # bool[]: q; k and v
    sources: tuple[Any, Any, Any, tuple[Any, ...]],
    targets: tuple[Any, Any],
    *,
    num_warps: int,
) -> None:
    """Expand and rotate one head of q, k and v of a row, and store them.

    Splits of a sequence all store its q, the same bits to the same place, and each
    reads what it has stored itself.
    """
    y_ref, cos_ref, sin_ref, adapter_refs = sources
    q_ref, kv_ref = targets
    _, heads, head_dim = q_ref.shape
    num_pages, half = kv_ref.shape[1], head_dim // 2
    kind = jnp.arange(_HEADS, dtype=jnp.int32)
    is_q, is_v = kind == 0, kind == 2
    live = jnp.where(is_q, wanted[0], wanted[1] & (kind < 3))
    module = jnp.minimum(kind, 2)
    known = KnownRows(own.entry, own.row, own.adapter, own.first_page)
    known = KnownRows(*(jnp.broadcast_to(value, kind.shape) for value in known))
    rows = AdapterRows(adapter_refs, known, [module], live)
    # All ranks of a column are one lane's, as in `_row_expand`, with two warps, too.
    lane = columns_of(half, min(LANES, LANES * num_warps // _HEADS))
    column = _of_head((module * heads + head) * head_dim) + lane
    cos, sin = (rows.load(ref, lane, None) for ref in (cos_ref, sin_ref))
    [halves] = rows.add_product(y_ref, [[column, column + half]], None)
    turned = rotate(halves, cos, sin)

    def write(ref, at, values, mask):
        mask = jnp.broadcast_to(_of_head(mask), values[0].shape)
        store_halves(ref, at, lane, values, mask)

    # Others are apart, and nowhere: masked stores in interpret mode write old values.
    write(q_ref, (own.row, _of_head(head + heads * kind)), turned, live & is_q)
    there = live & ~is_q & (own.page < num_pages)
    values = keys_or_values(_of_head(is_v), halves, turned)
    page = jnp.where(there, own.page, num_pages + kind)
    at = _of_head(is_v.astype(jnp.int32)), _of_head(page), head, own.offset
    write(kv_ref, at, values, there)


def _of_head(values: Array) -> Array:
    return values[:, None, None]
