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

from punica_jax.pallas_kernels._launch import compiled_once, pallas_call

# Rows of a tile; a row's result does not depend on it. Wider tiles load A and B less
# often, but are fewer, and waste more on a row alone: 2048 rows of 4 prompts and 16
# sequences that decode, 20 adapters, take 74, 65, 17.5 us with 16 rows a tile (gate and
# up, q, k and v, down's shrink), with 32 rows 78, 71, 18.5 (one H200). Programs of
# many rows' shrink, and of wide expands, take several of one adapter: `_entries`.
DEFAULT_BLOCK_ROWS = 16
# The kernel compares all pairs of rows, and rows with slots, which in the end must lose
# to a sort: XLA's and what follows it take 0.1 ms of a step of 16384 rows, 350 ms (a 7B
# on one H200). 8192 rows and 33 slots take the kernel 86 us, 256 slots 262, 2048 rows
# and 256 slots 31 (one H100).
_MAX_ROWS = 8192
_MAX_PAIRS = 1 << 19  # of a row and a slot
# Rows that one program places, and rows that it compares them with at a time.
_PLACED_ROWS = 16
_COMPARED_ROWS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """A batch's rows grouped by adapter (the paper's segments, section 4).

    An entry is one row under one adapter. A row has one entry in each of the `passes`
    (one, unless requests mix adapters). Within a pass, entries are sorted by slot,
    idle ones (slot -1) last; rows of one slot keep their order. A tile is at most
    `block_rows` consecutive entries of one slot, in the order of the entries; unused
    tiles after them have `first == end`. Idle entries have tiles too
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


def fits_kernel(rows: int, num_slots: int) -> bool:
    """Whether the kernel groups so many rows faster than a sort does."""
    return rows <= _MAX_ROWS and rows * num_slots <= _MAX_PAIRS


@compiled_once
def segment_metadata_kernel(
    slots: Array, *, num_slots: int, block_rows: int, interpret: bool = False
) -> Segments:
    """Build `Segments`, without weights, in one launch.

    Args:
      slots: `i32[passes, rows]`, as many as `fits_kernel` allows.
    """
    passes, rows = slots.shape
    tiles = max_tiles(rows, num_slots, block_rows)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    out_shape = [shape((passes, rows))] * 2 + [shape((passes, tiles))] * 3
    sorted_rows, sorted_slots, *tables = pallas_call(
        functools.partial(_metadata_kernel, num_slots=num_slots, block_rows=block_rows),
        out_shape=out_shape,
        grid=(passes, pl.cdiv(rows, _PLACED_ROWS)),
        compiler_params=plgpu.CompilerParams(num_warps=4),
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
    num_slots: int,
    block_rows: int,
):
    # A row's place is a count over all rows, and so is its tile's number: no program
    # needs what another one found.
    number = pl.program_id(0)
    rows, tiles = slots_ref.shape[1], tile_slot_ref.shape[1]
    nothing = jnp.int32(2**30)
    compared = min(_COMPARED_ROWS, max(16, pl.next_power_of_2(rows)))

    def keys_at(index):
        live = index < rows
        slot = plgpu.load(slots_ref.at[number, index], mask=live, other=-1)
        known = (slot >= 0) & (slot < num_slots)
        # Idle rows sort after every slot, lanes past the end after those.
        return jnp.where(known, slot, jnp.where(live, jnp.int32(num_slots), nothing))

    lane = jnp.arange(_PLACED_ROWS, dtype=jnp.int32)
    index = pl.program_id(1) * _PLACED_ROWS + lane
    key = keys_at(index)

    def count(step, carry):
        before, same_before, same = carry
        other = step * compared + jnp.arange(compared, dtype=jnp.int32)
        other_key = keys_at(other)[None, :]
        equal = other_key == key[:, None]
        earlier = equal & (other[None, :] < index[:, None])
        return (
            before + (other_key < key[:, None]).astype(jnp.int32),
            same_before + earlier.astype(jnp.int32),
            same + equal.astype(jnp.int32),
        )

    steps = pl.cdiv(rows, compared)
    zero = jnp.zeros((_PLACED_ROWS, compared), jnp.int32)
    counts = jax.lax.fori_loop(0, steps, count, (zero, zero, zero))
    before, same_before, same = (part.sum(axis=1) for part in counts)

    # Of few rows more slots at a time, for each time waits for a sum across threads.
    counted = _COMPARED_ROWS if steps == 1 else _PLACED_ROWS
    counted = min(counted, max(16, pl.next_power_of_2(num_slots)))

    def add_tiles(chunk, total):
        """Add the tiles of some slots to those of the rows of later ones."""
        slot = chunk * counted + jnp.arange(counted, dtype=jnp.int32)

        def count_rows(step, sums):
            other = step * compared + jnp.arange(compared, dtype=jnp.int32)
            return sums + (keys_at(other)[None, :] == slot[:, None]).astype(jnp.int32)

        init = jnp.zeros((counted, compared), jnp.int32)
        size = jax.lax.fori_loop(0, steps, count_rows, init).sum(axis=1)
        needed = jax.lax.div(size + (block_rows - 1), jnp.int32(block_rows))
        return total + jnp.where(slot[None, :] < key[:, None], needed[None, :], 0)

    chunks = pl.cdiv(num_slots, counted)
    none = jnp.zeros((_PLACED_ROWS, counted), jnp.int32)
    first_tile = jax.lax.fori_loop(0, chunks, add_tiles, none).sum(axis=1)
    live = index < rows

    def store_tiles(at, mask, slot, first, end):
        plgpu.store(tile_slot_ref.at[number, at], slot, mask=mask)
        plgpu.store(tile_first_ref.at[number, at], first, mask=mask)
        plgpu.store(tile_end_ref.at[number, at], end, mask=mask)

    # Masked lanes get addresses of their own past the end: masked stores in interpret
    # mode write old values back.
    place = before + same_before
    place_at = jnp.where(live, place, rows + lane)
    plgpu.store(rows_ref.at[number, place_at], index, mask=live)
    slot = jnp.where(key < num_slots, key, -1)
    plgpu.store(sorted_slots_ref.at[number, place_at], slot, mask=live)

    starts = live & (same_before % block_rows == 0)
    tile = first_tile + same_before // block_rows
    end = before + jnp.minimum(same, same_before + block_rows)
    store_tiles(jnp.where(starts, tile, tiles + lane), starts, slot, place, end)

    # The last row empties the tiles that none needs.
    num_unused = jnp.where(place == rows - 1, tiles - tile - 1, 0)

    def clear(step, _):
        offset = step * _PLACED_ROWS + lane[None, :]
        unused = offset < num_unused[:, None]
        at = tile[:, None] + 1 + offset
        outside = tiles + lane[:, None] * _PLACED_ROWS + lane[None, :]
        empty = jnp.zeros_like(offset + num_unused[:, None])
        store_tiles(jnp.where(unused, at, outside), unused, empty - 1, empty, empty)

    num_steps = pl.cdiv(jnp.max(num_unused), _PLACED_ROWS)
    jax.lax.fori_loop(0, num_steps, clear, None)
