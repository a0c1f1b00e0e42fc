"""A few rows of a launch whose programs have lanes for each, and what adapters add.

Runs inside kernels only. Knows pools' tables and pages as refs; nothing of what follows
the sums.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._page_tiles import layer_starts, load, mask_of
from punica_jax.pallas_kernels._pool import RANK_PAGE
from punica_jax.pallas_kernels._sgmv_config import add_splits

# Of a warp.
LANES = 32

# Some columns of each of some modules.
_Columns = Sequence[Sequence[Array]]


class KnownRows(NamedTuple):
    """Where some rows are, `i32[rows]` each."""

    entry: Array  # of the segments
    row: Array  # out of range where there is none
    slot: Array  # -1 if the row has no adapter
    page: Array  # the first of its adapter's, negative if it has none


class AdapterRows:
    """A program's rows, and what their adapters add to them. Lives in a kernel.

    Attributes:
      row: `i32[rows]`, out of range where there is none.
      slot: `i32[rows]`, -1 if the row has no adapter.
      live: `bool[rows]`, which there are; None if all are.
    """

    def __init__(
        self,
        refs: tuple[Any, ...],
        known: KnownRows,
        modules: Sequence[Any],
        live: Array | None = None,
    ):
        """Ask for v of rows that have been looked up.

        Args:
          refs: of `Shrunk.row_operands`.
          known: where they are.
          modules: which of the group's the program adds to; each an `i32[]`, or the
            rows' own, `i32[rows]`.
          live: `bool[rows]`, which there are; None if all are.
        """
        self._v_ref, self._b_ref, *tables = refs[:5]
        self._page_table_ref, num_pages_ref, _ = tables
        self._weights_ref = refs[7] if len(refs) > 7 else None
        self._entry, self.row, self.slot, self._page = known
        self._modules, self.live = modules, live
        # Asked for before the page is known: B's loads would be held up by v's else.
        self._v = [self._load_v(module, 0) for module in modules]
        first_row, self._first_page = layer_starts(tables, self._b_ref)
        at = first_row + self._entry
        self._counts = [load(num_pages_ref.at[at, c], live) for c in modules]

    @classmethod
    def of_program(
        cls,
        refs: tuple[Any, ...],
        num_rows: int,
        block_rows: int,
        modules: Sequence[Any],
    ) -> "AdapterRows":
        """Find program `pl.program_id(0)`'s rows, and ask for their first page and v.

        Args:
          refs: of `Shrunk.row_operands`.
          num_rows: of the launch.
          block_rows: of a program.
          modules: which of the group's the program adds to.
        """
        lane = jnp.arange(block_rows, dtype=jnp.int32)
        entry = pl.program_id(0) * block_rows + lane
        live = None if num_rows % block_rows == 0 else entry < num_rows
        row, slot = (load(ref.at[0, entry], live) for ref in refs[5:7])
        page = load(refs[2].at[entry, 0], live)
        if live is not None:
            # For masked stores in interpret mode write old values back.
            row = jnp.where(live, row, num_rows + lane)
            slot, page = (jnp.where(live, own, -1) for own in (slot, page))
        return cls(refs, KnownRows(entry, row, slot, page), modules, live)

    def mask(self, inside: Array | None, column: Array) -> Array | None:
        """Return `bool[rows, lanes, n]`, which columns are there; None if all are."""
        live = None if self.live is None else self.live[:, None, None]
        return mask_of((self.row.size, *column.shape[1:]), live, inside)

    def at(self, column: Array) -> tuple[Array, Array]:
        """Return where some columns of the rows are."""
        return self.row[:, None, None], column

    def load(self, ref: Any, column: Array, inside: Array | None) -> Array:
        """Return `f32[rows, lanes, n]`."""
        return _widened(load(ref.at[self.at(column)], self.mask(inside, column)))

    def add_product(
        self,
        y_ref: Any,
        columns: _Columns,
        inside: Array | None,
        pages_at_once: int = 1,
    ) -> _Columns:
        """Return `f32[rows, lanes, n]`, y with the adapters' product, of some columns.

        Args:
          y_ref: `[rows, d_out]`.
          columns: `i32[1, lanes, n]`, of B, a list for each module.
          inside: `bool[1, lanes, n]`, which columns are there; None if all are.
          pages_at_once: how many of an adapter's pages behind its first one.
        """
        max_count = self._page_table_ref.shape[1]

        def load_bs(n, page, there):
            return [self._load_b(page, there, column, inside) for column in columns[n]]

        # The first page is asked for before it is known which modules have it: its
        # loads do not wait for the counts. (1 us of a layer's four launches; 32 rows of
        # Llama-3.1-8B, one H100.) One module after the other: of two at once the
        # compiler holds so much that not all programs find room.
        sums = []
        for n, (v, own) in enumerate(zip(self._v, columns, strict=True)):
            bs = load_bs(n, self._page, self._page >= 0)
            # Behind B, for which a program waits longer.
            y = [self.load(y_ref, column, inside) for column in own]
            sums.append(self._added(y, n, 0, v, bs))
        if max_count == 1:
            return sums

        at_once = min(pages_at_once, max_count - 1)
        # Masks hold loads up. There are none where the loop's end says that all of a
        # turn's pages are there.
        masked = at_once > 1 or self.row.size > 1 or len(columns) > 1

        def add_turn(turn, sums):
            numbers = [1 + turn * at_once + k for k in range(at_once)]
            within = numbers
            if (max_count - 1) % at_once:  # the last turn goes past the table
                within = [jnp.minimum(number, max_count - 1) for number in numbers]
            pages = [self._look_up(number) for number in within]

            def add_to(n, sums):
                vs = [self._load_v(self._modules[n], number) for number in within]
                bs = [
                    load_bs(n, page, number < self._counts[n] if masked else None)
                    for number, page in zip(numbers, pages, strict=True)
                ]
                for number, v, of_page in zip(numbers, vs, bs, strict=True):
                    sums = self._added(sums, n, number, v, of_page)
                return sums

            return [add_to(n, own) for n, own in enumerate(sums)]

        most = functools.reduce(jnp.maximum, self._counts).max() - 1
        return lax.fori_loop(0, pl.cdiv(most, at_once), add_turn, sums)

    def _added(
        self,
        sums: Sequence[Array],
        n: int,
        number: Any,
        v: Array,
        bs: Sequence[Array],
    ) -> list[Array]:
        """Return sums of module n's columns with the product of one of its pages."""
        v, there = self._rounded(v), (number < self._counts[n])[:, None, None]
        products = [(v * _widened(b)).sum(axis=0) for b in bs]
        pairs = zip(sums, products, strict=True)
        return [y + jnp.where(there, own, 0) for y, own in pairs]

    def _look_up(self, number: Any) -> Array:
        """Return `i32[rows]`, where each row's page of that number is."""
        return load(self._page_table_ref.at[self._entry, number], self.live)

    def _load_b(
        self, page: Array, there: Array | None, column: Array, inside: Array | None
    ) -> Array:
        """Return `[16, rows, lanes, n]` of each row's page, or zeros."""
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None, None, None]
        shape = (RANK_PAGE, self.row.size, *column.shape[1:])
        there = None if there is None else there[None, :, None, None]
        mask = mask_of(shape, there, None if inside is None else inside[None])
        page = (self._first_page + page)[None, :, None, None]
        return load(self._b_ref.at[page, rank, column[None]], mask)

    def _load_v(self, module: Any, number: Any) -> Array:
        """Return `f32[16, rows, 2]`: v of a page's ranks, and zeros.

        So each of 32 lanes loads one value of a group, and `_rounded`
        exchanges the sums. Of `[16, rows]` every lane would load all: 128 registers for
        gate and up. 32 rows of ranks 8, 16 and 64 took 21.4 us there, now 18.1.
        """
        v_ref, max_count = self._v_ref, self._page_table_ref.shape[1]
        shape = (RANK_PAGE, self.row.size, LANES // RANK_PAGE)
        rank = jnp.arange(RANK_PAGE, dtype=jnp.int32)[:, None, None]
        if jnp.ndim(module):
            module = module[None, :, None]
        rank = rank + (module * max_count + number) * RANK_PAGE
        half = jnp.arange(LANES // RANK_PAGE, dtype=jnp.int32)[None, None, :]
        live = None if self.live is None else self.live[None, :, None]
        mask = mask_of(shape, live, half == 0)
        entry, rank = (
            jnp.broadcast_to(array, shape)
            for array in (self._entry[None, :, None], rank)
        )
        groups = range(v_ref.shape[0])
        parts = [load(v_ref.at[group, entry, rank], mask) for group in groups]
        return add_splits(parts)

    def _rounded(self, v: Array) -> Array:
        """Return `f32[16, rows, 1, 1]`, rounded as B is."""
        v, dtype = v.sum(axis=2), self._b_ref.dtype
        if self._weights_ref is not None:
            v *= load(self._weights_ref.at[0, self._entry], self.live)[None, :]
        return _widened(v.astype(dtype))[:, :, None, None]


def _widened(values: Array) -> Array:
    """Return them in float32: of bfloat16 an instruction each, a cast takes 1.5."""
    if values.dtype != jnp.bfloat16:
        return values.astype(jnp.float32)
    bits = lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def columns_of(block_n: int, lanes: int = LANES) -> Array:
    """Return `i32[1, lanes, n]`, numbers of columns: neighbours are one lane's.

    So a lane has all 16 ranks of a page of its columns, and adds them in their order,
    however many columns a program has.
    """
    lanes = min(lanes, block_n)
    width = block_n // lanes
    first = width * jnp.arange(lanes, dtype=jnp.int32)
    columns = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return columns[None]
