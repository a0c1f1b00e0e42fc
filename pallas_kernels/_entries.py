"""The entries of a program: a tile's, or those of one adapter's tiles in a window.

What a program reads of an adapter it reads once, of a whole page of A or a block of B:
of many rows a tile is too few for that. Runs inside kernels. Knows segments as refs;
nothing of pools.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._page_tiles import load
from punica_jax.pallas_kernels._sgmv_config import WINDOW_ROWS


def tile_rows(
    rows_ref, tile_first_ref, tile_end_ref, number, tile, block_rows: int
) -> tuple[Array, Array, Array]:
    """Return a tile's entries, which are live, and their rows.

    Dead lanes get addresses of their own past the end, for masked stores in interpret
    mode write old values back.
    """
    num_rows = rows_ref.shape[1]
    lane = jnp.arange(block_rows, dtype=jnp.int32)
    entry = tile_first_ref[number, tile] + lane
    live = entry < tile_end_ref[number, tile]
    entry = jnp.where(live, entry, num_rows + lane)
    row = load(rows_ref.at[number, entry], live)
    return entry, live, jnp.where(live, row, num_rows + lane)


def leads_window(
    tile_slot_ref: Any,  # i32[passes, tiles]
    tile_first_ref: Any,  # i32[passes, tiles]
    number: Array | int,
    tile: Array,
    block_rows: int,
) -> Array:
    """Return whether a tile is the first of its slot that begins in its window."""
    size = max(WINDOW_ROWS, block_rows)
    before = jnp.maximum(tile - 1, 0)
    window, window_before = (
        lax.div(tile_first_ref[number, one], size) for one in (tile, before)
    )
    slot, slot_before = (tile_slot_ref[number, one] for one in (tile, before))
    return (tile == 0) | (slot != slot_before) | (window != window_before)


def window_rows(
    rows_ref: Any,  # i32[passes, rows]
    tile_first_ref: Any,  # i32[passes, tiles]
    slots_ref: Any,  # i32[passes, rows]
    number: Array | int,
    tile: Array,
    block_rows: int,
) -> tuple[Array, Array, Array]:
    """Return what `tile_rows` does, of all tiles of a slot that begin in a window.

    `tile` is the first of them; the last may end in the next window.
    """
    size = max(WINDOW_ROWS, block_rows)
    first = tile_first_ref[number, tile]
    num_tiles = pl.cdiv(size - lax.rem(first, size), block_rows)
    num_rows, lane = rows_ref.shape[1], jnp.arange(size, dtype=jnp.int32)
    outside = num_rows + lane
    inside = (lane < num_tiles * block_rows) & (first + lane < num_rows)
    entry = jnp.where(inside, first + lane, outside)
    # Both at once: rows do not wait for the slots that say which of them are live.
    slot, row = (load(ref.at[number, entry], inside) for ref in (slots_ref, rows_ref))
    # Where unused tiles begin is not said: it may be past the end.
    own = slots_ref[number, jnp.minimum(first, num_rows - 1)]
    live = inside & (slot == own)
    entry, row = (jnp.where(live, at, outside) for at in (entry, row))
    return entry, live, row


def program_rows(
    rows_ref: Any,  # i32[passes, rows]
    tile_first_ref: Any,  # i32[passes, tiles]
    tile_end_ref: Any,  # i32[passes, tiles]
    slots_ref: Any,  # i32[passes, rows]; None where there are no windows
    number: Array | int,
    tile: Array,
    block_rows: int,
    *,
    windowed: bool,
) -> tuple[Array, Array, Array]:
    """Return `window_rows` of a program that takes a window's tiles, or `tile_rows`."""
    find, ends = (window_rows, slots_ref) if windowed else (tile_rows, tile_end_ref)
    return find(rows_ref, tile_first_ref, ends, number, tile, block_rows)
