"""What the LoRA kernels' bodies share: columns, an adapter's pages.

Runs inside kernels only. Knows refs; nothing of launches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._launch import split_number
from punica_jax.pallas_kernels._pool import RANK_PAGE
from punica_jax.pallas_kernels._sgmv_config import (
    MAX_AT_ONCE,
    add_splits,
    most_pages_at_once,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageLanes:
    """Some consecutive pages of an adapter side by side, `size` ranks in all.

    Attributes:
      page: each lane's page, `i32[size, 1]`, or the one page, `i32[]`.
      lane: `i32[size, 1]`, the rank within its page.
      rank: `i32[size]`, the rank within the adapter.
      used: `bool[size]`, whether the adapter has it; None if all are.
    """

    page: Array
    lane: Array
    rank: Array
    used: Array | None

    @property
    def size(self) -> int:
        return self.rank.size

    @property
    def used_rows(self) -> Array | None:
        return None if self.used is None else self.used[:, None]

    @property
    def used_columns(self) -> Array | None:
        return None if self.used is None else self.used[None, :]

    def columns(self, first: Array | int, num_columns: int) -> Array:
        """Return the ranks' columns of v; unused ones lie past the end."""
        columns = first + self.rank
        if self.used is None:
            return columns
        return jnp.where(self.used, columns, num_columns + self.rank)


