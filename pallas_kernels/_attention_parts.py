"""Paged attention for one query row a sequence, of which some may be very long.

A program a sequence and head of the cache is fastest where all are as long, and where
one is much longer than the others they wait for it. Here a long sequence is cut into
parts with a program each, and whoever of them comes last adds them up: no second
launch, and the same bits whatever its neighbours are. Knows pages and sequences of one
row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._attention_decode import (
    add_up,
    attend_blocks,
    decode_attention,
    num_slots,
    result_shapes,
    row_of_slot,
    store_result,
    store_split,
    with_others,
)
from punica_jax.pallas_kernels._counts import count_stored, counts_of, set_to_zero
from punica_jax.pallas_kernels._decode_config import (
    ROOMY_BYTES,
    DecodeConfig,
    config_of,
)
from punica_jax.pallas_kernels._dispatch import multiprocessors, shared_bytes
from punica_jax.pallas_kernels._kv_tile import load_rows, padded
from punica_jax.pallas_kernels._launch import compiled_once, pallas_call

# Two of 8189 tokens among 30 of 500 take 48 us, not 137, and 32 of 512 20.4, not 19.4
# (8B, H200): where the longest are shorter there is less to win. A step has this form,
# or has not, by what its page table could hold.
_LEAST_MAX_KV_LEN = 4096 + 1
# With 1024, 32 of 2000 tokens take 77 us, not 65: where all are as long, more programs
# than run at once only wait for each other.
_PART_TOKENS = 2048
# Each more is one more program a sequence and head, which asks what there is to do.
_MAX_PARTS = 8
# Along the second axis of CUDA's grids.
_MOST_PROGRAMS = 65535


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartsConfig:
    """How long sequences are cut.

    Attributes:
      decode: how a program works, with one split.
      parts: most parts of a sequence, a power of two, at least 2.
      part_blocks: least blocks of a part.
    """

    decode: DecodeConfig
    parts: int
    part_blocks: int

    def __post_init__(self):
        if self.decode.splits > 1:
            raise ValueError(f"decode.splits must be 1, got {self.decode.splits}")
        if self.parts < 2 or self.parts & (self.parts - 1):
            raise ValueError(
                f"parts must be a power of two, at least 2, got {self.parts}"
            )
        if self.part_blocks < 1:
            raise ValueError(f"part_blocks must be at least 1, got {self.part_blocks}")


def parts_config(
    q: jax.ShapeDtypeStruct | Array,
    kv_pages: jax.ShapeDtypeStruct | Array,
    page_table: jax.ShapeDtypeStruct | Array,
    others: jax.ShapeDtypeStruct | Array | None = None,
) -> PartsConfig | None:
    """Choose a configuration by static things alone; None where parts do not pay."""
    kv_heads = kv_pages.shape[2]
    seqs, pages_per_seq = page_table.shape
    max_kv_len = pages_per_seq * kv_pages.shape[3]
    decode = config_of(q, kv_pages, page_table)
    if max_kv_len < _LEAST_MAX_KV_LEN or decode.splits > 1:
        return None
    parts = min(_MAX_PARTS, pl.next_power_of_2(max_kv_len // _PART_TOKENS))
    if num_slots(q, page_table, others) * parts > _MOST_PROGRAMS:
        return None
    few = seqs * kv_heads <= 2 * multiprocessors()
    if decode.num_warps == 2 and few and shared_bytes() >= ROOMY_BYTES:
        # With three, memory has room for a third program a multiprocessor, which the
        # parts that are nothing take: 32 of 512 tokens 21.7 us, not 20.4 (8B, H200).
        decode = dataclasses.replace(decode, num_stages=4)
    return PartsConfig(
        decode=decode, parts=parts, part_blocks=_PART_TOKENS // decode.block_kv
    )


@compiled_once
def parts_attention(
    q: Array,  # [rows, heads, head_dim]
    kv_pages: Array,  # [2, pages, kv_heads, page_size, head_dim]
    page_table: Array,  # i32[seqs, pages_per_seq]
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    scale: float,
    config: PartsConfig,
    others: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Run what `decode_attention` does, long sequences in parts."""

    @jax.custom_batching.custom_vmap
    def in_parts(*operands):
        return _launch(*operands, scale=scale, config=config, interpret=interpret)

    @in_parts.def_vmap
    def _(axis_size, in_batched, *operands):
        # Parts of several batches must not count in one place.
        def whole(*operands):
            *operands, others = operands
            return decode_attention(
                *operands,
                scale=scale,
                others=others,
                config=config.decode,
                interpret=interpret,
            )

        axes = jax.tree.map(lambda batched: 0 if batched else None, list(in_batched))
        return jax.vmap(whole, axes, axis_size=axis_size)(*operands), True

    return in_parts(q, kv_pages, page_table, bounds, kv_lens, others)


