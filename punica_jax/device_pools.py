"""The adapters on the device, and how they get there.

Knows rank pages and slots as numbers; which of them are free, and what adapters are
called, is others' business.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from punica_jax.models import (
    MODULE_GROUPS,
    Adapter,
    AdapterReport,
    LoraPools,
    SlotTables,
    put_slot,
    slot_tables,
    write_group_page,
)


class StagedAdapter(NamedTuple):
    """An adapter on the device, not in the pools yet.

    Attributes:
      pages: module group -> (A, B) of each page; see `Adapter.page`.
      counts: module group -> `i32[layers, C]`, the pages that each module uses.
      report: the adapter's.
    """

    pages: dict[str, list[tuple[jax.Array, jax.Array]]]
    counts: dict[str, np.ndarray]
    report: AdapterReport


class DevicePools:
    """Adapter pools that are written in place: one compiled program for each group.

    Attributes:
      pools: the adapters on the device; valid until the next write.
    """

    def __init__(self, pools: LoraPools):
        """Take over empty pools, and compile what writes them."""
        self.pools = pools
        self._write_page = jax.jit(write_group_page, donate_argnums=0)
        self._set_slot = jax.jit(put_slot, donate_argnums=0)
        self._compile()

    @property
    def programs(self) -> list[str]:
        """Names of the compiled programs, one each."""
        return [*(f"write_page[{group}]" for group in MODULE_GROUPS), "set_slot"]

    def write(self, adapter: Adapter, pages: Mapping[str, Sequence[int]]) -> bool:
        """Write an adapter's weights to rank pages that no slot uses.

        Args:
          adapter: its weights, in the pools' dtype.
          pages: module group -> the pages for it.

        Returns:
          Whether all its values are finite, as the device found them.
        """
        flags = [
            self._write(group, page, *adapter.page(group, index))
            for group, numbers in pages.items()
            for index, page in enumerate(numbers)
        ]
        return all(bool(flag) for flag in flags)

    def show(
        self, slot: int, adapter: Adapter, pages: Mapping[str, Sequence[int]]
    ) -> None:
        """Point a slot at written pages: rows see the adapter from the next step on."""
        counts = {group: adapter.counts(group) for group in pages}
        self._show(slot, slot_tables(self.pools, pages, counts))

    def stage(self, adapter: Adapter) -> StagedAdapter:
        """Copy an adapter to the device, beside the pools, and wait for it.

        Touches nothing that steps use: other threads may call it meanwhile.
        """
        pages = {
            group: [
                jax.device_put(adapter.page(group, index))
                for index in range(adapter.num_pages(group))
            ]
            for group in MODULE_GROUPS
        }
        jax.block_until_ready(pages)
        counts = {group: adapter.counts(group) for group in MODULE_GROUPS}
        return StagedAdapter(pages, counts, adapter.report)

    def place(
        self, slot: int, staged: StagedAdapter, pages: Mapping[str, Sequence[int]]
    ) -> Callable[[], bool]:
        """Write a staged adapter to its pages, and point a slot at them.

        Does not wait: rows of the next step see it.

        Args:
          slot: the slot; no row of a step in flight may name it.
          staged: what `stage` returned.
          pages: module group -> the pages for it, which no slot in use names.

        Returns:
          What waits, and tells whether all its values are finite.
        """
        flags = [
            self._write(group, page, *arrays)
            for group, numbers in pages.items()
            for page, arrays in zip(numbers, staged.pages[group], strict=True)
        ]
        self._show(slot, slot_tables(self.pools, pages, staged.counts))
        for flag in flags:
            flag.copy_to_host_async()
        return lambda: all(jax.device_get(flags))

    def clear_slot(self, slot: int) -> None:
        """Empty a slot: rows that name it get no adapter's product."""
        self._show(slot, slot_tables(self.pools))

    def _write(
        self,
        group: str,
        page: int,
        a_page: np.ndarray | jax.Array,
        b_page: np.ndarray | jax.Array,
    ) -> jax.Array:
        """Write one page; return whether it is finite, without waiting."""
        written, finite = self._write_page(
            self.pools.group(group), np.int32(page), a_page, b_page
        )
        self.pools = dataclasses.replace(self.pools, **{group: written})
        return finite

    def _show(self, slot: int, tables: SlotTables) -> None:
        shown = self._set_slot(self.pools.tables, np.int32(slot), tables)
        self.pools = self.pools.replace_tables(shown)

    def _compile(self) -> None:
        # Slot 0 is empty and page 0 free: writing zeros there changes nothing.
        for group in MODULE_GROUPS:
            pools, layers = self.pools.group(group), self.pools.num_layers
            shapes = (pools.a[0].shape[1:], pools.b[0].shape[1:])
            zeros = [np.zeros((layers, *shape), pools.a[0].dtype) for shape in shapes]
            self._write(group, 0, *zeros)
        self.clear_slot(0)