def layer_starts(tables: Any, weights_ref: Any) -> tuple[Array | int, Array | int]:
    """Return where a layer's counts begin among those of all layers, and its pages.

    Args:
      tables: refs of the page table, the counts and the layer.
      weights_ref: `[layers * pages, ...]`, or a page's ranks one by one.
    """
    page_table_ref, num_pages_ref, layer_ref = tables
    num_slots = page_table_ref.shape[0]
    num_layers = num_pages_ref.shape[0] // num_slots
    if num_layers == 1:
        return 0, 0
    layer = layer_ref[0]
    return layer * num_slots, layer * (weights_ref.shape[0] // num_layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPages:
    """The pages that one module of the adapter in `slot` has.

    `most` of them at once, for then their loads overlap; but what a program holds of
    more leaves room for fewer programs.
    """

    page_table_ref: Any  # i32[slots, max_pages]
    slot: Array
    count: Array
    first: Array | int  # page of the layer
    # The adapter's first one, looked up beside the count: see `is_single`.
    page: Array
    most: int

    @classmethod
    def of(
        cls,
        tables: Any,
        weights_ref: Any,
        slot: Array,
        module: Any,
        most: int = MAX_AT_ONCE,
    ) -> "AdapterPages":
        """Look up the pages of a slot, none if it is below 0.

        Args:
          tables: refs of the page table, the counts and the layer.
          weights_ref: `[layers * pages, ...]`.
          slot: `i32[]`.
          module: which of the group's.
          most: pages at once, at most.
        """
        page_table_ref, num_pages_ref, _ = tables
        known = jnp.maximum(slot, 0)
        first_row, first = layer_starts(tables, weights_ref)
        return cls(
            page_table_ref=page_table_ref,
            slot=known,
            count=jnp.where(slot >= 0, num_pages_ref[first_row + known, module], 0),
            first=first,
            page=first + page_table_ref[known, 0],
            most=min(most, most_pages_at_once(weights_ref.dtype)),
        )

    @property
    def max_count(self) -> int:
        return self.page_table_ref.shape[1]

    @property
    def is_single(self) -> Array:
        """Whether there is one page; a branch on it waits for the page's number, too.

        A compiler moves a look-up behind the branch that alone needs it, where it would
        wait for the count. Not where there never are more pages: there it is asked for
        early, and a product takes 1 % longer so.
        """
        single = self.count == 1
        return single & (self.page >= 0) if self.max_count > 1 else single

    @property
    def width(self) -> int:
        """How many of them are taken at once."""
        return min(self.most, pl.next_power_of_2(self.max_count))

    def single(self) -> PageLanes:
        """Return the only page's lanes."""
        return _lanes_of(self.page, 0)

    def find(self, number: Array) -> tuple[Array, PageLanes]:
        """Return whether there is a page of that number, and its lanes."""
        lanes = self._lanes(number, 1)
        # At once, as in `is_single`.
        return (number < self.count) & (lanes.page >= 0), lanes

    @property
    def are_at_once(self) -> bool:
        """Whether all that a module may have are taken at once."""
        return self.width > 1 and self.width >= self.max_count

    def whole(self) -> PageLanes:
        """Return all pages' lanes, where they are taken at once."""
        return self._lanes(0, self.width)

    def fold(self, step: Callable[[PageLanes, Any], Any], init: Any) -> Any:
        """Fold `step(lanes, carry)` over the pages in order, several at once."""
        if self.are_at_once:
            return step(self.whole(), init)
        width = self.width
        return lax.fori_loop(
            0,
            pl.cdiv(self.count, width),
            lambda i, carry: step(self._lanes(i * width, width), carry),
            init,
        )

    def _lanes(self, first: Array | int, width: int) -> PageLanes:
        if width == 1:
            page = self.first + self.page_table_ref[self.slot, first]
            return _lanes_of(page, first)
        index = jnp.arange(width * RANK_PAGE, dtype=jnp.int32)
        rank = first * RANK_PAGE + index
        nth, lane = split_number(index, RANK_PAGE)
        number = first + nth
        used = number < self.count
        page = self.first + load(self.page_table_ref.at[self.slot, number], used)
        return PageLanes(page=page[:, None], lane=lane[:, None], rank=rank, used=used)


def _lanes_of(page: Array, index: Array | int) -> PageLanes:
    """Return the lanes of one page, an adapter's number `index`."""
    lane = jnp.arange(RANK_PAGE, dtype=jnp.int32)
    rank = index * RANK_PAGE + lane
    return PageLanes(page=page, lane=lane[:, None], rank=rank, used=None)


def module_of_block(
    block, d_outs: tuple[int, ...], offsets: tuple[int, ...], blocks: tuple[int, ...]
):
    """Return a column block's module, its first column, width, and block within it."""
    # Constants of a stated type: Pallas makes a choice of literals a boolean.
    module, start, width = (jnp.int32(value) for value in (0, 0, d_outs[0]))
    first = block
    for c in range(1, len(d_outs)):
        before = sum(blocks[:c])
        here = block >= before
        module = jnp.where(here, jnp.int32(c), module)
        start = jnp.where(here, jnp.int32(offsets[c]), start)
        width = jnp.where(here, jnp.int32(d_outs[c]), width)
        first = jnp.where(here, block - before, first)
    return module, start, width, first


def page_factor(
    lanes: PageLanes,
    *,
    v_ref: Any,  # f32[splits, passes * rows, C * max_rank]
    dtype: Any,  # of B
    entry: Array,  # i32[n], of v
    live: Array,  # bool[n]
    weight: Array | None,  # f32[n]
    first_rank: Array | int,  # the module's first rank in v
) -> Callable[[], Array]:
    """Begin to load a program's v of some pages; return what adds its splits.

    The sum is `[n, lanes]`, made once for all blocks of columns.
    """
    mask = mask_of((1, entry.size, lanes.size), live[:, None], lanes.used_columns)
    at = entry[None, :, None], lanes.columns(first_rank, v_ref.shape[2])[None, None, :]
    parts = [load(v_ref.at[(split, *at)], mask) for split in range(v_ref.shape[0])]

    # Called within the branch that began it: what is kept is a value of its trace.
    @functools.cache
    def add() -> Array:
        # This reduction, over an axis of one, keeps Triton from changing the layout of
        # every load for the product that follows. (Of 32 splits that once made 80
        # barriers instead of 15, and 16.8 us instead of 10.2.)
        v = add_splits(parts).sum(axis=0)
        if weight is not None:
            v = v * weight[:, None]
        return v.astype(dtype)

    return add


def page_product(
    lanes: PageLanes,
    factor: Callable[[], Array],
    b_ref: Any,  # [layers * pages, 16, d_out]
    column: Array,  # i32[block_n], of B
    inside: Array | None,  # bool[1, block_n]
) -> Callable[[], Array]:
    """Begin to load B of some pages; return what multiplies it by `page_factor`'s.

    The product is `f32[n, block_n]`. Add it to a sum at once: a GPU then adds
    16 ranks after the other to that, and pages multiplied at once give the bits of one
    after the other (`tests/test_walked_blocks.py`). It changes its factors' layout
    through shared memory, behind barriers that no later load passes: what a block
    needs, it loads before it multiplies.
    """
    b = load(
        b_ref.at[lanes.page, lanes.lane, column[None, :]],
        mask_of((lanes.size, column.size), lanes.used_rows, inside),
    )
    return lambda: dot(factor(), b)


def walk_blocks(count: int, work: Callable[[Any], None], *, unrolled: bool) -> None:
    """Do `work(i)` for each of a program's `count` blocks of columns.

    Unrolled it is where rows have a single page, as most have, or all pages at once;
    elsewhere a block has a loop of its own, over pages, and `count` of those would only
    be longer.
    """
    if unrolled or count == 1:
        for i in range(count):
            work(i)
    else:
        lax.fori_loop(0, count, lambda i, _: work(i), None)


def apply_options(out: Array, loaded: dict[str, Array], slot: Array) -> Array:
    """Scale, bias and residual of a tile of y; idle tiles get the residual alone."""
    for name in ("scale", "bias"):
        if name in loaded:
            vector = loaded[name].astype(jnp.float32)[None, :]
            changed = out * vector if name == "scale" else out + vector
            out = jnp.where(slot >= 0, changed, out)
    if "residual" in loaded:
        out = out + loaded["residual"].astype(jnp.float32)
    return out


def silu_product(gate: Array, up: Array) -> Array:
    """Return SiLU(gate) * up.

    Of `exp2` and `rsqrt`, for which Triton and Mosaic GPU take one instruction each:
    both give the same bits so, which they do not of a division.
    """
    root = lax.rsqrt(1 + jnp.exp2(gate * -math.log2(math.e)))
    return gate * (root * root) * up


def mask_of(shape: tuple[int, ...], *conditions: Array | None) -> Array | None:
    """Return the conjunction of those that are not None, of that shape; or None."""
    mask = None
    for condition in conditions:
        if condition is not None:
            mask = condition if mask is None else mask & condition
    return None if mask is None else jnp.broadcast_to(mask, shape)


def load(ref: Any, mask: Array | None) -> Array:
    """Load, with zeros where the mask is false."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def dot(a: Array, b: Array) -> Array:
    """Product with a float32 sum; float32 operands without TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, precision=precision)