def _launch(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    bounds: Array,
    kv_lens: Array,
    others: Array | None,
    *,
    scale: float,
    config: PartsConfig,
    interpret: bool,
) -> Array:
    _, _, kv_heads, page_size, _ = kv_pages.shape
    seqs, pages_per_seq = page_table.shape
    work = _work_of_programs(
        bounds,
        jnp.minimum(kv_lens, pages_per_seq * page_size),
        slots=num_slots(q, page_table, others),
        outside=None if others is None else q.shape[0],
        config=config,
    )
    zeros = jnp.broadcast_to(jnp.minimum(bounds[0], 0), (seqs * kv_heads,))
    counts = counts_of(zeros)
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    operands, aliases = with_others((work, counts, q, kv_pages, page_table), others)
    return pallas_call(
        functools.partial(_kernel, scale=scale, config=config, interpret=interpret),
        out_shape=[whole, *result_shapes(q, seqs, config.parts)],
        # Those with the most to do begin first, and those with nothing last.
        grid=(kv_heads, work.shape[0]),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.decode.num_warps, num_stages=config.decode.num_stages
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*operands)[0]


# A function of its own is traced once for all layers; of its calls XLA leaves one.
@functools.partial(jax.jit, static_argnames=("slots", "outside", "config"))
def _work_of_programs(
    bounds: Array,  # i32[seqs + 1]
    kv_lens: Array,  # i32[seqs]
    *,
    slots: int,
    outside: int | None = None,  # see `row_of_slot`
    config: PartsConfig,
) -> Array:
    """Return what programs do, those with the most blocks first.

    Returns:
      `i32[slots * parts, 7]`: a program's row, sequence, tokens of that, first block,
      the block after its last one, which part it is, and of how many: of none, if
      there is nothing to do.
    """
    seqs = kv_lens.shape[0]
    slot = jnp.arange(slots, dtype=jnp.int32)[:, None]
    part = jnp.arange(config.parts, dtype=jnp.int32)[None, :]
    row, live = row_of_slot(bounds, slot, outside)
    seq = jnp.minimum(slot, seqs - 1)
    kv_len = jnp.where(live, kv_lens[seq], 0)
    blocks = -(-kv_len // config.decode.block_kv)
    parts = jnp.clip(blocks // config.part_blocks, 1, config.parts)
    blocks_per_part = -(-blocks // parts)
    # Rounded up, they may be enough for fewer parts.
    parts = jnp.maximum(-(-blocks // jnp.maximum(blocks_per_part, 1)), 1)
    there = part < parts
    if outside is not None:
        there &= live
    parts = jnp.where(there, parts, 0)
    lower = part * blocks_per_part
    upper = jnp.minimum(lower + blocks_per_part, blocks)

    columns = jnp.broadcast_arrays(row, seq, kv_len, lower, upper, part, parts)
    work = jnp.stack(columns, axis=-1).reshape(-1, len(columns))
    key = jnp.where(parts > 0, lower - upper, 1).reshape(-1)
    programs = jnp.arange(key.size, dtype=jnp.int32)
    return work[lax.sort_key_val(key, programs)[1]]


def _kernel(
    work_ref,  # i32[programs, 7], as `_work_of_programs` has it
    counts_ref,  # i32[seqs * kv_heads, stride]: parts that have come
    q_ref,  # [rows, heads, head_dim]
    kv_ref,  # [2, pages, kv_heads, page_size, head_dim]
    table_ref,  # i32[seqs, pages_per_seq]
    # Of `others`, if there are any; out_ref, [rows, heads, head_dim], the same array;
    # of parts, f32[seqs * parts, heads, head_dim], and of their maxima and totals,
    # f32[seqs * parts, heads].
    *refs,
    scale: float,
    config: PartsConfig,
    interpret: bool,
):
    out_ref, sums_ref, tops_ref, totals_ref = refs[-4:]
    kv_head, program = pl.program_id(0), pl.program_id(1)
    row, seq, kv_len, lower, upper, part, parts = (
        work_ref[program, column] for column in range(7)
    )
    rows, heads, _ = q_ref.shape
    kv_heads = kv_ref.shape[2]
    group = heads // kv_heads

    @pl.when(parts > 0)
    def _():
        lane = jnp.arange(padded(group), dtype=jnp.int32)
        head, mask = kv_head * group + lane, (lane < group) & (row < rows)
        sums = attend_blocks(
            load_rows(q_ref, row, head, mask),
            kv_ref,
            table_ref,
            seq,
            kv_head,
            kv_len,
            (lower, upper),
            scale=scale,
            config=config.decode,
        )

        @pl.when(parts == 1)
        def _():
            store_result(out_ref, row, head, mask, sums)

        @pl.when(parts > 1)
        def _():
            store_split(
                (sums_ref, tops_ref, totals_ref),
                seq * config.parts + part,
                head,
                lane < group,
                sums,
            )
            own = seq * kv_heads + kv_head
            before = count_stored(counts_ref, own, interpret=interpret)

            @pl.when(before == parts - 1)
            def _():
                nth = jnp.arange(config.parts, dtype=jnp.int32)
                for query in range(group):
                    add_up(
                        sums_ref,
                        tops_ref,
                        totals_ref,
                        out_ref,
                        seq * config.parts + nth,
                        nth < parts,
                        row,
                        kv_head * group + query,
                    )
                set_to_zero(counts_ref, own)
