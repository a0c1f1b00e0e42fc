"""Decode attention whose programs first expand their own q, k and v.

A program of `_attention_decode` needs one head of q, and the last one of a sequence its
new key and value: what an expand with rotary embedding would write for it is three
heads of one row. Where programs are many it computes them while others read the cache,
and a layer has one launch less. Knows pools, segments, pages and sequences of one row.
"""

import functools

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
    add_splits,
    attend_blocks,
    blocks_of_split,
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
from punica_jax.pallas_kernels._kv_tile import load_rows, padded
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call

# Of 32 rows of Llama-2-7B a step takes 1.2 % less so with one adapter and 0.8 with 32,
# of 1 and 64 rows 1.9 and 0.5, of 128 as long. Where heads share keys programs are few
# and each waits for its own q: of Llama-3.1-8B 32 rows take 0.4 % less at 512 tokens
# each, with lengths of the paper's trace 0.7 more, 64 rows 0.5 to 1.5 more (one H200).
_MAX_ROWS = 64
# q's, k's and v's, and one of nothing: a power of two.
_HEADS = 4


def fits(q: jax.ShapeDtypeStruct, kv_pages: Array, page_table: Array) -> bool:
    """Whether this form runs, and is the faster one; of static things."""
    rows, heads, head_dim = q.shape
    # Each lane has as many columns of either half of a head: a power of two.
    is_cut = head_dim in (2 * LANES, 4 * LANES, 8 * LANES)
    if rows > _MAX_ROWS or heads != kv_pages.shape[2] or not is_cut:
        return False
    return parts_config(q, kv_pages, page_table) is None


@compiled_once
def rotary_attention(
    y: Array,  # [rows, 3 * heads * head_dim]
    shrunk: Shrunk,
    rotary: tuple[Array, Array],
    kv_pages: Array,
    page: Array,
    offset: Array,
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    scale: float,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Launch `_row_expand.rotary_expand` and `decode_attention` as one, to their bits.

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
        name="paged_attention_rotary",
    )(kv_pages, programs, y, *rotary, page_table, *operands)
    return add_splits(partial, bounds, q, interpret=interpret), pages


# A function of its own is traced once for all layers; of its calls XLA leaves one.
@functools.partial(jax.jit, static_argnames=("slots", "is_ordered"))
def _look_up(
    sequences: tuple[Array, Array],  # their bounds and tokens
    entries: tuple[Array, Array, Array],  # their rows, slots and adapters' first pages
    place: tuple[Array, Array],  # where rows' keys and values go
    *,
    slots: int,
    is_ordered: bool,
) -> Array:
    """Return what programs have to know, for none to wait for look-ups in turn.

    Returns:
      `i32[slots, 9]`: the slot, its row, sequence and tokens; the row's KV page and its
      place there; its entry, its adapter's slot and first page.
    """
    bounds, kv_lens = sequences
    slot = jnp.arange(slots, dtype=jnp.int32)
    if is_ordered:
        slot = longest_first(bounds, kv_lens, slots=slots)
    row, live = row_of_slot(bounds, slot)
    seq = jnp.minimum(slot, kv_lens.size - 1)
    kv_len = jnp.where(live, kv_lens[seq], 0)
    known = jnp.minimum(row, entries[0].size - 1)
    entry = jnp.argmax(entries[0][None, :] == known[:, None], axis=1).astype(jnp.int32)
    columns = slot, row, seq, kv_len, *(own[known] for own in place), entry
    return jnp.stack([*columns, *(own[entry] for own in entries[1:])], axis=-1)


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
    slot, row, seq, kv_len, page, offset, *known = (
        programs_ref[number, column] for column in range(9)
    )
    rows, heads, head_dim = q_ref.shape
    blocks = lower, upper = blocks_of_split(kv_len, split, config)
    # Before what is below has to wait.
    first_ids = page_ids_of(kv_ref, table_ref, seq, kv_len, config)(
        lower * config.block_kv
    )

    number = jnp.arange(_HEADS, dtype=jnp.int32)
    is_last = upper * config.block_kv >= kv_len
    live = (lower < upper) & ((number == 0) | is_last & (number < 3))
    module = jnp.minimum(number, 2)
    half = head_dim // 2
    # All ranks of a column are one lane's, as in `_row_expand`, with two warps, too.
    lane = columns_of(half, min(LANES, LANES * config.num_warps // _HEADS))
    column = ((module * heads + head) * head_dim)[:, None, None] + lane
    entry, own_slot, own_page = (jnp.broadcast_to(own, _HEADS) for own in known)
    adapter = AdapterRows(
        refs,
        KnownRows(entry, jnp.broadcast_to(row, _HEADS), own_slot, own_page),
        [module],
        live,
    )
    cos, sin = (adapter.load(ref, lane, None) for ref in (cos_ref, sin_ref))
    [[low, high]] = adapter.add_product(y_ref, [[column, column + half]], None)
    turned = low * cos - high * sin, high * cos + low * sin

    def write(ref, at, values, mask):
        mask = jnp.broadcast_to(mask[:, None, None], low.shape)
        for start, value in zip((0, half), values, strict=True):
            target = ref.at[(*at, start + lane)]
            plgpu.store(target, value.astype(ref.dtype), mask=mask)

    def of_head(values):
        return values[:, None, None]

    is_q, is_v = number == 0, number == 2
    # Others are apart, and nowhere: masked stores in interpret mode write old values.
    write(q_ref, (row, of_head(head + heads * number)), turned, live & is_q)
    there = live & ~is_q & (page < kv_ref.shape[1])
    values = [
        jnp.where(of_head(is_v), own, other)
        for own, other in zip((low, high), turned, strict=True)
    ]
    own_page = jnp.where(there, page, kv_ref.shape[1] + number)
    at = of_head(is_v.astype(jnp.int32)), of_head(own_page), head, offset
    write(kv_ref, at, values, there)
    if not interpret:  # where a program has no threads that have to meet
        plgpu.debug_barrier()

    lane = jnp.arange(padded(1), dtype=jnp.int32)
    mask = (lane < 1) & (row < rows)
    q = load_rows(q_ref, row, head + lane, mask & (lower < upper))
    sums = attend_blocks(
        q,
        kv_ref,
        table_ref,
        seq,
        head,
        kv_len,
        blocks,
        scale=scale,
        config=config,
        first_ids=first_ids,
    )
    if not stats_refs:
        store_result(out_ref, row, head + lane, mask, sums)
        return
    part = slot * config.splits + split
    store_split((out_ref, *stats_refs), part, head + lane, lane < 1, blocks, sums)
