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
        pages = [AdapterPages.of(tables, b_ref, self._entry, c) for c in modules]
        max_count = pages[0].max_count

        # One module after the other: of two at once the compiler holds so much that not
        # all programs find room.
        def add_page(index, page, sums):
            added = []
            for n, (module, own) in enumerate(zip(modules, pages, strict=True)):
                there = index < own.count
                parts = self._load_v((module * max_count + index) * RANK_PAGE, there)
                bs = [self._load_b(page, there, at, inside) for at in columns[n]]
                v = self._v_of(parts)
                pairs = zip(sums[n], bs, strict=True)
                added.append(
                    [y + (v * b.astype(jnp.float32)).sum(axis=0) for y, b in pairs]
                )
            return added

        sums = add_page(jnp.int32(0), pages[0].page, sums)
        if max_count == 1:
            return sums
        most = functools.reduce(jnp.maximum, [own.count for own in pages])

        def further(index):
            at = pages[0].page_table_ref.at[pages[0].slot, index]
            return pages[0].first + load(at, index < most)

        # The next page is looked up while this one's B is on its way.
        def add_further(index, carry):
            page, sums = carry
            return further(index + 1), add_page(index, page, sums)

        init = further(jnp.int32(1)), sums
        _, sums = lax.fori_loop(1, most, add_further, init)
        return sums

    def _load_b(
        self, page: Array, there: Array, column: Array, inside: Array | None
    ) -> Array:
        """Return `[16, lanes, n]` of a page of B, zeros if it is not there."""
        b_ref = self._refs[1]
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None, None]
        mask = mask_of((RANK_PAGE, *column.shape), there, inside)
        return load(b_ref.at[page, rank, column[None]], mask)

    def _load_v(self, first: Any, there: Array) -> list[Array]:
        """Return `f32[16, 2]` of each group: the row's v from a rank on, and zeros.

        So each lane of a warp loads one value of a group, and `_v_of` exchanges the
        sums. Of `[16]` every lane would load all: 128 registers for gate and up. 32
        rows of ranks 8, 16 and 64 took 21.4 us there, now 18.1.
        """
        v_ref = self._refs[0]
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None]
        half = jnp.arange(_LANES // RANK_PAGE, dtype=jnp.int32)[None, :]
        rank, half = jnp.broadcast_arrays(rank, half)
        rank, mask = first + rank, there & (half == 0)
        groups = range(v_ref.shape[0])
        return [load(v_ref.at[group, self._entry, rank], mask) for group in groups]

    def _v_of(self, parts: Sequence[Array]) -> Array:
        """Return `f32[16, 1, 1]`, in every lane, rounded as B is."""
        v, dtype = add_splits(parts).sum(axis=1), self._refs[1].dtype
        if len(self._refs) > 7:
            v = v * self._refs[7][0, self._entry]
        return v.astype(dtype).astype(jnp.float32)[:, None, None]


def columns_of(block_n: int) -> Array:
    """Return `i32[lanes, n]`, numbers of columns: neighbours are one lane's.

    So a lane has all 16 ranks of a page of its columns, and adds them in their order,
    however many columns a program has.
    """
    lanes = min(_LANES, block_n)
    width = block_n // lanes
    first = width * jnp.arange(lanes, dtype=jnp.int32)
    return first[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
