"""The adapters on the device, and how they get there.

Knows rank pages and slots as numbers; which of them are free, and what adapters are
called, is others' business.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from punica_jax.locked_pages import LockedPages
from punica_jax.memory import locked_bytes
from punica_jax.models import (
    MODULE_GROUPS,
    Adapter,
    EmptyBuffer,
    HostBuffer,
    LoraPools,
    PageShape,
    PoolTables,
    put_slot,
    slot_tables,
    write_weights,
)
from punica_jax.packing import Layout, pack, unpack


class StagedAdapter(NamedTuple):
    """An adapter on the device, not in the pools yet.

    Attributes:
      pages: module group -> its pages, as `PageShape.cut` takes them.
      tables: the slot that it is for, and its tables; packed.
    """

    pages: dict[str, list[jax.Array]]
    tables: jax.Array


class DevicePools:
    """Adapter pools that are written in place: one compiled program for each group.

    Attributes:
      pools: the adapters on the device; valid until the next write.
    """

    def __init__(self, pools: LoraPools):
        """Take over empty pools, and compile what writes them."""
        self.pools = pools
        self._device = next(iter(pools.qkv.a.devices()))
        # Here already: to bring a number takes longer than to launch a program.
        self._finite = jnp.bool_(True)
        self._indices = [jnp.int32(index) for index in range(pools.max_pages)]
        self._write_page: dict[str, Callable[..., Any]] = {}
        self._set_slot: Callable[..., Any]
        self._compile()

    @property
    def programs(self) -> list[str]:
        """Names of the compiled programs, one each."""
        return [*(f"write_page[{group}]" for group in MODULE_GROUPS), "set_slot"]

    def lock(self, host_bytes: float) -> EmptyBuffer:
        """Take page-locked host memory; what is read into it comes here faster.

        Args:
          host_bytes: what adapters may take of the host's memory in all.

        Returns:
          What makes such memory for a rank page, or other memory once it is used up.
        """
        num_bytes, dtype = locked_bytes(host_bytes, self._device), self.pools.dtype
        shapes = (self.pools.group(group).page_shape for group in MODULE_GROUPS)
        sizes = [shape.size(dtype) for shape in shapes]
        return LockedPages(self._device, sizes, dtype, num_bytes).empty

    def write(self, adapter: Adapter, pages: Mapping[str, Sequence[int]]) -> bool:
        """Write an adapter's weights to rank pages that no slot uses.

        Args:
          adapter: its weights, in the pools' dtype.
          pages: module group -> the pages for it.

        Returns:
          Whether all its values are finite, as the device found them.
        """
        staged = self.stage(adapter, 0, pages)
        self.wait(staged)  # a copy that fails must not take the pools with it
        return bool(self._write(staged))

    def show(
        self, slot: int, adapter: Adapter, pages: Mapping[str, Sequence[int]]
    ) -> None:
        """Point a slot at written pages: rows see the adapter from the next step on."""
        self._show(self._tables(slot, adapter, pages))

    def stage(
        self, adapter: Adapter, slot: int, pages: Mapping[str, Sequence[int]]
    ) -> StagedAdapter:
        """Begin to copy an adapter to the device, beside the pools.

        XLA has a copy wait for all steps that were launched before it began, since
        the memory that it goes to may be theirs: begin it before the next launch.

        Args:
          adapter: its weights, in the pools' dtype; kept until the copy is through.
          slot: the slot that it is for.
          pages: module group -> the pages for it.
        """
        copies = {
            group: list(map(self._copy, adapter.buffers(group)))
            for group in MODULE_GROUPS
        }
        return StagedAdapter(copies, self._tables(slot, adapter, pages))

    def wait(self, staged: StagedAdapter) -> float:
        """Wait for a copy, in any thread; return `time.monotonic()` of its end."""
        jax.block_until_ready(staged)
        return time.monotonic()

    def place(self, staged: StagedAdapter) -> Callable[[], bool]:
        """Write a staged adapter to its pages, and point its slot at them.

        Does not wait, not for the copy either: rows of the next step see it, and the
        device has that step wait. A copy that fails only then takes the pools with it,
        as any error of a launched program would; a device without room refuses it in
        `stage`.

        Args:
          staged: what `stage` began; no row of a step in flight may name its slot,
            and no slot in use its pages.

        Returns:
          What waits, and tells whether all its values are finite.
        """
        is_finite = self._write(staged)
        self._show(staged.tables)
        is_finite.copy_to_host_async()
        return lambda: bool(is_finite)

    def clear_slot(self, slot: int) -> None:
        """Empty a slot: rows that name it get no adapter's product."""
        self._show(self._tables(slot))

    def _copy(self, buffer: HostBuffer) -> jax.Array:
        """Begin to copy a page."""
        if not buffer.is_locked:
            return jax.device_put(buffer.array, self._device)
        sharding = SingleDeviceSharding(self._device, memory_kind="device")
        return jax.device_put(buffer.source, sharding)

    def _tables(
        self,
        slot: int,
        adapter: Adapter | None = None,
        pages: Mapping[str, Sequence[int]] | None = None,
    ) -> jax.Array:
        """Bring a slot's number and tables to the device, in one copy."""
        return jax.device_put(self._packed(slot, adapter, pages)[0], self._device)

    def _packed(
        self,
        slot: int,
        adapter: Adapter | None = None,
        pages: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[np.ndarray, Layout]:
        counts = None
        if adapter is not None:
            counts = {group: adapter.counts(group) for group in MODULE_GROUPS}
        tables = slot_tables(self.pools, pages, counts)
        return pack((np.asarray(slot, np.int32), tables))

    def _write(self, staged: StagedAdapter) -> jax.Array:
        """Write pages where the tables say; return whether all are finite, later."""
        is_finite = self._finite
        for group, own in staged.pages.items():
            pools, write = self.pools.group(group), self._write_page[group]
            weights = pools.a, pools.b
            for index, page in zip(self._indices, own, strict=False):
                weights, is_finite = write(
                    weights, is_finite, index, page, staged.tables
                )
            if own:
                a, b = weights
                pools = dataclasses.replace(pools, a=a, b=b)
                self.pools = dataclasses.replace(self.pools, **{group: pools})
        return is_finite

    def _show(self, packed: jax.Array) -> None:
        self.pools = self.pools.replace_tables(
            self._set_slot(self.pools.tables, packed)
        )

    def _compile(self) -> None:
        """Compile what writes, whatever is written.

        Not when it is called first: arrays that were copied from locked memory belong
        to a device by JAX's rules, and so would the pools from then on; every program
        that takes them would be compiled again.
        """
        packed, layout = self._packed(0)
        tables, pages = jax.device_put(packed, self._device), {}
        write = jax.jit(
            _write_packed,
            donate_argnums=0,
            static_argnames=("layout", "group", "shape"),
        )
        for group in MODULE_GROUPS:
            pools = self.pools.group(group)
            page = np.zeros(pools.page_shape.size(pools.a.dtype), pools.a.dtype)
            pages[group] = [page]
            self._write_page[group] = write.lower(
                *((pools.a, pools.b), self._finite, self._indices[0], page, tables),
                layout=layout,
                group=group,
                shape=pools.page_shape,
            ).compile()
        show = jax.jit(_show_packed, donate_argnums=0, static_argnames="layout")
        lowered = show.lower(self.pools.tables, tables, layout=layout)
        self._set_slot = lowered.compile()
        # Slot 0 is empty and page 0 free: writing zeros there changes nothing. Copied
        # all at once, as adapters are: the first time, a GPU's driver locks host memory
        # for it, and steps would have to wait for that (50 ms on an H200's host).
        copies = jax.block_until_ready(jax.device_put(pages, self._device))
        self._write(StagedAdapter(copies, tables))
        self._show(tables)


def _write_packed(
    weights: tuple[jax.Array, jax.Array],
    is_finite: jax.Array,
    index: jax.Array,
    page: jax.Array,
    packed: jax.Array,
    *,
    layout: Layout,
    group: str,
    shape: PageShape,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Write an adapter's page number `index` where its packed tables say."""
    _, tables = unpack(packed, layout)
    page_row, _ = tables[group]
    written, is_page_finite = write_weights(
        weights, page_row[index], shape.cut(page), shape.d_outs
    )
    return written, is_finite & is_page_finite


def _show_packed(shown: PoolTables, packed: jax.Array, layout: Layout) -> PoolTables:
    slot, tables = unpack(packed, layout)
    return put_slot(shown, slot, tables)
