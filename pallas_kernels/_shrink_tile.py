"""Some rows of one adapter times its A, over some splits of d_in.

Those of a tile, or of many rows those of its tiles in a window (`_entries`), for each
program reads all of A: of 16384 rows of 32 adapters q, k, v's shrink takes 41 us so,
and 75 by tiles of 16 rows.

Runs inside kernels only: `_shrink`'s, and of a few rows `_project`'s. Knows refs;
nothing of launches.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    PageLanes,
    dot,
    load,
    mask_of,
)
from punica_jax.pallas_kernels._sgmv_config import (
    MAX_JOINT_MODULES,
    ShrinkConfig,
)


def shrink_modules(
    x_ref: Any,  # [rows, d_in]
    a_ref: Any,  # [layers * pages, C, 16, d_in]
    rows: tuple[Array, Array],  # i32[n], and bool[n]: which are live
    modules: Sequence[Any],
    pages_of: Callable[[Any], AdapterPages],
    store: Callable[[Any, PageLanes, Array], None],
    config: ShrinkConfig,
    *,
    part: Array,
    part_size: int,
    at_once: int = 1,
    page: Array | None = None,
) -> None:
    """Store x times A of some modules over some splits; see `shrink_splits`.

    Modules that have each a single page share the loads of x; others come one after the
    other.

    Args:
      x_ref, a_ref, rows, config, part, part_size: see `shrink_splits`.
      modules: which of the group's; of several, all.
      pages_of: looks up a module's pages.
      store: gets a module, some lanes of it, and their `f32[n, lanes]`.
      at_once: blocks of a module's single page that are loaded together.
      page: number of the only page to shrink, of one module; None for all that it has.
    """

    def multiply(modules, at_once=1):
        totals = shrink_splits(
            x_ref,
            a_ref,
            rows,
            modules,
            config,
            part=part,
            part_size=part_size,
            at_once=at_once,
        )
        for (module, lanes), total in zip(modules, totals, strict=True):
            store(module, lanes, total)

    if page is not None:
        [module] = modules
        is_there, lanes = pages_of(module).find(page)
        pl.when(is_there)(lambda: multiply([(module, lanes)], at_once))
        return

    def multiply_one(module, _=None):
        pages = pages_of(module)
        pl.when(pages.is_single)(lambda: multiply([(module, pages.single())], at_once))
        if pages.max_count > 1:
            pl.when(pages.count > 1)(
                lambda: pages.fold(lambda lanes, _: multiply([(module, lanes)]), None)
            )

    if len(modules) == 1:
        multiply_one(modules[0])
        return
    if len(modules) > MAX_JOINT_MODULES:
        lax.fori_loop(0, len(modules), multiply_one, None)
        return
    known = [(module, pages_of(module)) for module in modules]
    alike = functools.reduce(operator.and_, [pages.is_single for _, pages in known])
    pl.when(alike)(
        lambda: multiply([(module, pages.single()) for module, pages in known])
    )
    pl.when(~alike)(lambda: lax.fori_loop(0, len(modules), multiply_one, None))


def shrink_splits(
    x_ref: Any,  # [rows, d_in]
    a_ref: Any,  # [layers * pages, C, 16, d_in]
    rows: tuple[Array, Array],  # i32[n], and bool[n]: which are live
    modules: Sequence[tuple[Any, PageLanes]],
    config: ShrinkConfig,
    *,
    part: Array,
    part_size: int,
    at_once: int = 1,
) -> list[Array]:
    """Return `f32[n, lanes]` of each module: x times A, over some splits.

    The blocks of a split are added one by one, so are the splits of a group, and so
    the groups: `add_splits` of each split's sum, bitwise.

    Args:
      x_ref, a_ref, rows: what is multiplied.
      modules: which of the group's, and the lanes of each.
      config: of the blocks.
      part: which of the parts that the splits are cut into.
      part_size: splits of a part: one, a group's, or all.
      at_once: blocks that are loaded together, a divisor of `config.steps`.
    """
    row, live = rows
    d_in = a_ref.shape[3]
    whole = config.splits * config.steps * config.block_d == d_in
    first, num_splits = part * part_size, part_size
    if config.splits % part_size:  # the last part is shorter
        num_splits = jnp.minimum(part_size, config.splits - first)
    # Blocks after which a sum is added to that of the next level.
    ends_after = [config.steps]
    if part_size > config.group_size:
        ends_after.append(config.steps * config.group_size)

    def products(block):
        k = block * config.block_d + jnp.arange(config.block_d, dtype=jnp.int32)[None]
        inside = None if whole else k < d_in
        mask = mask_of((row.size, k.size), live[:, None], inside)
        x = load(x_ref.at[row[:, None], k], mask)
        for module, lanes in modules:
            mask = mask_of((lanes.size, k.size), lanes.used_rows, inside)
            a = load(a_ref.at[lanes.page, module, lanes.lane, k], mask)
            yield dot(x, a.T)

    def add_blocks(turn, levels):
        sums, *levels = levels
        for i in range(at_once):
            block = first * config.steps + turn * at_once + i
            pairs = zip(sums, products(block), strict=True)
            sums = [own + product for own, product in pairs]
        done = [sums]
        for blocks, level in zip(ends_after, levels, strict=True):
            ends = lax.rem((turn + 1) * at_once, jnp.int32(blocks)) == 0
            pairs = list(zip(level, done[-1], strict=True))
            level = [jnp.where(ends, own + below, own) for own, below in pairs]
            done[-1] = [jnp.where(ends, 0.0, below) for _, below in pairs]
            done.append(level)
        return done

    zeros = [jnp.zeros((row.size, lanes.size), jnp.float32) for _, lanes in modules]
    turns = num_splits * (config.steps // at_once)
    levels = [zeros] * (1 + len(ends_after))
    *_, unfinished, totals = lax.fori_loop(0, turns, add_blocks, levels)
    if part_size % config.group_size and len(ends_after) > 1:
        # The last group is shorter, and was not added yet.
        totals = [own + below for own, below in zip(totals, unfinished, strict=True)]
    return totals
