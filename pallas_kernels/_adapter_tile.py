"""A tile of a launch's rows, and what their one adapter adds to them.

Runs inside kernels only. Knows pools' tables and pages as refs; nothing of what follows
the sums.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._entries import tile_rows
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    PageLanes,
    load,
    mask_of,
    page_factor,
    page_product,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE

# All lanes of a module, and what gives its v in them.
_Begun = tuple[PageLanes, Callable[[], Array]]


class AdapterTile:
    """One program's rows, and what their adapter adds to them. Lives in a kernel.

    Attributes:
      row: `i32[block_rows]`, out of range in dead lanes.
      live: `bool[block_rows]`.
      busy: whether there is a live row.
    """

    def __init__(
        self, refs: tuple[Any, ...], num_rows: int, block_rows: int, pages_at_once: int
    ):
        """Find program `pl.program_id(0)`'s rows.

        Args:
          refs: of `Shrunk.operands`, or none.
          num_rows: of the launch.
          block_rows: of a tile.
          pages_at_once: of the adapter, that are multiplied, at most.
        """
        tile = pl.program_id(0)
        self._refs, self._pages_at_once = refs, pages_at_once
        if not refs:
            lane = jnp.arange(block_rows, dtype=jnp.int32)
            self.row = tile * block_rows + lane
            self.live = self.row < num_rows
            self.busy = True
            return
        rows_ref, slot_ref, first_ref, end_ref = refs[5:9]
        self.busy = end_ref[0, tile] > first_ref[0, tile]
        self._slot = slot_ref[0, tile]
        self._entry, self.live, self.row = tile_rows(
            rows_ref, first_ref, end_ref, 0, tile, block_rows
        )
        self._weight = None
        if len(refs) > 9:
            self._weight = load(refs[9].at[0, self._entry], self.live)

    def load(self, ref: Any, column: Array, inside: Array | None) -> Array:
        """Return `[block_rows, columns]` of the tile's rows."""
        mask = mask_of((self.row.size, column.size), self.live[:, None], inside)
        return load(ref.at[self.row[:, None], column[None, :]], mask)

    def pages(self, module: Any) -> AdapterPages | None:
        """Look up one module's pages; call it before what waits for loads."""
        if not self._refs:
            return None
        _, b_ref, *tables = self._refs[:5]
        return AdapterPages.of(tables, b_ref, self._slot, module, self._pages_at_once)

    def when_busy(
        self,
        pages: Sequence[AdapterPages | None],
        work: Callable[[Sequence[PageLanes | None]], None],
    ) -> None:
        """Do the work if there is a live row.

        Args:
          pages: of every module that the work adds a product of.
          work: gets the lanes of each, if all that it has is multiplied at once, or
            None. Rows whose modules have a single page each, as most have, go a way of
            their own, for then nothing is masked.
        """
        known = [own for own in pages if own is not None]
        if not known:
            pl.when(self.busy)(lambda: work([None] * len(pages)))
            return
        single = functools.reduce(operator.and_, [own.is_single for own in known])
        pl.when(self.busy & single)(lambda: work([own.single() for own in known]))
        pl.when(self.busy & ~single)(
            lambda: work([own.whole() if own.are_at_once else None for own in known])
        )

    def begin_factor(self, module: Any, lanes: PageLanes | None) -> _Begun | None:
        """Begin to load v of all that a module has; None if `lanes` is."""
        return None if lanes is None else (lanes, self._factor(module, lanes))

    def begin_sums(
        self,
        y_ref: Any,
        module: Any,
        pages: AdapterPages | None,
        columns: Sequence[Array],
        inside: Array | None,
        begun: _Begun | None,
    ) -> Callable[[], list[Array]]:
        """Begin to load some columns of the rows, and what the adapter adds to them.

        Begin all that a block needs before it waits for any: see `page_product`.

        Args:
          y_ref: `[rows, d_out]`.
          module, pages: what the columns belong to.
          columns: `i32[n]` each.
          inside: `bool[1, n]`, which columns are there; None if all are.
          begun: what `begin_factor` gave. Without, some pages after the other are
            loaded when they are waited for: to hold more leaves room for fewer
            programs.

        Returns:
          What waits for the sums: `f32[block_rows, n]` each.
        """

        def load_rows():
            return [self.load(y_ref, column, inside) for column in columns]

        def begin_product(lanes, factor):
            return [
                page_product(lanes, factor, self._refs[1], column, inside)
                for column in columns
            ]

        def add(sums, products):
            # Of both halves of a head before either is added: 8192 rows of 16 adapters
            # take 179 us so, and 191 one after the other (one H200).
            values = [product() for product in products]
            pairs = zip(sums, values, strict=True)
            return [own.astype(jnp.float32) + value for own, value in pairs]

        if begun is not None:
            ys, products = load_rows(), begin_product(*begun)
            return lambda: add(ys, products)
        if pages is None:
            ys = load_rows()
            return lambda: [y.astype(jnp.float32) for y in ys]

        def add_page(lanes, sums):
            return add(sums, begin_product(lanes, self._factor(module, lanes)))

        def add_pages():
            sums = [y.astype(jnp.float32) for y in load_rows()]
            return pages.fold(add_page, sums)

        return add_pages

    def _factor(self, module: Any, lanes: PageLanes) -> Callable[[], Array]:
        max_pages = self._refs[2].shape[1]
        return page_factor(
            lanes,
            v_ref=self._refs[0],
            dtype=self._refs[1].dtype,
            entry=self._entry,
            live=self.live,
            weight=self._weight,
            first_rank=module * (max_pages * RANK_PAGE),
        )
