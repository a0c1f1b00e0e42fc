"""Segments: which rows use which adapter, sorted and cut into tiles.

Knows slots of rows only; nothing of ranks, weights or widths.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Beyond this the kernel's all-pairs counting loses to XLA's sort.
MAX_KERNEL_ROWS = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """A batch's rows grouped by adapter (the paper's segments, section 4).

    An entry is one row under one adapter. A row has one entry in each of the `passes`
    (one, unless requests mix adapters). Within a pass, entries are sorted by slot,
    idle ones (slot -1) last; rows of one slot keep their order. A tile is at most
    `block_rows` consecutive entries of one slot, in the order of the entries; unused
    tiles between and after them have `first == end`. Idle entries have tiles too
    (slot -1): products skip them, a residual does not.

    Attributes:
      rows: `i32[passes, rows]`, the row of each sorted entry.
      slots: `i32[passes, rows]`, the slot of each sorted entry, -1 if idle.
      weights: `f32[passes, rows]`, the weight of each sorted entry, or None for 1.
      tile_slot: `i32[passes, tiles]`.
      tile_first: `i32[passes, tiles]`, the tile's first entry.
      tile_end: `i32[passes, tiles]`, one past its last entry.
      num_slots: slots the pools have (static).
      block_rows: rows of a tile, a power of two, at least 16 (static).
    """

    rows: Array
    slots: Array
    weights: Array | None
    tile_slot: Array
    tile_first: Array
    tile_end: Array
    num_slots: int = dataclasses.field(metadata={"static": True})
    block_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def num_passes(self) -> int:
        return self.rows.shape[0]

    @property
    def num_rows(self) -> int:
        return self.rows.shape[1]

    @property
    def num_tiles(self) -> int:
        return self.tile_slot.shape[1]

    @property
    def bounds(self) -> Array:
        """`i32[passes, slots + 1]`: entries `bounds[s] .. bounds[s + 1]` use `s`."""
        keys = jnp.where(self.slots < 0, self.num_slots, self.slots)
        edges = jnp.arange(self.num_slots + 1, dtype=jnp.int32)
        find = functools.partial(jnp.searchsorted, side="left")
        return jax.vmap(lambda row: find(row, edges))(keys).astype(jnp.int32)


def max_tiles(rows: int, num_slots: int, block_rows: int) -> int:
    """Most tiles that `rows` rows can need, idle ones counted as one more slot."""
    segments = min(rows, num_slots + 1)
    return segments + (rows - segments) // block_rows


def segment_metadata_kernel(
    slots: Array, *, num_slots: int, block_rows: int, interpret: bool = False
) -> Segments:
    """Build `Segments`, without weights, in one launch, one program a pass.

    Args:
      slots: `i32[passes, rows]`, rows at most 1024.
    """
    passes, rows = slots.shape
    tiles = max_tiles(rows, num_slots, block_rows)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    out_shape = [shape((passes, rows))] * 2 + [shape((passes, tiles))] * 3
    sorted_rows, sorted_slots, *tables = pl.pallas_call(
        functools.partial(
            _metadata_kernel,
            rows=rows,
            tiles=tiles,
            num_slots=num_slots,
            block_rows=block_rows,
        ),
        out_shape=out_shape,
        grid=(passes,),
        compiler_params=plgpu.CompilerParams(num_warps=4 if rows <= 128 else 8),
        interpret=interpret,
        name="segment_metadata",
    )(slots)
    return Segments(
        rows=sorted_rows,
        slots=sorted_slots,
        weights=None,
        tile_slot=tables[0],
        tile_first=tables[1],
        tile_end=tables[2],
        num_slots=num_slots,
        block_rows=block_rows,
    )


def _metadata_kernel(
    slots_ref,  # i32[passes, rows]
    rows_ref,  # i32[passes, rows]
    sorted_slots_ref,  # i32[passes, rows]
    tile_slot_ref,  # i32[passes, tiles]
    tile_first_ref,  # i32[passes, tiles]
    tile_end_ref,  # i32[passes, tiles]
    *,
    rows: int,
    tiles: int,
    num_slots: int,
    block_rows: int,
):
    # A row's place is a count over all rows, so nothing is exchanged between
    # threads. The rows it is compared with come in blocks: 1024 x 1024 comparisons
    # at once would not fit the registers.
    column = pl.program_id(0)
    size = max(16, pl.next_power_of_2(rows))
    block = min(size, 16)

    def keys_at(index):
        live = index < rows
        slot = plgpu.load(slots_ref.at[column, index], mask=live, other=-1)
        known = (slot >= 0) & (slot < num_slots)
        # Idle rows sort after every slot, padding lanes after those.
        return jnp.where(known, slot, jnp.where(live, num_slots, num_slots + 1))

    index = jnp.arange(size, dtype=jnp.int32)
    key = keys_at(index)
    zero = jnp.zeros((size,), jnp.int32)

    def count(step, carry):
        before, same_before, same, segments = carry
        other = step * block + jnp.arange(block, dtype=jnp.int32)
        other_key = keys_at(other)
        less = other_key[None, :] < key[:, None]
        equal = other_key[None, :] == key[:, None]
        earlier = other[None, :] < index[:, None]
        # How many earlier rows share each other row's slot: none opens a segment.
        others_earlier = equal & (index[:, None] < other[None, :])
        opens = others_earlier.astype(jnp.int32).sum(axis=0) == 0
        return (
            before + less.astype(jnp.int32).sum(axis=1),
            same_before + (equal & earlier).astype(jnp.int32).sum(axis=1),
            same + equal.astype(jnp.int32).sum(axis=1),
            segments + (less & opens[None, :]).astype(jnp.int32).sum(axis=1),
        )

    before, same_before, same, segments = jax.lax.fori_loop(
        0, size // block, count, (zero, zero, zero, zero)
    )
    place = before + same_before
    live = index < rows
    plgpu.store(rows_ref.at[column, place], index, mask=live)
    slot = jnp.where(key < num_slots, key, -1)
    plgpu.store(sorted_slots_ref.at[column, place], slot, mask=live)

    number, next_segment = tile_numbers(before, segments, same, same_before, block_rows)
    first = before + same_before
    end = before + jnp.minimum(same, same_before + block_rows)
    starts = live & (same_before % block_rows == 0)
    # Masked lanes get addresses of their own past the end (interpret mode stores old
    # values back through them).
    outside = tiles + index
    at = jnp.where(starts, number, outside)
    plgpu.store(tile_slot_ref.at[column, at], slot, mask=starts)
    plgpu.store(tile_first_ref.at[column, at], first, mask=starts)
    plgpu.store(tile_end_ref.at[column, at], end, mask=starts)

    def store_unused(at, mask):
        empty = jnp.zeros_like(at)
        plgpu.store(tile_slot_ref.at[column, at], empty - 1, mask=mask)
        plgpu.store(tile_first_ref.at[column, at], empty, mask=mask)
        plgpu.store(tile_end_ref.at[column, at], empty, mask=mask)

    gap = starts & (end == before + same) & (next_segment > number + 1)
    store_unused(jnp.where(gap, number + 1, outside), gap)
    used = jnp.max(jnp.where(starts, next_segment, 0))
    tail = pl.next_power_of_2(tiles)
    lane = jnp.arange(tail, dtype=jnp.int32)
    unused = (lane >= used) & (lane < tiles)
    store_unused(jnp.where(unused, lane, tiles + lane), unused)


def tile_numbers(
    before: Array, segments: Array, same: Array, same_before: Array, block_rows: int
) -> tuple[Array, Array]:
    """Number each entry's tile without knowing the sizes of the other segments.

    `before` entries in `segments` earlier segments need at most
    `segments + (before - segments) // block_rows` tiles, so a segment that starts
    there meets no earlier one, and at most one number before it stays unused.

    Args:
      before: entries of earlier segments.
      segments: number of earlier segments.
      same: entries of the entry's own segment.
      same_before: those of them before the entry.

    Returns:
      The number of the entry's tile, and the first number of the next segment.
    """

    def first_number(before, segments):
        return segments + (before - segments) // block_rows

    number = first_number(before, segments) + same_before // block_rows
    return number, first_number(before + same, segments + 1)
