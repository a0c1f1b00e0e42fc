"""One row of a launch whose programs have a row each, and what its adapter adds.

Runs inside kernels only. Knows pools' tables and pages as refs; nothing of what follows
the sums.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._page_tiles import AdapterPages, load, mask_of
from punica_jax.pallas_kernels._pool import RANK_PAGE
from punica_jax.pallas_kernels._sgmv_config import add_splits

# Of B, where an adapter has further pages: 96 registers a lane, or three pages in place
# and one where a program has more columns. In a step of 32 rows of ranks 8, 16 and 64
# all expands take 1.72 ms one page after the other, so 1.51.
_HELD_BYTES = 12 * 1024
# Of a warp.
_LANES = 32

# Some columns of each of some modules.
_Columns = Sequence[Sequence[Array]]


class AdapterRow:
    """One program's row, and what its adapter adds to it. Lives in a kernel.

    Attributes:
      row: `i32[]`.
      slot: `i32[]`, -1 if the row has no adapter.
    """

    def __init__(self, refs: tuple[Any, ...]):
        """Find program `pl.program_id(0)`'s row.

        Args:
          refs: of `Shrunk.row_operands`, or none.
        """
        self._refs, self._entry = refs, pl.program_id(0)
        self.row, self.slot = self._entry, jnp.int32(-1)
        if refs:
            self.row, self.slot = (ref[0, self._entry] for ref in refs[5:7])

    def load(self, ref: Any, column: Array, inside: Array | None) -> Array:
        """Return `f32[lanes, n]` of the row."""
        return load(ref.at[self.row, column], inside).astype(jnp.float32)

    def add_product(
        self,
        sums: _Columns,
        modules: Sequence[Any],
        columns: _Columns,
        inside: Array | None,
    ) -> _Columns:
        """Return the sums with the adapter's product added in some columns of B.

        Args:
          sums: `f32[lanes, n]` of each of the `columns`.
          modules: which of the group's, one for each list of columns.
          columns: `i32[lanes, n]`, of B.
          inside: `bool[lanes, n]`, which columns are there; None if all are.
        """
        if not self._refs:
            return sums
        b_ref, *tables = self._refs[1:5]
        page_table_ref = tables[0]
        pages = [AdapterPages.of(tables, b_ref, self.slot, c) for c in modules]

        def add_pages(places, sums):
            # All loads are ahead of what waits for one.
            loaded = []
            for index, page in places:
                for n, (module, own) in enumerate(zip(modules, pages, strict=True)):
                    there = index < own.count
                    b = [self._load_b(page, there, at, inside) for at in columns[n]]
                    first = module * own.max_count * RANK_PAGE
                    v = self._load_v(first + index * RANK_PAGE, there)
                    loaded.append((n, v, b))
            sums = list(sums)
            for n, v, bs in loaded:
                pairs = zip(sums[n], bs, strict=True)
                sums[n] = [
                    y + (v * b.astype(jnp.float32)).sum(axis=0) for y, b in pairs
                ]
            return sums

        sums = add_pages([(jnp.int32(0), pages[0].page)], sums)
        max_count = pages[0].max_count
        if max_count == 1:
            return sums
        most = functools.reduce(jnp.maximum, [own.count for own in pages])
        at_once = _pages_at_once(columns, b_ref.dtype, max_count - 1)

        def add_next(turn, sums):
            places = []
            for i in range(at_once):
                index = 1 + turn * at_once + i
                page = load(page_table_ref.at[pages[0].slot, index], index < max_count)
                places.append((index, pages[0].first + page))
            return add_pages(places, sums)

        return lax.fori_loop(0, pl.cdiv(most - 1, at_once), add_next, sums)

    def _load_b(
        self, page: Array, there: Array, column: Array, inside: Array | None
    ) -> Array:
        """Return `[16, lanes, n]` of a page of B, zeros if it is not there."""
        b_ref = self._refs[1]
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None, None]
        mask = mask_of((RANK_PAGE, *column.shape), there, inside)
        return load(b_ref.at[page, rank, column[None]], mask)

    def _load_v(self, first: Any, there: Array) -> Array:
        """Return `f32[16, 1, 1]`: the row's v from a rank on, rounded as B is."""
        v_ref, b_ref = self._refs[:2]
        rank = first + jnp.arange(RANK_PAGE, dtype=jnp.int32)
        mask = mask_of(rank.shape, there)
        groups = range(v_ref.shape[0])
        parts = [load(v_ref.at[group, self._entry, rank], mask) for group in groups]
        v = add_splits(parts)
        if len(self._refs) > 7:
            v = v * self._refs[7][0, self._entry]
        return v.astype(b_ref.dtype).astype(jnp.float32)[:, None, None]


def columns_of(block_n: int) -> Array:
    """Return `i32[lanes, n]`, numbers of columns: neighbours are one lane's.

    So a lane has all 16 ranks of a page of its columns, and adds them in their order,
    however many columns a program has.
    """
    lanes = min(_LANES, block_n)
    width = block_n // lanes
    first = width * jnp.arange(lanes, dtype=jnp.int32)
    return first[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]


def _pages_at_once(columns: _Columns, dtype: Any, most: int) -> int:
    """Return how many of an adapter's further pages a program can hold."""
    size = sum(column.size for group in columns for column in group)
    page_bytes = RANK_PAGE * size * jnp.dtype(dtype).itemsize
    return max(1, min(most, _HELD_BYTES // page_bytes))
