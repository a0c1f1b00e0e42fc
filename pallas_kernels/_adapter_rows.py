"""A few rows of a launch whose programs have a warp for each, and what adapters add.

Runs inside kernels only. Knows pools' tables and pages as refs; nothing of what follows
the sums.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._page_tiles import layer_starts, load, mask_of
from punica_jax.pallas_kernels._pool import RANK_PAGE
from punica_jax.pallas_kernels._sgmv_config import add_splits

# Of a warp.
_LANES = 32

# Some columns of each of some modules.
_Columns = Sequence[Sequence[Array]]


class AdapterRows:
    """A program's rows, and what their adapters add to them. Lives in a kernel.

    Attributes:
      row: `i32[rows]`, out of range where there is none.
      slot: `i32[rows]`, -1 if the row has no adapter.
      live: `bool[rows]`, which there are; None if all are.
    """

    def __init__(self, refs: tuple[Any, ...], num_rows: int, block_rows: int):
        """Find program `pl.program_id(0)`'s rows.

        Args:
          refs: of `Shrunk.row_operands`.
          num_rows: of the launch.
          block_rows: of a program.
        """
        lane = jnp.arange(block_rows, dtype=jnp.int32)
        entry = pl.program_id(0) * block_rows + lane
        self._refs, self._entry = refs, entry
        self.live = None if num_rows % block_rows == 0 else entry < num_rows
        self.row, self.slot = (load(ref.at[0, entry], self.live) for ref in refs[5:7])
        if self.live is not None:
            # For masked stores in interpret mode write old values back.
            self.row = jnp.where(self.live, self.row, num_rows + lane)
            self.slot = jnp.where(self.live, self.slot, -1)

    def mask(self, inside: Array | None, column: Array) -> Array | None:
        """Return `bool[rows, lanes, n]`, which columns are there; None if all are."""
        live = None if self.live is None else self.live[:, None, None]
        return mask_of((self.row.size, *column.shape[1:]), live, inside)

    def at(self, column: Array) -> tuple[Array, Array]:
        """Return where some columns of the rows are."""
        return self.row[:, None, None], column

    def load(self, ref: Any, column: Array, inside: Array | None) -> Array:
        """Return `f32[rows, lanes, n]`."""
        values = load(ref.at[self.at(column)], self.mask(inside, column))
        return values.astype(jnp.float32)

    def add_product(
        self,
        sums: _Columns,
        modules: Sequence[Any],
        columns: _Columns,
        inside: Array | None,
    ) -> _Columns:
        """Return the sums with the adapters' product added in some columns of B.

        Args:
          sums: `f32[rows, lanes, n]` of each of the `columns`.
          modules: which of the group's, one for each list of columns.
          columns: `i32[1, lanes, n]`, of B.
          inside: `bool[1, lanes, n]`, which columns are there; None if all are.
        """
        b_ref, *tables = self._refs[1:5]
        page_table_ref, num_pages_ref, _ = tables
        max_count = page_table_ref.shape[1]
        first_row, first = layer_starts(tables, b_ref)
        known = first_row + self._entry
        counts = [load(num_pages_ref.at[known, c], self.live) for c in modules]

        def look_up(index):
            return load(page_table_ref.at[self._entry, index], self.live)

        # One module after the other: of two at once the compiler holds so much that not
        # all programs find room.
        def add_page(index, page, masks, sums):
            added = []
            for n, (module, count) in enumerate(zip(modules, counts, strict=True)):
                v_rank = (module * max_count + index) * RANK_PAGE
                parts = self._load_v(v_rank, masks[n])
                bs = [
                    self._load_b(first + page, masks[n], at, inside)
                    for at in columns[n]
                ]
                v, there = self._v_of(parts), (index < count)[:, None, None]
                products = [(v * b.astype(jnp.float32)).sum(axis=0) for b in bs]
                pairs = zip(sums[n], products, strict=True)
                added.append([y + jnp.where(there, own, 0) for y, own in pairs])
            return added

        # The first page is asked for before it is known which modules have it: its
        # loads do not wait for the counts. (1 us of a layer's four launches; 32 rows of
        # Llama-3.1-8B, one H100.)
        page = look_up(0)
        asked = mask_of(page.shape, page >= 0, self.live)
        sums = add_page(jnp.int32(0), page, [asked] * len(counts), sums)
        if max_count == 1:
            return sums
        most = functools.reduce(jnp.maximum, counts).max()

        def add_further(index, sums):
            return add_page(index, look_up(index), [index < c for c in counts], sums)

        return lax.fori_loop(1, most, add_further, sums)

    def _load_b(
        self, page: Array, there: Array, column: Array, inside: Array | None
    ) -> Array:
        """Return `[16, rows, lanes, n]` of each row's page, or zeros."""
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None, None, None]
        page, there = (array[None, :, None, None] for array in (page, there))
        shape = (RANK_PAGE, self.row.size, *column.shape[1:])
        mask = mask_of(shape, there, None if inside is None else inside[None])
        return load(self._refs[1].at[page, rank, column[None]], mask)

    def _load_v(self, first: Any, there: Array) -> list[Array]:
        """Return `f32[16, rows, 2]` of each group: v from a rank on, and zeros.

        So each lane of a row's warp loads one value of a group, and `_v_of` exchanges
        the sums. Of `[16, rows]` every lane would load all: 128 registers for gate and
        up. 32 rows of ranks 8, 16 and 64 took 21.4 us there, now 18.1.
        """
        v_ref = self._refs[0]
        shape = (RANK_PAGE, self.row.size, _LANES // RANK_PAGE)
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None, None]
        half = jnp.arange(_LANES // RANK_PAGE, dtype=jnp.int32)[None, None, :]
        mask = mask_of(shape, there[None, :, None], half == 0)
        entry, rank = (
            jnp.broadcast_to(array, shape)
            for array in (self._entry[None, :, None], first + rank)
        )
        groups = range(v_ref.shape[0])
        return [load(v_ref.at[group, entry, rank], mask) for group in groups]

    def _v_of(self, parts: Sequence[Array]) -> Array:
        """Return `f32[16, rows, 1, 1]`, rounded as B is."""
        v, dtype = add_splits(parts).sum(axis=2), self._refs[1].dtype
        if len(self._refs) > 7:
            v *= load(self._refs[7].at[0, self._entry], self.live)[None, :]
        return v.astype(dtype).astype(jnp.float32)[:, :, None, None]


def columns_of(block_n: int) -> Array:
    """Return `i32[1, lanes, n]`, numbers of columns: neighbours are one lane's.

    So a lane has all 16 ranks of a page of its columns, and adds them in their order,
    however many columns a program has.
    """
    lanes = min(_LANES, block_n)
    width = block_n // lanes
    first = width * jnp.arange(lanes, dtype=jnp.int32)
    columns = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return columns[None]
