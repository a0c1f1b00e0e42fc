"""What adapters add to windows of 128 rows of gate and up, whosever these rows are.

`slots_of_windows` says which adapters a window has; `WindowAdapters` runs inside
`_gated_product`'s kernel. Knows rows, slots and pages; nothing of the base product.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._page_tiles import layer_starts
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import add_splits
from punica_jax.pallas_kernels._warpgroups import (
    GROUP_ROWS,
    WINDOW_ROWS,
    load,
    stage_of,
)

_LIBRARY: Any = plgpu  # its types are those of one version, or abstract
BLOCK_N = 128  # columns of gate, and of up
HALF_N = BLOCK_N // 2  # what is added to at once: registers hold no more
PAGE_STAGES = 4  # pages of B that are loaded or asked for, in turn


def adapter_operands(v: Array, pool: LoraPool, segments: Segments) -> tuple[Array, ...]:
    """Return what a launch's `WindowAdapters` take.

    Args:
      v: as `shrink` gives it.
      pool: of gate and up.
      segments: of the rows.
    """
    row_slots, entries, *windows = slots_of_windows(segments)
    v = add_splits(list(v))
    if segments.weights is not None:
        v = v * segments.weights[0][:, None]
    v = v.astype(pool.dtype)[entries]
    return (v, pool.b, *pool.tables, row_slots, *windows)


def slots_of_windows(segments: Segments) -> tuple[Array, Array, Array, Array]:
    """Return what a launch looks up of its rows' adapters.

    Returns:
      `i32[rows]`, each row's slot; `i32[rows]`, its entry; `i32[windows, most]`, the
      different slots of 128 rows; `i32[windows]`, how many of them there are.
    """
    rows, slots = segments.rows[0], segments.slots[0]
    entry = jnp.arange(rows.size, dtype=jnp.int32)
    scatter = functools.partial(jnp.zeros_like(rows).at[rows].set, unique_indices=True)
    row_slots, entries = scatter(slots), scatter(entry)
    own = row_slots.reshape(-1, WINDOW_ROWS)
    nth = jnp.arange(WINDOW_ROWS, dtype=jnp.int32)
    is_earlier = (nth[None, :] < nth[:, None])[None]
    is_known = ((own[:, :, None] == own[:, None, :]) & is_earlier).any(axis=2)
    is_first = (own >= 0) & ~is_known
    place = jnp.cumsum(is_first, axis=1, dtype=jnp.int32) - 1
    most = min(WINDOW_ROWS, segments.num_slots)
    is_there = is_first[:, None] & (place[:, None] == nth[None, :most, None])
    windows = jnp.where(is_there, own[:, None], 0).sum(axis=2, dtype=jnp.int32)
    return row_slots, entries, windows, is_first.sum(axis=1, dtype=jnp.int32)


class WindowAdapters:
    """What adapters add to gate and up of a window of rows. Lives in a kernel."""

    def __init__(self, refs, b_shared, loaded, used):
        self._v_ref, self._b_ref, *refs = refs
        tables, refs = refs[:3], refs[3:]
        self._row_slots_ref, self._slots_ref, self._count_ref = refs
        self._page_table_ref, self._num_pages_ref, _ = tables
        self._first_row, self._first_page = layer_starts(tables, self._b_ref)
        self._b_shared, self._loaded, self._used = b_shared, loaded, used

    def look(self, window, nth) -> list[Array]:
        """Look up one of a window's slots: it, its first page, counts of gate and up.

        Places that no slot has say 0, so there is always something to look up.
        """
        slot = self._slots_ref[window, jnp.minimum(nth, self._slots_ref.shape[1] - 1)]
        row = self._first_row + slot
        counts = (self._num_pages_ref[row, part] for part in range(2))
        return [slot, self._page(slot, 0), *counts]

    def _page(self, slot, number) -> Array:
        return self._first_page + self._page_table_ref[slot, number]

    def _fold(self, window, found, work, init):
        """Fold `work(slot, page, part, count, carry)` over gate and up of a window.

        `found` is the first one, looked up; so is each next one, a turn ahead.
        """

        def of_slot(nth, carry):
            (slot, page, *counts), carry = carry
            found = self.look(window, nth + 1)
            for part, count in enumerate(counts):
                carry = work(slot, page, part, count, carry)
            return found, carry

        return lax.fori_loop(0, self._count_ref[window], of_slot, (found, init))[1]

    def ask(self, window, found, column, width: int, step):
        """Ask for the pages of B of a window's adapters."""

        def ask_part(slot, page, part, count, step):
            columns = pl.ds(part * width + column, BLOCK_N)

            def ask_page(page, step):
                stage = stage_of(step, PAGE_STAGES)
                free = self._used.at[stage]
                pl.when(step >= PAGE_STAGES)(lambda: plgpu.barrier_wait(free))
                plgpu.copy_gmem_to_smem(
                    self._b_ref.at[page, :, columns],
                    self._b_shared.at[stage],
                    self._loaded.at[stage],
                )
                return step + 1

            look_up = functools.partial(self._page, slot)
            return _for_pages(count, page, look_up, ask_page, step)

        return self._fold(window, found, ask_part, step)

    def _load_v(self, rows, part: int, page):
        column = part * (self._v_ref.shape[1] // 2) + page * RANK_PAGE
        at = self._v_ref.at[rows, pl.ds(column, RANK_PAGE)]
        return load(at, optimized=False)

    def begin(self, window, rows):
        """Look up and load what a window's sums will need first."""
        by_row = plgpu.Layout.WGMMA.reduce(1)
        at = self._row_slots_ref.at[rows]
        slots = _LIBRARY.load(at, layout=by_row, optimized=False)
        firsts = [self._load_v(rows, part, 0) for part in range(2)]
        return self.look(window, 0), slots, firsts

    def add(self, window, rows, begun, step, halves):
        """Return the sums with the product added: both halves of gate, and of up."""
        found, row_slots, firsts = begun

        def add_part(slot, _, part, count, carry):
            shape = GROUP_ROWS, HALF_N
            is_own = lax.broadcast_in_dim(row_slots == slot, shape, [0])

            def add_page(v, carry):
                step, halves = carry
                stage = stage_of(step, PAGE_STAGES)
                plgpu.barrier_wait(self._loaded.at[stage])
                halves = list(halves)
                for half in range(2):
                    b = self._b_shared.at[stage, :, pl.ds(half * HALF_N, HALF_N)]
                    before = halves[2 * part + half]
                    # Selected, for others' rows of v and this B may be anything.
                    after = _product(v, b, before)
                    halves[2 * part + half] = jnp.where(is_own, after, before)
                plgpu.barrier_arrive(self._used.at[stage])
                return step + 1, halves

            load_v = functools.partial(self._load_v, rows, part)
            return _for_pages(count, firsts[part], load_v, add_page, carry)

        return self._fold(window, found, add_part, (step, halves))


def _for_pages(count, first, look_up, work, carry):
    """Fold `work(page, carry)` over pages, or v's columns of them.

    The first is known before its turn, for each look-up takes 0.1 us or more.
    """
    carry = lax.fori_loop(
        0, jnp.minimum(count, 1), lambda _, carry: work(first, carry), carry
    )
    return lax.fori_loop(
        1, count, lambda number, carry: work(look_up(number), carry), carry
    )


def _product(v: Array, b_shared, acc: Array) -> Any:
    def add(ref):
        plgpu.wgmma(ref, v, b_shared)

    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
