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

from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    PageLanes,
    load,
    mask_of,
    page_factor,
    page_product,
    tile_rows,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE


class AdapterTile:
    """One program's rows, and what their adapter adds to them. Lives in a kernel.

    Attributes:
      row: `i32[block_rows]`, out of range in dead lanes.
      live: `bool[block_rows]`.
      busy: whether there is a live row.
    """

    def __init__(self, refs: tuple[Any, ...], num_rows: int, block_rows: int):
        """Find program `pl.program_id(0)`'s rows; `refs` are of `Shrunk.operands`."""
        tile = pl.program_id(0)
        self._refs = refs
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
        return AdapterPages.of(tables, b_ref, self._slot, module, most=1)

    def when_busy(
        self, pages: Sequence[AdapterPages | None], work: Callable[[bool], None]
    ) -> None:
        """Do the work if there is a live row.

        Args:
          pages: of every module that the work adds a product of.
          work: gets whether each has a single page, as most have. Such rows go a way of
            their own, without a loop: all they need is on its way at once.
        """
        are_single = [own.count == 1 for own in pages if own is not None]
        if not are_single:
            pl.when(self.busy)(lambda: work(False))
            return
        single = functools.reduce(operator.and_, are_single)
        pl.when(self.busy & single)(lambda: work(True))
        pl.when(self.busy & ~single)(lambda: work(False))

    def begin_factor(
        self, module: Any, pages: AdapterPages | None
    ) -> Callable[[], Array] | None:
        """Begin to load v of a module's single page; None without adapters."""
        return None if pages is None else self._factor(module, pages, pages.single())

    def begin_sums(
        self,
        y_ref: Any,
        module: Any,
        pages: AdapterPages | None,
        columns: Sequence[Array],
        inside: Array | None,
        factor: Callable[[], Array] | None,
    ) -> Callable[[], list[Array]]:
        """Begin to load some columns of the rows, and what the adapter adds to them.

        Begin all that a block needs before it waits for any: see `page_product`.

        Args:
          y_ref: `[rows, d_out]`.
          module, pages: what the columns belong to.
          columns: `i32[n]` each.
          inside: `bool[1, n]`, which columns are there; None if all are.
          factor: what `begin_factor` gave, if the module is known to have one page. Of
            several each is loaded when it is waited for: to hold more leaves room for
            fewer programs.

        Returns:
          What waits for the sums: `f32[block_rows, n]` each.
        """

        def load_rows():
            return [self.load(y_ref, column, inside) for column in columns]

        if pages is None:
            ys = load_rows()
            return lambda: [y.astype(jnp.float32) for y in ys]

        def add(ys, products):
            # Of both halves of a head before either is added: 8192 rows of 16 adapters
            # take 179 us so, and 191 one after the other (one H200).
            values = [product() for product in products]
            pairs = zip(ys, values, strict=True)
            return [y.astype(jnp.float32) + value for y, value in pairs]

        def begin(lanes, factor):
            return [
                page_product(lanes, factor, self._refs[1], column, inside)
                for column in columns
            ]

        if factor is not None:
            ys, products = load_rows(), begin(pages.single(), factor)
            return lambda: add(ys, products)

        def add_page(lanes, sums):
            return add(sums, begin(lanes, self._factor(module, pages, lanes)))

        def add_pages():
            sums = [y.astype(jnp.float32) for y in load_rows()]
            return pages.fold(add_page, sums)

        return add_pages

    def _factor(
        self, module: Any, pages: AdapterPages, lanes: PageLanes
    ) -> Callable[[], Array]:
        return page_factor(
            lanes,
            v_ref=self._refs[0],
            dtype=self._refs[1].dtype,
            entry=self._entry,
            live=self.live,
            weight=self._weight,
            first_rank=module * (pages.max_count * RANK_PAGE),
        )
