"""The adapters on the device, and how they get there.

Knows rank pages and slots as numbers; which of them are free, and what adapters are
called, is others' business.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from punica_jax.models import (
    MODULE_GROUPS,
    Adapter,
    AdapterReport,
    GroupPools,
    LoraPools,
    PoolTables,
    RankPage,
    put_slot,
    slot_tables,
    write_group_page,
)
from punica_jax.packing import Layout, pack, unpack


class StagedAdapter(NamedTuple):
    """An adapter on the device, not in the pools yet.

    Attributes:
      pages: module group -> its pages, whose arrays are the device's.
      counts: module group -> `i32[layers, C]`, the pages that each module uses.
      report: the adapter's.
    """

    pages: dict[str, list[RankPage]]
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
        self._write_page = jax.jit(
            _write_packed, donate_argnums=0, static_argnames=("layout", "group")
        )
        self._set_slot = jax.jit(
            _show_packed, donate_argnums=0, static_argnames="layout"
        )
        # Here already: to bring a number takes longer than to launch a program.
        self._finite = jnp.bool_(True)
        self._indices = [jnp.int32(index) for index in range(pools.max_pages)]
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
        staged = self.stage(adapter)
        packed = self._packed(0, pages, staged.counts)
        return bool(self._write(packed, staged.pages))

    def show(
        self, slot: int, adapter: Adapter, pages: Mapping[str, Sequence[int]]
    ) -> None:
        """Point a slot at written pages: rows see the adapter from the next step on."""
        counts = {group: adapter.counts(group) for group in pages}
        self._show(self._packed(slot, pages, counts))

    def stage(self, adapter: Adapter) -> StagedAdapter:
        """Copy an adapter to the device, beside the pools, and wait for it.

        Touches nothing that steps use: other threads may call it meanwhile.
        """
        pages = {
            group: [
                adapter.page(group, index) for index in range(adapter.num_pages(group))
            ]
            for group in MODULE_GROUPS
        }
        pages = jax.block_until_ready(jax.device_put(pages))
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
        packed = self._packed(slot, pages, staged.counts)
        is_finite = self._write(packed, staged.pages)
        self._show(packed)
        is_finite.copy_to_host_async()
        return lambda: bool(is_finite)

    def clear_slot(self, slot: int) -> None:
        """Empty a slot: rows that name it get no adapter's product."""
        self._show(self._packed(slot))

    def _packed(
        self,
        slot: int,
        pages: Mapping[str, Sequence[int]] | None = None,
        counts: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[jax.Array, Layout]:
        """Bring a slot's number and tables to the device, in one copy."""
        tables = slot_tables(self.pools, pages, counts)
        packed, layout = pack((np.asarray(slot, np.int32), tables))
        return jax.device_put(packed), layout

    def _write(
        self,
        packed: tuple[jax.Array, Layout],
        pages: Mapping[str, Sequence[RankPage]],
    ) -> jax.Array:
        """Write pages where the tables say; return whether all are finite, later."""
        is_finite = self._finite
        for group, own in pages.items():
            for index, page in zip(self._indices, own, strict=False):
                pools = self.pools.group(group)
                written, is_finite = self._write_page(
                    pools, is_finite, index, page, packed[0], packed[1], group
                )
                self.pools = dataclasses.replace(self.pools, **{group: written})
        return is_finite

    def _show(self, packed: tuple[jax.Array, Layout]) -> None:
        self.pools = self.pools.replace_tables(
            self._set_slot(self.pools.tables, *packed)
        )

    def _compile(self) -> None:
        layers, pages = self.pools.num_layers, {}
        for group in MODULE_GROUPS:
            pools = self.pools.group(group)
            (lanes, d_out), num_modules = pools.b.shape[1:], len(pools.d_outs)
            zeros = RankPage(
                np.zeros((layers, *pools.a.shape[1:]), pools.a.dtype),
                np.zeros((layers, d_out, lanes), pools.a.dtype),
                np.zeros((layers, num_modules), np.float32),
            )
            pages[group] = [zeros]
        # Slot 0 is empty and page 0 free: writing zeros there changes nothing. Copied
        # all at once, as adapters are: the first time, a GPU's driver locks host memory
        # for it, and steps would have to wait for that (50 ms on an H200's host).
        packed = self._packed(0)
        self._write(packed, jax.block_until_ready(jax.device_put(pages)))
        self._show(packed)


def _write_packed(
    pools: GroupPools,
    is_finite: jax.Array,
    index: jax.Array,
    page: RankPage,
    packed: jax.Array,
    layout: Layout,
    group: str,
) -> tuple[GroupPools, jax.Array]:
    """Write an adapter's page number `index` where its packed tables say."""
    _, tables = unpack(packed, layout)
    page_row, _ = tables[group]
    written, is_page_finite = write_group_page(pools, page_row[index], *page)
    return written, is_finite & is_page_finite


def _show_packed(shown: PoolTables, packed: jax.Array, layout: Layout) -> PoolTables:
    slot, tables = unpack(packed, layout)
    return put_slot(shown, slot, tables)
