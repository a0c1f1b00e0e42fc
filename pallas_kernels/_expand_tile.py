"""What an adapter adds to some columns of some of its rows of y.

Those of a tile, or of its tiles in a window (`_entries`). Runs inside kernels only:
`_expand`'s, which is also a part of `_pair`'s. Knows refs; nothing of launches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._launch import split_number
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    PageLanes,
    apply_options,
    load,
    mask_of,
    page_product,
    walk_blocks,
)
from punica_jax.pallas_kernels._sgmv_config import ExpandConfig

# Of some columns, and which of them are there: begins to load what an adapter adds to
# them, and returns what adds it to y.
_Begin = Callable[[Array, Array | None], Callable[[Array], Array]]


class Columns(NamedTuple):
    """A program's columns of one module."""

    start: Array  # the module's first in y
    width: Array  # the module's
    first: Array  # the program's first, within the module
    size: Array  # the program's, at most


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpandTile:
    """A program's rows and columns, and what is added to them.

    Attributes:
      columns: of one module.
      crowded: `bool[]`, whether they are those of several programs, see `Crowd`; None
        where they never are.
      whole: whether no block of columns goes past a module's end.
      config: of the launch.
      row, live: `i32[n]` and `bool[n]`, the rows of y, and which there are.
      slot: `i32[]`, of their adapter; below 0 if they have none.
      pages: of the module.
      y_in_ref, y_ref: `[rows, d_out]`, of the same array.
      b_ref: `[layers * pages, 16, d_out]`.
      options: refs of what else is done to y; see `apply_options`.
      begin_factor: `page_factor` of the rows.
      wait: waits until v is there; None if it is.
    """

    columns: Columns
    crowded: Array | None
    whole: bool
    config: ExpandConfig
    row: Array
    live: Array
    slot: Array
    pages: AdapterPages
    y_in_ref: Any
    y_ref: Any
    b_ref: Any
    options: dict[str, Any]
    begin_factor: Callable[[PageLanes], Callable[[], Array]]
    wait: Callable[[], None] | None

    def add(self) -> None:
        """Add the adapter's product, and what the options say; wait once."""
        pages = self.pages
        pl.when(pages.is_single)(lambda: self._add_whole(pages.single))
        if pages.max_count > 1:
            pl.when(pages.count > 1)(self._add_several)
        if self.options:
            pl.when(pages.count == 0)(
                lambda: self._add_blocks(_begin_nothing, unrolled=False)
            )
        if self.wait is not None:
            pl.when(pages.count == 0)(self.wait)

    def _add_several(self) -> None:
        if self.pages.are_at_once:
            self._add_whole(self.pages.whole)
            return
        if self.wait is not None:
            self.wait()
        self._add_blocks(self._begin_pages, unrolled=False)

    def _add_whole(self, look_up: Callable[[], PageLanes]) -> None:
        """Add the product of all pages at once."""
        if self.crowded is None:
            self._add_at_once(look_up())
            return
        # One branch of two: two conditions took 140 registers, this 106.
        lax.cond(
            self.crowded,
            lambda: self._add_in_turn(look_up()),
            lambda: self._add_at_once(look_up()),
        )

    def _add_at_once(self, lanes: PageLanes) -> None:
        """Add it to all blocks; what they need is asked for before v is waited for."""
        if self.wait is None:
            factor = self.begin_factor(lanes)
        else:
            factor = functools.cache(functools.partial(self._factor, lanes))
        self._add_blocks(self._begin_lanes(lanes, factor), unrolled=True)

    def _add_in_turn(self, lanes: PageLanes) -> None:
        """Add it to a crowd's blocks in turn, in a loop that loads ahead."""
        assert self.config.crowd is not None
        columns, block_n = self.columns, self.config.crowd.block_n
        factor = self._factor(lanes)
        begin = self._begin_lanes(lanes, lambda: factor)
        size = jnp.minimum(columns.width - columns.first, columns.size)
        count, _ = split_number(size + block_n - 1, block_n)

        def add(i, _):
            self._add_block(begin, columns.first + i * block_n, block_n)

        lax.fori_loop(0, count, add, None)

    def _factor(self, lanes: PageLanes) -> Array:
        if self.wait is not None:
            self.wait()
        return self.begin_factor(lanes)()

    def _add_blocks(self, begin: _Begin, *, unrolled: bool) -> None:
        """Add something to each of the program's own blocks."""
        block_n = self.config.block_n

        def add(i):
            self._add_block(begin, self.columns.first + i * block_n, block_n)

        walk_blocks(self.config.num_blocks, add, unrolled=unrolled)

    def _add_block(self, begin: _Begin, first: Array, block_n: int) -> None:
        """Add to `block_n` columns from `first` of the module on."""
        columns, options = self.columns, self.options
        within = first + jnp.arange(block_n, dtype=jnp.int32)
        inside = None if self.whole else (within < columns.width)[None, :]
        column = columns.start + within
        at = (self.row[:, None], column[None, :])
        mask = mask_of((self.row.size, block_n), self.live[:, None], inside)

        def load_option(name: str) -> Array:
            if name == "residual":
                return load(options[name].at[at], mask)
            vector = options[name].at[jnp.maximum(self.slot, 0), column]
            return load(vector, within < columns.width)

        add = begin(column, inside)
        y = load(self.y_in_ref.at[at], mask).astype(jnp.float32)
        loaded = {name: load_option(name) for name in options}
        out = apply_options(add(y), loaded, self.slot)
        plgpu.store(self.y_ref.at[at], out.astype(self.y_ref.dtype), mask=mask)

    def _begin_lanes(self, lanes: PageLanes, factor: Callable[[], Array]) -> _Begin:
        def begin(column, inside):
            product = page_product(lanes, factor, self.b_ref, column, inside)
            return lambda y: y + product()

        return begin

    def _begin_pages(self, column, inside):
        def add(lanes, y):
            factor = self.begin_factor(lanes)
            return y + page_product(lanes, factor, self.b_ref, column, inside)()

        return functools.partial(self.pages.fold, add)


def _begin_nothing(column, inside):
    del column, inside
    return lambda y: y
